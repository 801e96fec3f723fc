"""Models with states whose prompts go through graphs of chunks, and their answers through C++.

Weights are numbers that 8 bits hold, so that what is left is the rounding of activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import used_blocks
from matrix import usable
from rounded_weights import found, round_weights
from tiny_gguf import VOCABULARY
from tiny_models import logits, make, save_tokenizer

from edgellm.backends.batch import Span
from edgellm.backends.chunk import Chunk
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.forward import Model
from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.export import export
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

pytestmark = pytest.mark.skipif(not usable("C++"), reason="states need the C++ kernels")

_SLOW = ("granitemoehybrid_narrow", "qwen3_5_text_even")
NAMES = ("lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW))
CHUNK = 32
TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, 500).tolist()
# The largest error of a logit, over the largest logit: without a tap it is 0.2 or more.
NEAR = 0.1
Judged = tuple[Path, Any]


@pytest.fixture(scope="module", params=NAMES)
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param, folder, vocab_size=VOCABULARY, max_position_embeddings=512)
    round_weights(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    export(
        folder,
        folder / "bundle",
        name="tiny",
        source=str(folder),
        precisions=("packed", "f32"),
        chunk_sizes=(CHUNK,),
    )
    return folder / "bundle", model


@pytest.fixture
def llm(judged: Judged) -> Iterator[LLM]:
    with opened(judged) as loaded:
        yield loaded


def opened(judged: Judged, **options: Any) -> LLM:
    """The model in a cache of which no block was written, with NaN everywhere."""
    loaded = load(str(judged[0]), prefill="cpu", precision="f32", kv_format="f32", **options)
    for group in loaded.engine.cache.groups:
        for array in group.blocks.arrays:
            array.fill(np.nan)
    return loaded


def graphs(llm: LLM) -> Model:
    assert isinstance(llm.engine.prefill, ChunkedBackend)
    return llm.engine.prefill.model


def rows_of(
    llm: LLM, tokens: Sequence[int], sequence: CachedSequence, size: int = CHUNK
) -> np.ndarray:
    """Hidden states of tokens that go to the end of a sequence, so many in a chunk."""
    parts = [tokens[first : first + size] for first in range(0, len(tokens), size)]
    model = graphs(llm)
    return np.concatenate([model.forward(p, sequence, chunk=CHUNK).copy() for p in parts])


def test_logits_are_those_of_float32(judged: Judged, llm: LLM) -> None:
    """Of all rows of a prompt, within 130 tokens over the end of a block with a snapshot."""
    tokens = TOKENS[:150]
    sequence = llm.engine.cache.sequence()
    hidden = rows_of(llm, tokens, sequence)
    expected = logits(judged[1], tokens)
    error = np.abs(graphs(llm).head.logits(hidden) - expected).max() / np.abs(expected).max()
    assert error < 1e-4
    sequence.close()


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, BLOCK + CHUNK + 2])
def test_the_answer_goes_on_from_the_states_of_the_prompt(
    judged: Judged, llm: LLM, length: int
) -> None:
    tokens = TOKENS[: length + 12]
    expected = logits(judged[1], tokens)[length - 1 :]
    errors = np.abs(found(llm, tokens, length) - expected).max(axis=1) / np.abs(expected).max()
    assert np.median(errors) < NEAR


@pytest.mark.parametrize("size", [1, 7, 31])
def test_where_a_prompt_is_cut_changes_no_bit(llm: LLM, size: int) -> None:
    tokens, cache = TOKENS[:140], llm.engine.cache
    whole, cut = cache.sequence(), cache.sequence()
    expected = rows_of(llm, tokens, whole)
    np.testing.assert_array_equal(rows_of(llm, tokens, cut, size), expected)
    for sequence in (whole, cut):
        sequence.truncate(0)


def test_chunks_on_their_way_together_change_no_bit(llm: LLM) -> None:
    tokens, sequence = TOKENS[:300], llm.engine.cache.sequence()
    expected = rows_of(llm, tokens, sequence)
    sequence.truncate(0)
    chunks = [Chunk([Span(sequence, tokens[i : i + 20])], CHUNK) for i in range(0, 300, 20)]
    for policy in ("serial", "in-order", "out-of-order"):
        rows: list[np.ndarray] = []
        graphs(llm).run(
            chunks, policy=policy, on_done=lambda each, rows=rows: rows.append(each.copy())
        )
        np.testing.assert_array_equal(np.concatenate(rows), expected)
        sequence.truncate(0)


def test_snapshots_and_forks_go_on_as_from_scratch(llm: LLM) -> None:
    """From the end of a full block, and both of a fork from where it was made."""
    cache, tokens = llm.engine.cache, TOKENS[:200]
    first = cache.sequence()
    expected = rows_of(llm, tokens, first)
    behind = [*tokens, *TOKENS[300:340]]
    other = cache.sequence()
    right = rows_of(llm, behind, other)[200:]
    other.truncate(0)
    fork = first.fork()
    for each in (fork, first):
        np.testing.assert_array_equal(rows_of(llm, behind[200:], each), right)
    fork.truncate(0)
    first.close()
    again = cache.sequence(tokens)
    assert len(again) == BLOCK
    np.testing.assert_array_equal(rows_of(llm, tokens[BLOCK:], again), expected[BLOCK:])
    again.close()


def test_a_stopped_prompt_keeps_the_states_of_its_chunks(llm: LLM) -> None:
    tokens, sequence = TOKENS[:100], llm.engine.cache.sequence()
    expected = rows_of(llm, tokens, sequence)
    sequence.truncate(0)
    rows_of(llm, tokens[:40], sequence)
    steps = iter([False] * 5 + [True] * 100)
    with pytest.raises(Exception, match="cancelled"):
        graphs(llm).forward(tokens[40:70], sequence, chunk=CHUNK, should_stop=lambda: next(steps))
    assert len(sequence) == 40
    np.testing.assert_array_equal(rows_of(llm, tokens[40:], sequence), expected[40:])
    sequence.close()


@pytest.mark.parametrize("scheduling", ["stall_free", "layered", "two_devices"])
def test_answers_together(judged: Judged, scheduling: Any) -> None:
    """Each token is the likeliest one of transformers, but for the rounding of the C++ kernels."""
    prompts = [TOKENS[i : i + length] for i, length in enumerate((3, 200, 127, 41))]
    two = {"schedule": "out-of-order"} if scheduling == "two_devices" else {"time_target_ms": 1.0}
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    with opened(judged, scheduling=scheduling, **two) as llm:
        answers = {each.index: each.result().tokens for each in llm.batch(prompts, **greedy)}
        assert used_blocks(llm) == 0
    behind = []
    for index, prompt in enumerate(prompts):
        tokens = [*prompt, *answers[index]]
        rows = logits(judged[1], tokens)[len(prompt) - 1 : -1]
        chosen = rows[np.arange(len(rows)), answers[index]]
        behind += list((rows.max(axis=1) - chosen) / np.abs(rows).max())
    assert np.median(behind) == 0
    assert np.mean(np.array(behind) > NEAR) < 0.2
