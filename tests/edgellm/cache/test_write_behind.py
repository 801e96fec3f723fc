"""Blocks on their way to a slow disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inspection import until_kept
from waiting import CEILING_S

from edgellm.cache.disk_cache import DiskCache, WriteBehind
from edgellm.llm import load

NAMES = [bytes([i]) * 32 for i in range(6)]


class Slow:
    """A store that takes nothing in before it is let go, and room for so many blocks."""

    def __init__(self, room: int = 99) -> None:
        self.go = threading.Event()
        self.blocks: dict[bytes, bytes] = {}
        self.pinned: list[bytes] = []
        self._room = room

    def has(self, name: bytes) -> bool:
        return name in self.blocks

    def read(self, name: bytes, *, size: int) -> memoryview | None:
        return memoryview(self.blocks[name]) if name in self.blocks else None

    def write(self, name: bytes, data: bytes) -> bool:
        assert self.go.wait(CEILING_S)
        assert name in self.pinned or not self.pinned
        if len(self.blocks) == self._room:
            return False
        self.blocks[name] = data
        return True

    @contextmanager
    def pin(self, names: Iterable[bytes]) -> Iterator[None]:
        self.pinned = list(names)
        yield
        self.pinned = []


def write_all(behind: WriteBehind, names: list[bytes]) -> list[bool]:
    with behind.pin(name for name in names):
        return [behind.write(name, name[:2] * 50) for name in names]


def test_blocks_are_there_while_they_wait() -> None:
    slow = Slow()
    behind = WriteBehind(slow)
    assert write_all(behind, NAMES[:3]) == [True] * 3
    assert behind.write(NAMES[4], bytes(100))
    assert not slow.blocks
    assert [behind.has(name) for name in NAMES] == [True, True, True, False, True, False]
    block = behind.read(NAMES[1], size=100)
    assert block is not None
    assert bytes(block) == b"\1" * 100
    assert behind.read(NAMES[3], size=100) is None
    slow.go.set()
    behind.wait()
    assert list(slow.blocks) == [*NAMES[:3], NAMES[4]]
    assert behind.read(NAMES[1], size=100) == block


def test_what_finds_no_room_is_gone() -> None:
    slow = Slow(room=2)
    behind = WriteBehind(slow)
    slow.go.set()
    write_all(behind, NAMES)
    behind.wait()
    assert [behind.has(name) for name in NAMES] == [True] * 2 + [False] * 4


def test_no_more_waits_than_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.cache.disk_cache._MOST_BYTES", 250)
    slow = Slow()
    behind = WriteBehind(slow)
    assert write_all(behind, NAMES[:4]) == [True, True, False, False]
    slow.go.set()
    behind.wait()
    assert write_all(behind, NAMES[2:4]) == [True, True]
    behind.wait()
    assert list(slow.blocks) == NAMES[:4]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_is_forked_meanwhile_writes_its_own() -> None:
    slow = Slow()
    behind = WriteBehind(slow)
    write_all(behind, NAMES[:2])
    child = os.fork()
    if child == 0:
        try:
            slow.go = threading.Event()
            slow.go.set()
            write_all(behind, NAMES[2:4])
            behind.wait()
            os._exit(0 if list(slow.blocks) == NAMES[2:4] else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    slow.go.set()
    behind.wait()
    assert list(slow.blocks) == NAMES[:2]


def test_answers_do_not_wait_for_a_disk_that_hangs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), DiskCache.write

    def hang(disk: DiskCache, name: bytes, data: bytes) -> bool:
        assert go.wait(CEILING_S)
        return write(disk, name, data)

    monkeypatch.setattr(DiskCache, "write", hang)
    llm = load(str(tiny_model), kv_cache_dir=tmp_path)
    for first in (3, 4):
        assert llm.generate([first, *range(5, 200)], max_tokens=3, ignore_eos=True).tokens
    assert not list(tmp_path.glob("*.kv"))
    go.set()
    until_kept(llm)
    assert len(list(tmp_path.glob("*.kv"))) == 2


def test_a_closed_model_has_written_its_blocks(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, write, wait = threading.Event(), DiskCache.write, WriteBehind.wait

    def late(disk: DiskCache, name: bytes, data: bytes) -> bool:
        assert waiting.wait(CEILING_S)
        return write(disk, name, data)

    def watched(behind: WriteBehind) -> None:
        waiting.set()
        wait(behind)

    monkeypatch.setattr(DiskCache, "write", late)
    monkeypatch.setattr(WriteBehind, "wait", watched)
    llm = load(str(tiny_model), kv_cache_dir=tmp_path)
    llm.generate(range(3, 200), max_tokens=3)
    assert not list(tmp_path.glob("*.kv"))
    llm.close()
    assert len(list(tmp_path.glob("*.kv"))) == 1
