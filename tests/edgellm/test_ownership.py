"""Whose blocks are whose: what is dropped is given back, and nothing is cut off at the root."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import paused, until_kept, used_blocks
from waiting import until

from edgellm import GenerationOptions
from edgellm.cache.block_store import pack
from edgellm.kernels.kv_blocks import BLOCK, KV_FORMATS, allocate
from edgellm.llm import LLM, load

ONE = GenerationOptions(temperature=0.0, max_tokens=1, ignore_eos=True)


@pytest.fixture
def small(tiny_model: Path) -> LLM:
    """A cache of nine blocks, where one sequence may take eight."""
    return load(str(tiny_model), ctx_size=8 * BLOCK, cache_size=8 * BLOCK)


def prompt(first: int, length: int = 300) -> list[int]:
    return [first, *((7 * i + first) % 250 for i in range(length - 1))]


def test_dropped_sessions_chats_and_streams_give_their_blocks_back(small: LLM) -> None:
    for i in range(40):
        session = small.session()
        session.append(prompt(i % 250))
        session.generate(options=ONE)
        small.chat(temperature=0, max_tokens=1).send(f"{i} " * 80)
        branch = session.fork()
        stream = branch.stream(temperature=0, max_tokens=3, ignore_eos=True)
        next(stream)
        del stream, branch
    del session
    assert used_blocks(small) == 0
    assert small.generate(prompt(3), max_tokens=1).stats.prompt_tokens == 300


def test_dropped_in_a_reference_cycle(small: LLM) -> None:
    gc.disable()  # so that only a full cache collects
    try:
        for i in range(8):
            session = small.session()
            session.append(prompt(i))
            session.generate(options=ONE)
            session.itself = session  # type: ignore[attr-defined]
        del session
        assert small.generate(prompt(99, 700), max_tokens=1).stats.prompt_tokens == 700
    finally:
        gc.enable()


def test_held_sessions_make_room(small: LLM) -> None:
    held = [small.session() for _ in range(3)]
    for i, session in enumerate(held):
        session.append(prompt(i))
        session.generate(options=ONE)
    assert small.generate(prompt(99, 700), max_tokens=1).stats.prompt_tokens == 700
    assert any(not session.cached for session in held)


def test_a_stream_that_is_collected_in_the_middle_of_a_step_does_not_wait(small: LLM) -> None:
    class Cycle:
        stream: Any
        itself: Any

    def drop(collect: Callable[[], object]) -> None:
        cycle = Cycle()
        session = small.session()
        session.append(prompt(1))
        cycle.stream = session.stream(temperature=0, ignore_eos=True)
        cycle.itself = cycle
        next(cycle.stream)
        del session, cycle
        collect()

    def in_the_middle() -> None:
        with paused(small):
            gc.collect()

    def by_the_engine() -> None:
        small.engine.thread.call(gc.collect)

    for collect in (in_the_middle, by_the_engine):
        drop(collect)
        assert used_blocks(small) == 0


def test_a_dropped_answer_is_kept_on_disk_though_the_cache_is_busy(
    tiny_model: Path, tmp_path: Path
) -> None:
    llm = load(str(tiny_model), kv_cache_dir=tmp_path)
    stream = llm.stream(prompt(1), temperature=0, ignore_eos=True)
    next(stream)
    with paused(llm):  # as another thread's prompt would
        stream.close()
        assert not list(tmp_path.glob("*.kv"))
    assert used_blocks(llm) == 0
    until_kept(llm)
    assert len(list(tmp_path.glob("*.kv"))) == 300 // BLOCK


def test_an_answer_that_the_end_of_a_program_cuts_off_is_kept_on_disk(
    tiny_model: Path, tmp_path: Path
) -> None:
    script = f"""
import edgellm
llm = edgellm.load({str(tiny_model)!r}, kv_cache_dir={str(tmp_path)!r})
for piece in llm.stream({prompt(1)}, max_tokens=500, temperature=0, ignore_eos=True):
    break
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert len(list(tmp_path.glob("*.kv"))) >= 300 // BLOCK


def test_closing_waits_for_no_prefill(small: LLM) -> None:
    session = small.session()
    session.append(prompt(1))
    session.generate(options=ONE)
    with paused(small):  # as another thread's prompt would
        closed = threading.Thread(target=session.close, daemon=True)
        closed.start()
        closed.join(timeout=60)
        assert not closed.is_alive()
    assert used_blocks(small) == 0


def test_one_eviction_costs_the_end_of_a_prefix_and_not_its_root(small: LLM) -> None:
    tokens = prompt(1, 7 * BLOCK + 1)
    small.generate(tokens, max_tokens=1)
    small.generate(prompt(2, 3 * BLOCK), max_tokens=1)  # two blocks are free, so one is taken
    again = small.generate(tokens, max_tokens=1)
    assert again.stats.cached_tokens >= 5 * BLOCK


def test_a_model_is_freed_with_its_last_reference(tiny_model: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        llm = load(str(tiny_model), ctx_size=256)
        llm.generate(prompt(1, 100), max_tokens=2)
        session = llm.session()
        session.append(prompt(2, 100))
        session.generate(options=ONE)
        cache = weakref.ref(llm.engine.cache)
        with contextlib.suppress(ZeroDivisionError):
            llm.generate(prompt(1, 100), logit_filter=_broken)
        del session, llm
        until(lambda: cache() is None)  # the engine's thread may just let go of it
    finally:
        gc.enable()


def _broken(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("format", KV_FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 15, 16, 17, 127, 128])
def test_a_saved_block_has_no_rows_of_its_last_owner(format: Any, rows: int) -> None:
    blocks = allocate(format=format, blocks=2, layers=2, kv_heads=3, head_dim=8)
    clean = allocate(format=format, blocks=2, layers=2, kv_heads=3, head_dim=8)
    for array, expected in zip(blocks.arrays, clean.arrays, strict=True):
        array.view(np.uint8)[...] = 0xA5  # somebody else's, in every byte
        expected[...] = 0
    clean.copy_rows(0, 0, 0)
    random = np.random.default_rng(rows)
    written = random.integers(-8, 8, (max(rows, 1), 3, 8)) * 2 + 1
    for layer in range(2):
        for pool in (blocks, clean):
            pool.write([0, 1], layer, 0, written[:rows], written[:rows])
            for scale in (pool.k_scale, pool.v_scale):
                if scale is not None:
                    scale[0, layer, :, :rows] = 0.5
    assert pack(blocks, [0], tokens=rows) == pack(clean, [0])


def test_a_session_file_holds_its_own_tokens_alone(tiny_model: Path, tmp_path: Path) -> None:
    """A short session in blocks that others had, against one in fresh ones: the same bytes."""

    def saved(llm: LLM, name: str) -> bytes:
        with llm.session() as session:
            session.append(prompt(7, 140))
            session.generate(options=ONE)
            session.save(tmp_path / name)
        return (tmp_path / name).read_bytes()

    fresh, worn = (load(str(tiny_model), ctx_size=256, cache_size=256) for _ in range(2))
    for i in range(5):
        worn.generate(prompt(i, 250), max_tokens=1)
    assert saved(worn, "worn") == saved(fresh, "fresh")
