"""KV blocks in Ray's object store that are late."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

ray = pytest.importorskip("ray")

from edgellm.cache.block_store import enclosed  # noqa: E402
from edgellm.ray.prefill import ObjectStore  # noqa: E402

NAMES = [bytes([number]) * 32 for number in range(3)]


def test_blocks_that_are_late_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are read in the engine's thread: a node that hangs must not hold up all answers."""
    asked: list[str] = []

    def wait(references: Sequence[str], **_: object) -> tuple[list[str], list[str]]:
        return [each for each in references if each != "late"], ["late"]

    def get(reference: str, **_: object) -> bytes:
        asked.append(reference)
        return enclosed(NAMES[int(reference)], b"data")

    monkeypatch.setattr("edgellm.ray.prefill.ray.wait", wait)
    monkeypatch.setattr("edgellm.ray.prefill.ray.get", get)
    store = ObjectStore(references=dict(zip(NAMES, ("0", "late", "2"), strict=True)))
    store.fetch(timeout_s=1)
    found = [store.read(name, size=4) for name in NAMES]
    assert [None if block is None else bytes(block) for block in found] == [b"data", None, b"data"]
    assert asked == ["0", "2"]
    assert not store.has(NAMES[1])
