"""Rows in chunks that rest between two layers: the bits of chunks that go through all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import make, save_tokenizer

from edgellm.backends.batch import Rows, Span
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import Costs
from edgellm.backends.schedule import POLICIES, WINDOW, Policy, one_by_one
from edgellm.cache.growth import Growth
from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.errors import CancelledError
from edgellm.export import export
from edgellm.export.calibrate import CalibrationOptions
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.kernels.step import LayerGroup
from edgellm.llm import LLM, load
from edgellm.store.precision_support import STATIC

SIZE, LAYERS = 32, 6
# Where rows rest; each layer by itself among them.
CUTS = [(1, 2, 5), (1, 2, 3, 4, 5)]
needs_native = pytest.mark.skipif(library() is None, reason="needs the native kernels")


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


@pytest.fixture(scope="module")
def bundle(
    export_static: Callable[..., Path], deep_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Half of its segments with 8-bit inputs are cut, and clip much."""
    return export_static(
        tmp_path_factory.mktemp("layers") / "bundle",
        model=deep_model,
        precisions=("f32", "int4", "packed", "w8a8", *STATIC),
        chunk_sizes=(SIZE, 64),
        calibration=CalibrationOptions(
            windows=8, window=32, shadow_share=0.5, shadow_percentile=60.0
        ),
    )


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed")
    make("gemma3_text", folder, sliding_window=100, max_position_embeddings=1024, vocab_size=320)
    save_tokenizer(folder)
    out, precisions = folder / "bundle", ("f32", "int4", "packed")
    export(folder, out, name="tiny", source="tiny", precisions=precisions, chunk_sizes=(SIZE, 64))
    return out


def start(path: Path, **options: Any) -> tuple[LLM, ChunkedBackend]:
    chosen = {"prefill": "cpu", "decode": "chunked", "ctx_size": 1024, **options}
    llm = load(str(path), **chosen)
    backend = llm.engine.prefill
    assert isinstance(backend, ChunkedBackend)
    backend.costs = Costs({SIZE: (1.0,), 64: (1.5,)})
    return llm, backend


def poison(backend: ChunkedBackend) -> None:
    """Whoever has the buffers meanwhile."""
    for buffers in backend.model.segments._buffers.values():
        layers = (*buffers.attention, *buffers.qkv, *buffers.activated)
        for array in (buffers.x, buffers.hidden, *layers, *buffers.residuals):
            array[...] = np.nan


def groups_of(
    backend: ChunkedBackend, span: Span, cuts: Sequence[int], **options: Any
) -> Iterator[Rows]:
    """Brings a span through the layers between cuts; nothing is counted before the last ones."""
    start, entering = len(span.sequence), None
    for first, end in itertools.pairwise([0, *cuts, LAYERS]):
        group = LayerGroup(layers=range(first, end), entering=entering)
        logit_rows = span.logit_rows if end == LAYERS else 0
        part = Span(span.sequence, span.tokens, logit_rows=logit_rows, group=group)
        (rows,) = backend.run([part], **options)
        entering = rows.hidden
        assert len(entering) == len(span.tokens)
        assert len(span.sequence) == start + (end == LAYERS) * len(span.tokens)
        poison(backend)
        yield rows


def kv_of(sequence: CachedSequence) -> list[np.ndarray]:
    """K and V that the next token sees, in every layer."""
    groups = [table.store.group for table in sequence.tables]
    first = max(group.first_block(len(sequence)) for group in groups) * BLOCK
    kept = []
    for layer in range(LAYERS):
        view, slot = sequence.view(layer)
        read = view.blocks.read(view.table, slot, slice(None), len(sequence))
        kept += [part[:, first:] for part in read]
    return kept


def assert_as_through_all(llm: LLM, backend: ChunkedBackend, *, before: int, count: int) -> None:
    cache = llm.engine.cache

    def begun() -> CachedSequence:
        sequence = cache.sequence()
        if before:
            backend.run([Span(sequence, prompt(1, before))])
        return sequence

    whole, tokens = begun(), prompt(2, count)
    (expected,) = backend.run([Span(whole, tokens, 2)])
    for cuts in CUTS:
        base = begun()
        growth = Growth(base, count)
        *_, last = groups_of(backend, Span(growth, tokens, 2), cuts)
        np.testing.assert_array_equal(last.hidden, expected.hidden)
        assert last.places == expected.places
        for ours, theirs in zip(last.logits, expected.logits, strict=True):
            np.testing.assert_array_equal(ours.scores, theirs.scores)
        landed = growth.land()
        assert landed.tokens == whole.tokens
        for ours_kv, theirs_kv in zip(kv_of(landed), kv_of(whole), strict=True):
            np.testing.assert_array_equal(ours_kv, theirs_kv)
        for sequence in (landed, base):
            sequence.truncate(0)
    whole.truncate(0)
    assert cache.used_blocks == 0


@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.slow), 140])
@pytest.mark.parametrize("precision", ["f32", "w8a8", *STATIC])
def test_the_bits_of_all_layers_at_once(bundle: Path, precision: str, before: int) -> None:
    """Also of the tokens that the precision leaves to the host, and of what grids clip."""
    llm, backend = start(bundle, precision=precision)
    cut = {part.index for part in backend.model.segments.parts if part.half}
    assert bool(cut) == (precision == "w8a8-qdq")
    assert len(cut) < LAYERS
    assert_as_through_all(llm, backend, before=before, count=300)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", [pytest.param("bundle", marks=pytest.mark.slow), "windowed"])
def test_whatever_the_policy(request: pytest.FixtureRequest, path: str, policy: Policy) -> None:
    """More chunks than there are buffers, and windows that the rows fill and pass."""
    llm, backend = start(request.getfixturevalue(path), precision="f32", schedule=policy)
    assert_as_through_all(llm, backend, before=130, count=(WINDOW + 2) * 64 + 7)


@pytest.mark.parametrize(
    ("decode", "count"),
    [
        pytest.param("native", 300, marks=needs_native),
        pytest.param("native", 9, marks=needs_native),
        ("portable", 300),
        pytest.param("reference", 300, marks=pytest.mark.slow),
    ],
)
def test_with_a_tail_on_the_host(bundle: Path, decode: str, count: int) -> None:
    """First tokens, chunks, and what is too short for one; or nothing but the host's."""
    llm, backend = start(bundle, precision="w8a16-qdq", decode=decode)
    backend.costs = Costs({SIZE: (1.0,), 64: (1.5,)}, {1: (0.001,)})
    assert backend.plan(count)[-1].size is None
    assert_as_through_all(llm, backend, before=0, count=count)
    assert_as_through_all(llm, backend, before=70, count=count)


def test_the_host_takes_no_more_than_a_tail(bundle: Path) -> None:
    """However cheap it is there: the last group would take as long as all of them."""
    llm, _ = start(bundle, precision="f32", decode="portable")
    model, host = llm.engine.prefill.model, llm.engine.decoder  # type: ignore[attr-defined]
    cheap = Costs({SIZE: (1.0,), 64: (1.5,)}, {1: (0.001,)})
    backend = ChunkedBackend(model, host, cheap, tails_only=False)
    base = llm.engine.cache.sequence()
    growth = Growth(base, 75)
    *_, last = groups_of(backend, Span(growth, prompt(1, 75)), [2])
    assert last.places == {"portable": 11, "cpu": 64}
    assert backend.plan(75)[0].size is None


@pytest.mark.parametrize(("policy", "at"), [*zip(POLICIES, (1, 20, 39), strict=True)])
def test_stopped_in_a_group(bundle: Path, policy: Policy, at: int) -> None:
    """Nothing has been counted, and the same group goes on from what rested before it."""
    llm, backend = start(bundle, precision="w8a16-qdq", schedule=policy)
    tokens, growth = prompt(3, 200), Growth(llm.engine.cache.sequence(), 200)
    (rows,) = itertools.islice(groups_of(backend, Span(growth, tokens), [2]), 1)
    kept = rows.hidden.copy()
    asked = iter(range(1, 10**6))
    last = Span(growth, tokens, 1, group=LayerGroup(layers=range(2, 6), entering=rows.hidden))
    with pytest.raises(CancelledError):
        backend.run([last], should_stop=lambda: next(asked) == at)
    assert len(growth) == 0
    np.testing.assert_array_equal(rows.hidden, kept)
    (again,) = backend.run([last])
    (expected,) = backend.run([Span(llm.engine.cache.sequence(), tokens, 1)])
    np.testing.assert_array_equal(again.hidden, expected.hidden)
    assert len(growth) == 200


def test_a_segment_takes_all_chunks_before_the_next_one_begins(bundle: Path) -> None:
    """As many as there are buffers, where one thing runs at a time: its weights are near."""
    llm, backend = start(bundle, precision="f32")
    growth = Growth(llm.engine.cache.sequence(), WINDOW * 64)
    span = Span(growth, prompt(4, WINDOW * 64))
    for first, rows in zip([0, 2], groups_of(backend, span, [2]), strict=True):
        names = [task.name for task in rows.tasks if task.processor == "accelerator"]
        end = 3 if first == 0 else LAYERS + 1
        segments = [f"segment {i}" for i in range(first + (first > 0), end)]
        assert names == [name for name in segments for _ in range(WINDOW)]


def test_one_by_one_keeps_to_the_window() -> None:
    tasks = list(one_by_one(3, 5, together=2))
    assert [task.chunk for task in tasks] == [0, 1] * 3 + [2, 3] * 3 + [4] * 3
    assert [task.step for task in tasks if task.chunk == 3] == [0, 1, 2]
    assert [task.chunk for task in one_by_one(3, 2)] == [0, 0, 0, 1, 1, 1]
