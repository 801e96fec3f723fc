"""Prompts in chunks of static size whose rows rest between two layers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import cached_prefix, policy, set_costs, step_in_readers, used_blocks
from layered_checks import LAYERS, PROMPTS, STREAM, Groups, in_company, start_layered
from loop_checks import assert_idle
from loops import SHORT, alone, assert_same, prompt, short, together, tokens_of

from edgellm import CacheFullError, Completion
from edgellm.backends.chunk import Chunk
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.forward import Model
from edgellm.backends.planner import Costs
from edgellm.engine.prefill_job import Layered
from edgellm.export import export
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import LLM, load

SIZE = 32
# Fewer prompts: one shorter than a chunk, one of a token, and two of many chunks.
FEW = PROMPTS[3:7]
PRECISIONS = ("f32", "w8a8", "w8a16-qdq", "w8a8-qdq")
HOST = "portable" if library() is None else "native"
needs_native = pytest.mark.skipif(library() is None, reason="needs the native kernels")


@pytest.fixture(scope="module")
def folder(
    export_static: Callable[..., Path], deep_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """One size of chunks: who shares them, and how many there are, changes no bits."""
    out, precisions = tmp_path_factory.mktemp("deep") / "bundle", (*PRECISIONS, "int4", "packed")
    return str(export_static(out, model=deep_model, precisions=precisions, chunk_sizes=(SIZE,)))


@pytest.fixture(scope="module")
def two_sizes(deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("sizes") / "bundle"
    precisions = ("f32", "int4", "packed")
    export(
        deep_model, out, name="tiny", source="tiny", precisions=precisions, chunk_sizes=(32, 128)
    )
    return str(out)


@pytest.fixture(scope="module")
def windowed_folder(windowed_deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out, source = tmp_path_factory.mktemp("windows") / "bundle", windowed_deep_model
    precisions = ("f32", "int4", "packed")
    export(source, out, name="tiny", source="tiny", precisions=precisions, chunk_sizes=(SIZE,))
    return str(out)


def options_of(**options: Any) -> dict[str, Any]:
    return {"prefill": "cpu", "decode": "chunked", "ctx_size": 1024, **options}


def start(folder: str, **options: Any) -> LLM:
    return start_layered(folder, **options_of(**options))


def serially(folder: str, prompts: Sequence[list[int]], **options: Any) -> list[Completion]:
    chosen = {"scheduling": "serial", "cache_size": 64 * BLOCK, **options_of(**options)}
    llm = load(folder, **chosen)
    return alone(llm, short(prompts, logprobs=3))


def assert_as(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """The same bits; numpy's depend on how many rows are computed at once, and are as good as."""
    if library() is not None:
        assert_same(found, expected)
        return
    assert tokens_of(found) == tokens_of(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=0.1)  # codes of 8 bits move


@pytest.fixture
def watched(folder: str, monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, Groups]:
    """Chunks of w8a16, whose first tokens are the host's; no stream runs ahead."""
    llm = start(folder, precision="w8a16-qdq")
    step_in_readers(llm, monkeypatch)
    return llm, Groups(llm, monkeypatch)


# What is computed.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("f32", {"decode": "chunked", "schedule": "out-of-order"}),
        ("w8a8", {"decode": "chunked"}),
        pytest.param("w8a16-qdq", {"decode": HOST}, marks=needs_native),
        ("w8a16-qdq", {"decode": "chunked", "schedule": "out-of-order"}),
        ("w8a8-qdq", {"decode": HOST}),
    ],
    ids=str,
)
def test_the_bits_are_those_of_one_after_the_other(
    folder: str, precision: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else is there, and whether rows rest or not; and of stall_free."""
    options = {"precision": precision, **options}
    expected = serially(folder, FEW, **options)
    llm = start(folder, **options)
    step_in_readers(llm, monkeypatch)
    groups = Groups(llm, monkeypatch)
    assert_as(together(llm, short(FEW, logprobs=3)), expected)
    assert sum(layers.stop == LAYERS for layers in groups.layers) > 3
    assert max(len(layers) for layers in groups.layers) < LAYERS
    assert llm.engine.loop.counts.prefill_rows >= sum(map(len, FEW))
    assert_idle(llm)
    stall_free = start(folder, scheduling="stall_free", **options)
    assert_as(together(stall_free, short(FEW, logprobs=3)), expected)


@pytest.mark.parametrize("decode", [pytest.param(HOST, marks=pytest.mark.slow), "chunked"])
def test_windows_are_passed_while_rows_rest(
    windowed_folder: str, decode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = serially(windowed_folder, FEW, precision="f32", decode=decode)
    llm = start(windowed_folder, precision="f32", decode=decode)
    groups = Groups(llm, monkeypatch)
    assert_as(together(llm, short(FEW, logprobs=3)), expected)
    assert sum(layers.stop == LAYERS for layers in groups.layers) > 3
    assert_idle(llm)


def test_native_prompts_beside_portable_decode(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library() is None:
        pytest.skip("needs the native kernels")
    options = {"prefill": "native", "decode": "portable"}
    expected = serially(folder, PROMPTS[1:3], **options)
    llm = start(folder, **options)
    groups = Groups(llm, monkeypatch)
    assert_same([in_company(llm, each, logprobs=3) for each in PROMPTS[1:3]], expected)
    assert groups.layers


# How often segments run, and when.


def test_all_chunks_pass_a_group_before_the_next_one_and_streams_go_on_between(
    watched: tuple[LLM, Groups],
) -> None:
    llm, groups = watched
    decoded: list[int] = []
    groups.before = lambda _: decoded.append(llm.engine.loop.counts.decode_rows)
    in_company(llm, PROMPTS[9])
    assert len(groups.layers) > 6
    assert all(a < b for a, b in itertools.pairwise(decoded))
    passed = 0
    for layers, rows in zip(groups.layers, groups.rows, strict=True):
        assert layers.start == passed % LAYERS
        passed = layers.stop
        first = layers.start + (layers.start > 0)
        chunks = {task.chunk for task in rows.tasks if task.processor == "accelerator"}
        runs = [(t.name, t.chunk) for t in rows.tasks if t.processor == "accelerator"]
        names = [f"segment {index}" for index in range(first, layers.stop + 1)]
        assert sorted(runs) == sorted(itertools.product(names, chunks))
        assert len(chunks) == -(-len(rows.hidden) // SIZE)


def test_a_prompt_takes_no_more_segments_than_by_itself(
    two_sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `stall_free` a step has time for 50 rows of a chunk of 128, which is as long padded."""
    runs = {}
    for scheduling in ("layered", "stall_free"):
        llm = start(two_sizes, scheduling=scheduling, precision="f32", decode=HOST)
        step_in_readers(llm, monkeypatch)
        set_costs(llm, 2e-3)
        assert isinstance(llm.engine.prefill, ChunkedBackend)
        llm.engine.prefill.costs = Costs({32: (3.0,), 128: (3.0,)})
        tasks = in_company(llm, PROMPTS[1]).stats.tasks
        runs[scheduling] = sum(task.processor == "accelerator" for task in tasks)
    assert runs["layered"] == (LAYERS + 1) * -(-len(PROMPTS[1]) // 128)
    assert runs["stall_free"] > 2 * runs["layered"]


def test_rows_rest_in_whole_chunks_of_the_largest_size(
    two_sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a step computes of a prompt by itself; but for the end of a prompt."""
    llm = start(two_sizes, precision="f32")
    backend = llm.engine.prefill
    assert isinstance(backend, ChunkedBackend)
    backend.costs = Costs({32: (1.0,), 128: (3.0,)})
    step_in_readers(llm, monkeypatch)
    run, ends = Model.run, list[int]()

    def watching(model: Model, chunks: Sequence[Chunk], **options: Any) -> Any:
        span = chunks[0].spans[0]
        if span.group is not None:
            ends.append(len(span.sequence) + sum(len(chunk.spans[0].tokens) for chunk in chunks))
            sizes = [chunk.size for chunk in chunks]
            assert sizes == [plan.size for plan in backend.plan(ends[-1] - len(span.sequence))]
            assert set(sizes) == {128} or ends[-1] == 999
        return run(model, chunks, **options)

    monkeypatch.setattr(Model, "run", watching)
    found = in_company(llm, PROMPTS[9])
    assert len(ends) > 6
    assert {end % 128 for end in ends} <= {0, 999 % 128}
    monkeypatch.undo()
    assert found.tokens == serially(two_sizes, PROMPTS[9:], precision="f32")[0].tokens


def test_how_much_may_rest(two_sizes: str, windowed_folder: str) -> None:
    """Whole chunks; where there are windows, no more than a step may add to them."""
    for folder, rows in ((two_sizes, (512, 128)), (windowed_folder, (256, SIZE))):
        chosen = policy(start(folder, precision="f32"))
        assert isinstance(chosen, Layered)
        assert (chosen.resting_rows, chosen.chunk_rows) == rows
        assert chosen.lone_rows == rows[1]
        assert chosen.layers == LAYERS


# What comes between two groups.


@pytest.mark.parametrize("at", [1, 8])
def test_cancelled_between_two_groups(watched: tuple[LLM, Groups], at: int) -> None:
    """Blocks are back with the next step, and the rows that rested are found by nobody."""
    llm, groups = watched
    cancel = threading.Event()
    groups.before = lambda number: cancel.set() if number == at else None
    stream = llm.stream(PROMPTS[3], **STREAM)
    next(stream)
    held = used_blocks(llm)
    assert llm.generate(PROMPTS[9], cancel=cancel, **SHORT).finish_reason == "cancelled"
    assert len(groups.layers) == at
    assert used_blocks(llm) - held <= 1  # the stream's own
    assert cached_prefix(llm, PROMPTS[9]) == groups.passed
    stream.close()
    assert_idle(llm)


@pytest.mark.parametrize("at", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_preempted_between_two_groups(folder: str, watched: tuple[LLM, Groups], at: int) -> None:
    llm, groups = watched

    def full(number: int) -> None:
        if number == at:
            raise CacheFullError("no room")

    groups.before = full
    found = in_company(llm, PROMPTS[9], logprobs=3)
    assert_as([found], serially(folder, PROMPTS[9:], precision="w8a16-qdq"))
    assert found.stats.preempted == 1
    assert 900 < groups.passed <= 999
    assert found.stats.prefill == {HOST: 1, "cpu": 998}
    assert_idle(llm)


@pytest.mark.slow
def test_too_little_room(folder: str) -> None:
    """More than fits: rows that rest give way, and begin again."""
    prompts = [prompt(i, 100 + 60 * i) for i in range(6)]
    options: dict[str, Any] = {"precision": "w8a16-qdq", "ctx_size": 5 * BLOCK}
    expected = serially(folder, prompts, **options)
    llm = start(folder, **{**options, "cache_size": 7 * BLOCK})
    set_costs(llm, 2e-3)
    found = together(llm, short(prompts, logprobs=3))
    assert_as(found, expected)
    assert_idle(llm)
