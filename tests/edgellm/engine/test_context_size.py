"""The context of a model where none is asked for: its own, as far as memory holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from edgellm import MemoryEstimateError, OptionError
from edgellm.backends.selection import Selection, select
from edgellm.engine.memory import check_fits, context_note, estimate
from edgellm.llm import load
from edgellm.options import EngineOptions
from edgellm.serve.served import card_of
from edgellm.store.bundle import Bundle, open_bundle

GIB = 1 << 30


@pytest.fixture(scope="module")
def long(folder: str) -> Bundle:
    """The tiny model, as if trained for 131,072 tokens."""
    bundle = open_bundle(Path(folder))
    config = replace(bundle.config, context_length=131_072)
    return replace(bundle, manifest=replace(bundle.manifest, config=config))


def memory(monkeypatch: pytest.MonkeyPatch, *, total: int, available: int) -> None:
    class Memory:
        pass

    found = Memory()
    found.total, found.available = total, available  # type: ignore[attr-defined]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)


def context(bundle: Bundle, **options: object) -> int:
    chosen = EngineOptions(kv_format="f32", **options)  # type: ignore[arg-type]
    return estimate(bundle, chosen, select(chosen)).ctx_size


def test_a_model_has_its_own_context_where_there_is_room(
    long: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(monkeypatch, total=64 * GIB, available=32 * GIB)
    assert context(long) == 131_072
    assert context(long, ctx_size=0) == 131_072
    assert context(long, ctx_size=100) == 100
    assert context_note(long.config, EngineOptions(), 131_072) is None


def test_a_full_cache_takes_a_quarter_of_the_memory(
    long: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(monkeypatch, total=GIB // 2, available=GIB // 2)
    size = context(long)
    assert 4096 < size < 131_072
    assert size % 1024 == 0
    options = EngineOptions(kv_format="f32")
    full = estimate(long, options, select(options)).kv_cache
    larger = replace(options, ctx_size=size + 1024)
    assert full <= GIB // 8 < estimate(long, larger, select(options)).kv_cache
    note = context_note(long.config, options, size)
    assert note is not None
    assert f"context of {size} of the model's 131072 tokens" in note
    assert context_note(long.config, EngineOptions(ctx_size=size), size) is None


def test_little_free_memory_makes_it_smaller(long: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, total=64 * GIB, available=64 * GIB)
    whole = context(long)
    memory(monkeypatch, total=64 * GIB, available=(110 << 20) + GIB // 16)
    assert 4096 < context(long) < whole
    memory(monkeypatch, total=64 * GIB, available=1 << 20)
    assert context(long) == 4096
    options = EngineOptions()
    with pytest.raises(MemoryEstimateError, match="ctx_size"):
        check_fits(estimate(long, options, select(options)))


def test_a_limit_and_a_cache_bound_it(long: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, total=64 * GIB, available=64 * GIB)
    limited = context(long, memory_limit_bytes=GIB // 2)
    assert 4096 < limited < 131_072
    assert context(long, cache_size=9000) == 9000
    with pytest.raises(OptionError, match="`cache_size` is 100"):
        context(long, ctx_size=200, cache_size=100)
    with pytest.raises(OptionError, match="are 131072 at most"):
        context(long, ctx_size=200_000)


def test_a_cache_on_a_gpu_gets_memory_at_once(
    long: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(monkeypatch, total=64 * GIB, available=64 * GIB)
    on_gpu = Selection(prefill="triton", decode="triton", policy="serial")
    assert estimate(long, EngineOptions(), on_gpu).ctx_size == 4096


def test_the_context_that_a_server_tells_is_that_of_the_model(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that other programs take later does not change it."""
    model = make_model(max_position_embeddings=131_072)
    llm = load(str(model), memory_limit_bytes=GIB // 2, kv_format="f32")
    memory(monkeypatch, total=64 * GIB, available=1 << 20)
    assert card_of(llm.engine).ctx_size == llm.ctx_size > 4096
    assert any("of the model's 131072 tokens" in note for note in llm.notes)
