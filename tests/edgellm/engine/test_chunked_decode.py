"""Answers whose decode rides in the chunks of prefill: each as alone, whoever else is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from inspection import set_costs, step_in_readers, used_blocks
from loops import GREEDY, SHORT, alone, prompt, short, together, tokens_of

from edgellm.backends.chunk import Chunk
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.forward import Model
from edgellm.backends.planner import Costs
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

# Short ones decode while long ones are prefilled.
PROMPTS = [prompt(i, length) for i, length in enumerate((5, 9, 300, 30, 411, 17, 128, 260))]
# How many decoded tokens, and how many tokens of prompts, are in each chunk that was run; but for
# single tokens, which a portable host has.
Counts = list[tuple[int, int]]


@pytest.fixture(scope="module")
def bundle_path(
    export_static: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    precisions = ("f32", "int4", "packed", "w8a8", "w8a16-qdq")
    return export_static(tmp_path_factory.mktemp("decode") / "bundle", precisions=precisions)


@pytest.fixture
def chunks_run(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts: Counts = []
    run = Model.run

    def counting(model: Model, chunks: Sequence[Chunk], **options: Any) -> Any:
        for chunk in (chunk for chunk in chunks if chunk.size > 1):
            lengths = [len(span.tokens) for span in chunk.spans]
            counts.append((lengths.count(1), sum(lengths) - lengths.count(1)))
        return run(model, chunks, **options)

    monkeypatch.setattr(Model, "run", counting)
    return counts


def start(path: Path, **options: Any) -> LLM:
    """Chunks cost what they cost on a quiet machine, and a step has room for all of them."""
    llm = load(str(path), **{"prefill": "cpu", "decode": "chunked", "ctx_size": 512, **options})
    assert isinstance(llm.engine.prefill, ChunkedBackend)
    llm.engine.prefill.costs = Costs({32: (1.0,), 128: (3.0,)})
    set_costs(llm, 1e-5)
    return llm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "schedule"),
    [("f32", "out-of-order"), ("w8a8", "serial"), ("w8a16-qdq", "out-of-order")],
)
def test_together_as_alone(
    bundle_path: Path, chunks_run: Counts, precision: str, schedule: str
) -> None:
    expected = alone(start(bundle_path, precision=precision, schedule=schedule), short(PROMPTS))
    llm = start(bundle_path, precision=precision, schedule=schedule)
    chunks_run.clear()  # what loading measures
    assert tokens_of(together(llm, short(PROMPTS))) == tokens_of(expected)
    riding = [(decoded, prefilled) for decoded, prefilled in chunks_run if decoded and prefilled]
    assert max(decoded for decoded, _ in riding) >= 2
    assert max(decoded for decoded, prefilled in chunks_run if not prefilled) >= 5
    assert len(chunks_run) < 40  # one by one they are 8 * 11 of decode, and 14 of prefill
    assert used_blocks(llm) == 0


def test_prompts_fill_what_decode_leaves_of_a_chunk(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine so slow that a step has room for few rows: never for 3 more than a chunk."""
    llm, rows = start(bundle_path), list[int]()
    set_costs(llm, 3e-3)
    step_in_readers(llm, monkeypatch)
    run = Model.run

    def counted(model: Model, chunks: Sequence[Chunk], **options: Any) -> Any:
        rows.append(sum(len(span.tokens) for chunk in chunks for span in chunk.spans))
        return run(model, chunks, **options)

    streams = [llm.stream(prompt(i, 6), **{**GREEDY, "max_tokens": 40}) for i in range(3)]
    for stream in streams:
        next(stream)
    monkeypatch.setattr(Model, "run", counted)
    llm.generate(prompt(9, 500), **{**SHORT, "max_tokens": 1})
    for stream in streams:
        stream.close()
    assert len(rows) > 4
    assert {count % 32 for count in rows[:-1]} == {0}


def test_preempted_as_alone(bundle_path: Path) -> None:
    """More than fits: what was decoded in chunks is kept, and not computed again."""
    prompts, options = [prompt(i, 120) for i in range(5)], {"max_tokens": 30}
    expected = alone(start(bundle_path), short(prompts, **options))
    small = start(bundle_path, cache_size=4 * BLOCK)
    found = together(small, short(prompts, **options))
    assert tokens_of(found) == tokens_of(expected)
    assert sum(answer.stats.preempted for answer in found) > 0
    assert used_blocks(small) == 0


def test_one_token_takes_the_smallest_chunk(bundle_path: Path) -> None:
    llm = start(bundle_path)
    sizes: list[int] = []
    run = Model.run

    def noting(model: Model, chunks: Sequence[Chunk], **options: Any) -> Any:
        sizes.extend(chunk.size for chunk in chunks)
        return run(model, chunks, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "run", noting)
        llm.generate(prompt(1, 20), **SHORT)
    assert sizes == [32] * 12
