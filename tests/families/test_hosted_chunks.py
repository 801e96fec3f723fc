"""Models with prompts in graphs of chunks, parts between these in C++, and answers in C++ alone.

They have states, beside attention or in its place, latents, K and V of others, embeddings for each
layer, or several residual streams. Weights are numbers that 8 bits hold, so that what is left is
the rounding of activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
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
from edgellm.backends.int8_support import int8_products_are_exact
from edgellm.backends.self_test import check_segments
from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.export import export
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.store.precision_support import why_not
from edgellm.store.reference import PROMPT

pytestmark = pytest.mark.skipif(
    not usable("C++"), reason="the parts between graphs need the C++ kernels"
)

_SLOW = ("granitemoehybrid_narrow", "qwen3_5_text_even", "falcon_h1", "gemma3n_text")
NAMES = (
    *("lfm2", "glm4_moe_lite", "gemma4_text"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW),
)
# Of experts, rounding would choose others.
CHANGES: Mapping[str, Mapping[str, Any]] = {"glm4_moe_lite": {"mlp_layer_types": 3 * ["dense"]}}
CHUNK = 32
TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, 500).tolist()
# The largest error of a logit, over the largest logit: without a tap it is 0.2 or more.
NEAR = 0.1
Judged = tuple[Path, Any]


@pytest.fixture(scope="module", params=NAMES)
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
    model = make(request.param, folder, **sizes, **CHANGES.get(request.param, {}))
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


def rows_of(llm: LLM, tokens: Sequence[int], sequence: CachedSequence) -> np.ndarray:
    """Hidden states of tokens that go to the end of a sequence, in chunks."""
    parts = [tokens[first : first + CHUNK] for first in range(0, len(tokens), CHUNK)]
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


def test_where_a_prompt_is_cut_changes_no_bit(llm: LLM) -> None:
    """Also into single rows, within a convolution's taps and around the end of a block."""
    tokens, cache = TOKENS[:140], llm.engine.cache
    whole, cut = cache.sequence(), cache.sequence()
    expected = rows_of(llm, tokens, whole)
    cuts = (0, 1, 2, 3, 10, 41, 72, 73, 104, BLOCK - 1, BLOCK, BLOCK + 1, 140)
    parts = [rows_of(llm, tokens[first:end], cut) for first, end in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), expected)
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


def test_rows_that_are_not_asked_for_leave_early(llm: LLM) -> None:
    """Chunks before the last one, where the layers begin that read K and V of others."""
    engine, config = llm.engine, llm.engine.bundle.config
    found = []
    for all_states in (True, False):
        sequence = engine.cache.sequence()
        span = Span(sequence, TOKENS[:100], logit_rows=1, all_states=all_states)
        (rows,) = engine.prefill.run([span])
        behind = rows_of(llm, TOKENS[100:120], sequence)
        found.append((rows, behind))
        sequence.truncate(0)
    (every, right), (some, behind) = found
    np.testing.assert_array_equal(some.logits[0].scores, every.logits[0].scores)
    np.testing.assert_array_equal(some.hidden[96:], every.hidden[96:])
    np.testing.assert_array_equal(behind, right)
    early = bool(config.sources)
    assert (len(some.tasks) < len(every.tasks)) == (not some.hidden[:96].any()) == early


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
    start = len(again)
    assert start == (BLOCK if llm.engine.bundle.config.has_states else 200)
    whole = np.concatenate([expected, right])
    np.testing.assert_array_equal(rows_of(llm, behind[start:], again), whole[start:])
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4_moe_lite", "falcon_h1", "gemma4_text", "gemma3n_text"])
def test_graphs_of_every_precision(tmp_path: Path, edgellm_home: Path, name: str) -> None:
    """Each graph beside the same part in float32, at its export and in the self-test."""
    make(name, tmp_path, vocab_size=VOCABULARY, **CHANGES.get(name, {}))
    save_tokenizer(tmp_path)
    config = open_checkpoint(tmp_path).config
    limits = {"f32": 1e-4, "f16": 5e-3, "w8a8": 0.06, "w4a16": 0.5}
    if not int8_products_are_exact():
        del limits["w8a8"]
    precisions = [each for each in limits if why_not(each, config) is None]
    bundle = export(
        tmp_path,
        tmp_path / "bundle",
        name="tiny",
        source=str(tmp_path),
        precisions=("packed", *precisions),
        chunk_sizes=(8,),
    )
    for each in precisions:
        errors = dict(bundle.precision(each).errors)
        whole = errors.pop(PROMPT)
        assert max(errors.values()) <= limits[each]
        if each == "w4a16":  # codes of 4 bits of random numbers are far off in a whole prompt
            continue
        assert whole <= limits[each]
        with load(str(bundle.path), prefill="cpu", precision=each) as llm:
            assert all(check.passed for check in check_segments(bundle, graphs(llm).segments))
