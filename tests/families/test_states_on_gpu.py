"""Models with states that Triton decodes, beside what transformers computes of them.

Prompts go through the C++ kernels, so that states change sides; the interpreter takes long for
many rows. Weights are numbers that 8 bits hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import usable
from rounded_weights import round_weights
from tiny_gguf import VOCABULARY
from tiny_models import logits, make, save_tokenizer

from edgellm.backends.batch import Span
from edgellm.cache.sequence import Sequence
from edgellm.engine.one_sequence import compute_prompt, compute_tokens
from edgellm.export import export
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not (usable("C++") and usable("Triton")), reason="needs both"),
]

TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, 200).tolist()
LENGTH = BLOCK + 3
# The largest error of a logit, over the largest logit: without a tap it is 0.2 or more.
NEAR = 0.1


@pytest.fixture(
    scope="module",
    params=[
        ("lfm2_narrow", {"layer_types": ["full_attention", "conv"]}),
        ("qwen3_5_text_even", {"layer_types": ["full_attention", "linear_attention"]}),
        ("falcon_h1", {}),
    ],
    ids=lambda param: param[0],
)
def judged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LLM, Any]:
    """A model in a cache of which no block was written, with NaN everywhere."""
    name, layers = request.param
    folder: Path = tmp_path_factory.mktemp(name)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "num_hidden_layers": 2}
    model = make(name, folder, **layers, **sizes)
    round_weights(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    export(folder, folder / "bundle", name="tiny", source=str(folder), precisions=("packed",))
    llm = load(str(folder / "bundle"), prefill="native", decode="triton", kv_format="f32")
    for group in llm.engine.cache.groups:
        assert group.replica is not None
        for array in group.blocks.arrays:
            array.fill(np.nan)
        group.replica.device.fetch(range(group.blocks.count))
    return llm, model


def behind(llm: LLM, sequence: Sequence, count: int) -> np.ndarray:
    """Logits behind each of the next tokens, one at a time."""
    start = len(sequence)
    tokens = TOKENS[start : start + count]
    return np.concatenate([compute_tokens(llm.engine.decoder, [x], sequence) for x in tokens])


def test_answers_go_on_from_states_on_the_other_side(judged: tuple[LLM, Any]) -> None:
    llm, model = judged
    expected = logits(model, TOKENS[: LENGTH + 4])
    cache, sequence = llm.engine.cache, llm.engine.cache.sequence()
    found = [compute_prompt(llm.engine.prefill, TOKENS[:LENGTH], sequence)[None]]
    found.append(behind(llm, sequence, 1))
    found.append(compute_prompt(llm.engine.prefill, TOKENS[LENGTH + 1 :][:2], sequence)[None])
    fork = sequence.fork()
    found.append(behind(llm, sequence, 1))
    np.testing.assert_array_equal(behind(llm, fork, 1), found[-1])
    rows = [LENGTH - 1, LENGTH, LENGTH + 2, LENGTH + 3]
    errors = np.abs(np.concatenate(found) - expected[rows]).max(axis=1) / np.abs(expected).max()
    assert np.median(errors) < NEAR
    fork.close()

    # back to the snapshot, which the host has written, and on from there on the device
    sequence.truncate(LENGTH)
    assert len(sequence) == BLOCK
    once = behind(llm, sequence, 2)
    again = cache.sequence(TOKENS[: BLOCK + 1])
    assert len(again) == BLOCK
    np.testing.assert_array_equal(behind(llm, again, 2), once)
    error = np.abs(once - expected[BLOCK : BLOCK + 2]).max(axis=1) / np.abs(expected).max()
    assert np.median(error) < NEAR

    # saved where the device has written last, and read again
    other = cache.sequence()
    assert cache.unpack(other, cache.pack(again))
    np.testing.assert_array_equal(behind(llm, other, 1), behind(llm, again, 1))
    for each in (sequence, again, other):
        each.close()


def test_rows_of_a_draft_are_dropped_with_their_states(judged: tuple[LLM, Any]) -> None:
    llm, _ = judged
    sequence, plain = (llm.engine.cache.sequence() for _ in range(2))
    expected = behind(llm, plain, 3)
    behind(llm, sequence, 1)
    llm.engine.decoder.run([Span(sequence, [TOKENS[1], 5, 7], drafted=2)])
    sequence.truncate(2)
    sequence.settle()
    assert len(sequence) == 2
    # rows of several tokens are computed in tiles, which round elsewhere
    error = np.abs(behind(llm, sequence, 1)[0] - expected[2]).max() / np.abs(expected[2]).max()
    assert error < NEAR


def test_answers_of_the_engine_are_those_of_native_kernels(judged: tuple[LLM, Any]) -> None:
    llm, _ = judged
    native = load(str(llm.engine.bundle.path), decode="native", kv_format="f32")
    first, second = (
        each.generate(TOKENS[:LENGTH], max_tokens=3, temperature=0, ignore_eos=True)
        for each in (llm, native)
    )
    assert first.tokens == second.tokens
    assert first.stats.decode == "triton packed"
