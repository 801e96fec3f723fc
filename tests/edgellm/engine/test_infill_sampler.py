"""llama.cpp's infill sampler, on probabilities that are written out."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.generation_options import GenerationOptions
from edgellm.infill import InfillSampler

TEXTS = ["</s>", "ret", "return", "x", "y", "z", "u", "v", "w", "\ufffd"]


class Words:
    """A tokenizer of a few words, the first of which is an end."""

    eos_ids = frozenset({0})

    def decode(self, tokens, *, skip_special=True):
        return "".join(TEXTS[token] for token in tokens)


def left(probabilities: dict[str, float], **options) -> dict[str, float]:
    """What is left, with probabilities that sum up to 1."""
    scores = np.full(len(TEXTS), -20.0, np.float32)
    for text, probability in probabilities.items():
        scores[TEXTS.index(text)] = np.log(probability)
    chosen = {"top_k": 0, "top_p": 0.99, "min_p": 0.0, **options}
    InfillSampler(Words(), GenerationOptions(**chosen))(scores, [])
    weights = np.exp(scores.astype(np.float64))
    weights /= weights.sum()
    return {text: round(float(w), 3) for text, w in zip(TEXTS, weights, strict=True) if w > 0}


def test_a_probable_end_is_taken() -> None:
    assert left({"</s>": 0.2, "x": 0.8}) == {"</s>": 1}
    assert left({"</s>": 0.1, "x": 0.9}) == {"</s>": 0.1, "x": 0.9}


def test_tokens_that_begin_alike_count_as_one() -> None:
    assert left({"return": 0.3, "ret": 0.25, "x": 0.45}) == {"return": 0.55, "x": 0.45}


def test_improbable_tokens_are_left_out() -> None:
    assert left({"x": 0.5, "y": 0.35, "z": 0.15}) == {"x": 0.588, "y": 0.412}


def test_nothing_probable_is_an_end() -> None:
    assert left(dict.fromkeys("xyzuvw", 1 / 6)) == {"</s>": 1}


def test_what_the_others_cut_off_is_not_there() -> None:
    assert left({"x": 0.5, "y": 0.3, "</s>": 0.2}, top_k=2) == {"x": 0.625, "y": 0.375}
    assert left({"x": 0.5, "y": 0.3, "</s>": 0.2}, top_p=0.4) == {"x": 1}
    assert left({"x": 0.55, "y": 0.35, "</s>": 0.1}, min_p=0.3) == {"x": 0.611, "y": 0.389}


def test_ends_that_are_banned() -> None:
    assert left({"</s>": 0.8, "x": 0.2}, ignore_eos=True) == {"x": 1}
    assert left({"</s>": 0.8, "x": 0.2}, min_tokens=1) == {"x": 1}
    assert len(left(dict.fromkeys("xyzuvw", 1 / 6), min_tokens=1).keys() - {"</s>"}) == 1


@pytest.mark.parametrize("seed", range(20))
def test_something_is_always_left(seed: int) -> None:
    scores = np.random.default_rng(seed).normal(size=len(TEXTS)).astype(np.float32) * 3
    InfillSampler(Words(), GenerationOptions(top_k=4))(scores, [])
    assert np.isfinite(scores).any()


def test_a_large_vocabulary_is_cheap() -> None:
    """Without a small `top_k`, only the best are decoded and compared."""
    decoded: list[int] = []

    class Many:
        eos_ids = frozenset({0})

        def decode(self, tokens: list[int], *, skip_special: bool = True) -> str:
            decoded.extend(tokens)
            return f"{tokens[0]:06d}"

    best = np.arange(1000, 1300)
    for top_k in (0, 50_000):
        decoded.clear()
        scores = np.zeros(100_000, np.float32)
        scores[best] = 5
        scores[7] = 12
        InfillSampler(Many(), GenerationOptions(top_k=top_k, top_p=1, min_p=0))(scores, [])
        assert len(decoded) == 256
        assert set(decoded) <= {7, *best.tolist()}
        assert np.flatnonzero(np.isfinite(scores)).tolist() == [7]


def test_unlisted_samplers_cut_nothing_off() -> None:
    probabilities = {"x": 0.5, "y": 0.3, "</s>": 0.2}
    unlisted = {"top_k": 2, "top_p": 0.4, "min_p": 0.9, "samplers": []}
    assert left(probabilities, **unlisted) == left(probabilities, top_p=1.0)
