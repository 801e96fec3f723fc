"""Rows of many sequences in one static chunk: each as if it had the chunk for itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import used_blocks
from tiny_models import make, save_tokenizer

from edgellm import BundleError, OptionError
from edgellm.backends.batch import Span
from edgellm.backends.chunk import Chunk
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.forward import Model
from edgellm.backends.planner import Costs, plan_chunks, shares_of_chunks
from edgellm.backends.schedule import POLICIES, Policy
from edgellm.backends.segments import ChunkBuffers
from edgellm.cache.group_table import GroupTable
from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.errors import CancelledError
from edgellm.export import export
from edgellm.export.calibrate import CalibrationOptions
from edgellm.export.precisions import PRECISIONS
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.measure.doctor import Check, Examined, examine
from edgellm.options import EngineOptions
from edgellm.store.precision_support import STATIC

SIZE = 32
# Of each sequence, tokens before the chunk and tokens in it: three prompts, the first of which
# begins here or crosses a block, and two rows that decode, one of them far behind a window of 100.
PROMPTS = [(1, 9), (127, 7), (40, 11)]
DECODES = [(33, 1), (230, 1)]
LENGTHS = [*PROMPTS, *DECODES]
# Of hidden states and of scores where rows are grouped differently: numpy adds up in another order
# then, which moves codes of the KV cache.
ROUNDING = (1e-4, 1e-3) if library() is not None else (1e-2, 3e-2)
needs_qnn = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_qnn") is None,
    reason="onnxruntime-qnn is not installed: it has no wheel for this system",
)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


@pytest.fixture(scope="module")
def tiny_bundle(
    export_static: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("shared") / "bundle"
    precisions = ("f32", "int4", "packed", "w8a8", *STATIC)
    return export_static(out, precisions=precisions, chunk_sizes=(SIZE, 64))


@pytest.fixture(scope="module")
def windowed_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed")
    make("gemma3_text", folder, sliding_window=100, max_position_embeddings=1024, vocab_size=320)
    save_tokenizer(folder)
    out = folder / "bundle"
    export(
        folder, out, name="tiny", source="tiny", precisions=("f32", "int4"), chunk_sizes=(SIZE, 64)
    )
    return out


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in what a window has passed, and in a chunk's buffers wherever nobody has written."""
    passed, embed = GroupTable.pass_window, Model.embed

    def pass_and_poison(table: GroupTable, length: int) -> None:
        before, store = table.first, table.store
        passed(table, length)
        for block in table.ids[before : table.first]:
            if store.pool.references(block) == 0:
                for array in store.blocks.block(block):
                    array[...] = 77 if array.dtype == np.int8 else np.nan

    def poison_and_embed(model: Model, chunk: Any) -> None:
        buffers: ChunkBuffers = chunk.buffers
        layers = (*buffers.qkv, *buffers.activated)
        for array in (*layers, *buffers.residuals, buffers.hidden):
            array[...] = np.nan
        embed(model, chunk)
        count = len(chunk.tokens)
        for array in (buffers.x, *buffers.attention):
            array[count:] = np.nan

    monkeypatch.setattr(GroupTable, "pass_window", pass_and_poison)
    monkeypatch.setattr(Model, "embed", poison_and_embed)


def chunked(path: Path, **options: Any) -> LLM:
    return load(str(path), ctx_size=1024, decode="chunked", **{"prefill": "cpu", **options})


def backend_of(llm: LLM) -> ChunkedBackend:
    assert isinstance(llm.engine.prefill, ChunkedBackend)
    return llm.engine.prefill


def begun(llm: LLM, seed: int, length: int) -> CachedSequence:
    """A sequence with so many tokens."""
    sequence = llm.engine.cache.sequence()
    backend_of(llm).run([Span(sequence, prompt(seed, length))])
    return sequence


def rows_of(model: Model, spans: Sequence[Span]) -> list[np.ndarray]:
    """Hidden states of each span, all of them in one chunk."""
    states: list[np.ndarray] = []
    model.run([Chunk(spans, SIZE)], on_done=lambda rows: states.append(rows.copy()))
    (rows,) = states
    return np.split(rows, np.cumsum([len(span.tokens) for span in spans])[:-1])


def kv_of(sequence: CachedSequence) -> list[np.ndarray]:
    """K and V that the next token sees, in every layer."""
    found = []
    for layer in range(2):
        view, slot = sequence.view(layer)
        first = max(table.first for table in sequence.tables) * 128
        read = view.blocks.read(view.table, slot, slice(None), len(sequence))
        found += [part[:, first:] for part in read]
    return found


def assert_rows_as_alone(llm: LLM) -> None:
    model = backend_of(llm).model
    spans = [Span(begun(llm, i, n), prompt(100 + i, m)) for i, (n, m) in enumerate(LENGTHS)]
    found = rows_of(model, spans)
    for i, (length, count) in enumerate(LENGTHS):
        sequence = begun(llm, i, length)
        (expected,) = rows_of(model, [Span(sequence, prompt(100 + i, count))])
        np.testing.assert_array_equal(found[i], expected)
        assert np.isfinite(expected).all()
        assert spans[i].sequence.tokens == sequence.tokens
        for ours, theirs in zip(kv_of(spans[i].sequence), kv_of(sequence), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        sequence.truncate(0)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("precision", ["f32", "w8a8", *STATIC])
def test_a_row_does_not_depend_on_its_company(tiny_bundle: Path, precision: str) -> None:
    assert_rows_as_alone(chunked(tiny_bundle, precision=precision))


@pytest.mark.slow
def test_what_a_grid_clips_does_not_depend_on_company(
    export_static: Callable[..., Path], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """8-bit grids that clip much, and so many inputs that BLAS sums them in parts."""
    path = export_static(
        tmp_path / "bundle",
        model=make_model(intermediate_size=1536),
        precisions=("packed", "int4", "w8a8-qdq"),
        chunk_sizes=(SIZE,),
        calibration=CalibrationOptions(
            windows=8, window=32, shadow_share=1.0, shadow_percentile=60.0
        ),
    )
    assert_rows_as_alone(chunked(path, precision="w8a8-qdq"))


@pytest.mark.usefixtures("poisoned")
def test_rows_of_a_model_with_windows(windowed_bundle: Path) -> None:
    assert_rows_as_alone(chunked(windowed_bundle, precision="f32"))


@pytest.mark.slow
@pytest.mark.npu
@needs_qnn
@pytest.mark.usefixtures("poisoned")
def test_rows_on_an_npu(tiny_bundle: Path, edgellm_home: Path) -> None:
    llm = chunked(tiny_bundle, prefill="qnn", schedule="serial")
    assert backend_of(llm).placement.complete
    assert_rows_as_alone(llm)
    prompts = [prompt(i, length) for i, length in enumerate((3, 40, 90))]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    expected = [llm.generate(tokens, **options) for tokens in prompts]
    fresh = chunked(tiny_bundle, prefill="qnn")  # out of order
    found = sorted(fresh.batch(prompts, **options), key=lambda answer: answer.index)
    assert [answer.result().tokens for answer in found] == [each.tokens for each in expected]
    assert found[0].result().stats.decode == "qnn w8a16-qdq"
    assert used_blocks(fresh) == 0


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", ["tiny_bundle", "windowed_bundle"])
def test_many_sequences_over_many_chunks_are_as_alone(
    request: pytest.FixtureRequest, path: str, policy: Policy
) -> None:
    """Spans that cross from chunk to chunk, several chunks on their way at once."""
    llm = chunked(request.getfixturevalue(path), precision="f32", schedule=policy)
    backend = backend_of(llm)
    lengths = [*LENGTHS, (0, 150), (60, 90), (250, 1), (5, 45)]
    spans = [
        Span(begun(llm, i, n) if n else llm.engine.cache.sequence(), prompt(100 + i, m), 1)
        for i, (n, m) in enumerate(lengths)
    ]
    total = sum(len(span.tokens) for span in spans)
    results = backend.run(spans)
    chunks = {task.chunk for rows in results for task in rows.tasks if task.name == "commit"}
    assert len(chunks) == len(backend.plan(total)) >= 4
    for i, (length, count) in enumerate(lengths):
        sequence = begun(llm, i, length) if length else llm.engine.cache.sequence()
        (expected,) = backend.run([Span(sequence, prompt(100 + i, count), 1)])
        np.testing.assert_allclose(results[i].hidden, expected.hidden, atol=ROUNDING[0])
        assert results[i].places == {"cpu": count}
        (ours,), (theirs,) = results[i].logits, expected.logits
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=ROUNDING[1])
        sequence.truncate(0)


@pytest.mark.parametrize("policy", POLICIES)
def test_cancelled_in_the_middle_each_sequence_has_whole_chunks(
    windowed_bundle: Path, policy: Policy
) -> None:
    llm = chunked(windowed_bundle, precision="f32", schedule=policy)
    model, cache = backend_of(llm).model, llm.engine.cache
    sequences = [begun(llm, i, 20 + 100 * i) for i in range(3)]
    before, held = [list(each.tokens) for each in sequences], cache.used_blocks
    new = [prompt(50 + i, count) for i, count in enumerate((40, 30, 26))]
    pieces = [[(0, 0, 32)], [(0, 32, 40), (1, 0, 24)], [(1, 24, 30), (2, 0, 26)]]
    chunks = [
        Chunk([Span(sequences[i], new[i][begin:end]) for i, begin, end in piece], SIZE)
        for piece in pieces
    ]
    done: list[np.ndarray] = []

    def on_done(rows: np.ndarray) -> None:
        done.append(rows.copy())

    with pytest.raises(CancelledError):
        model.run(chunks, policy=policy, on_done=on_done, should_stop=lambda: len(done) == 2)
    counts = (40, 24, 0)
    for sequence, tokens, added, count in zip(sequences, before, new, counts, strict=True):
        assert sequence.tokens == [*tokens, *added[:count]]
    assert cache.used_blocks - held <= 2  # of the first and the second, where they crossed a block
    rest = [Span(s, t[n:], 1) for s, t, n in zip(sequences[1:], new[1:], counts[1:], strict=True)]
    resumed = backend_of(llm).run(rest)
    for i, rows in enumerate(resumed, 1):
        fresh = begun(llm, i, 20 + 100 * i)
        (expected,) = backend_of(llm).run([Span(fresh, new[i], 1)])
        ours, theirs = rows.logits[0].scores, expected.logits[0].scores
        np.testing.assert_allclose(ours, theirs, atol=ROUNDING[1])
        fresh.truncate(0)
    for sequence in sequences:
        sequence.truncate(0)
    assert cache.used_blocks == 0


def test_first_tokens_and_tails_are_the_hosts_and_each_row_comes_back_to_its_span(
    tiny_bundle: Path,
) -> None:
    """Three sequences that begin, and one that goes on; the last two leave 6 rows."""
    llm = load(str(tiny_bundle), prefill="cpu", precision="w8a16-qdq", decode="reference")
    engine = llm.engine
    assert isinstance(engine.prefill, ChunkedBackend)
    cheap_host = Costs({SIZE: (1.0,)}, {1: (0.001,)})
    backend = ChunkedBackend(engine.prefill.model, engine.decoder, cheap_host)
    sequences = [engine.cache.sequence() for _ in range(4)]
    backend.run([Span(sequences[1], prompt(1, 30))])
    counts = [25, 3, 8, 5]
    spans = [
        Span(s, prompt(60 + i, n), 2)
        for i, (s, n) in enumerate(zip(sequences, counts, strict=True))
    ]
    results = backend.run(spans)
    host = [rows.places.get("reference", 0) for rows in results]
    assert host == [1, 0, 3, 5]
    assert sum(rows.places.get("cpu", 0) for rows in results) == 32
    for i, (rows, span) in enumerate(zip(results, spans, strict=True)):
        assert len(rows.hidden) == sum(rows.places.values()) == counts[i]
        assert sequences[i].tokens[-counts[i] :] == list(span.tokens)
        logits = backend.logits(rows.hidden[-2:])
        assert [tuple(each.scores) for each in rows.logits] == [tuple(row) for row in logits]
        fresh = engine.cache.sequence()
        backend.run([Span(fresh, sequences[i].tokens[: -counts[i]])] if i == 1 else [])
        (alone,) = ChunkedBackend(backend.model, engine.decoder, Costs({SIZE: (1.0,)})).run(
            [Span(fresh, span.tokens, 2)]
        )
        assert np.abs(rows.hidden - alone.hidden).max() < 0.1 * np.abs(alone.hidden).max()
        fresh.truncate(0)


@pytest.mark.parametrize(
    ("precision", "host", "others"), [("w8a8", None, set()), ("w8a16-qdq", "native", {"packed"})]
)
def test_what_is_open_where_decode_rides_in_chunks(
    tiny_bundle: Path, precision: str, host: str | None, others: set[str]
) -> None:
    llm = chunked(tiny_bundle, precision=precision)
    engine, backend = llm.engine, backend_of(llm)
    assert engine.decoder is backend
    assert not engine.recomputes_exactly
    assert llm.decode == f"cpu {precision}"
    if backend.host is not None and backend.host.name == "portable":  # no compiler here
        host, others = "portable", {"int4"}
    assert (backend.host.name if backend.host else None) == host
    assert engine.precisions == {precision, *others}
    assert engine.selection.decode_precision(engine.config) == precision
    answer = llm.generate(prompt(1, 40), max_tokens=3, ignore_eos=True)
    assert answer.stats.decode == f"cpu {precision}"
    assert answer.stats.prefill == ({host: 1, "cpu": 39} if host else {"cpu": 40})


def test_doctor_examines_what_is_open(tiny_bundle: Path) -> None:
    llm = chunked(tiny_bundle, precision="w8a16-qdq")
    backend = backend_of(llm)
    assert backend.host is not None
    results = list(examine(llm.engine))
    subjects = [each.subject for each in results if isinstance(each, Examined)]
    assert subjects[0].startswith("w8a16-qdq on cpu")
    assert subjects[1:] == (["packed on native"] if backend.host.name == "native" else [])
    assert all(each.passed for each in results if isinstance(each, Check))


def test_static_precisions_are_those_that_are_calibrated() -> None:
    assert set(STATIC) == {n for n, p in PRECISIONS.items() if p.calibrated_bits is not None}


@pytest.mark.parametrize("prefill", ["native", "triton"])
def test_decode_in_chunks_needs_chunks(prefill: str) -> None:
    with pytest.raises(OptionError, match=f"'chunked' and `prefill` '{prefill}', which has no"):
        EngineOptions(prefill=prefill, decode="chunked")


def test_a_precision_that_needs_a_host_says_so(tiny_bundle: Path) -> None:
    backend = backend_of(chunked(tiny_bundle, precision="w8a16-qdq"))
    with pytest.raises(BundleError, match=r"w8a16-qdq leaves the first 1 tokens .* to the host"):
        ChunkedBackend(backend.model, None, backend.costs)


def test_every_row_of_a_plan_is_of_one_span() -> None:
    rng, costs = np.random.default_rng(5), Costs({8: (1.0,), 32: (2.5,)}, {1: (0.11,), 2: (0.12,)})
    for _ in range(200):
        counts = rng.integers(0, 40, rng.integers(1, 9)).tolist()
        plan = plan_chunks(sum(counts), costs)
        shares = shares_of_chunks(plan, counts)
        rows = [(number, n) for chunk in shares for number, n in chunk]
        assert [sum(n for _, n in chunk) for chunk in shares] == [chunk.count for chunk in plan]
        assert [number for number, _ in rows] == sorted(number for number, _ in rows)
        for number, count in enumerate(counts):
            assert sum(n for other, n in rows if other == number) == count
        assert all(n > 0 for _, n in rows)
