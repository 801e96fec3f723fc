from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgellm import GenerationOptions, NumericError, OptionError
from edgellm.engine.samplers import apply_penalties, keep_min_p, keep_top_p, softmax
from edgellm.engine.sampling import Sampler, best_needed, log_softmax
from edgellm.kernels.sampling import MOST_CANDIDATES
from edgellm.llm import load

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def draw(options: GenerationOptions, count: int = 2000, logits: np.ndarray = LOGITS) -> np.ndarray:
    sampler = Sampler(options)
    tokens = [sampler.sample(logits, []) for _ in range(count)]
    return np.bincount(tokens, minlength=logits.shape[0]) / count


def plain(**changes: object) -> GenerationOptions:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    return GenerationOptions(**{**neutral, **changes})


def test_frequencies_follow_the_probabilities() -> None:
    np.testing.assert_allclose(draw(plain()), [0.5, 0.3, 0.15, 0.05], atol=0.04)


def test_temperature_sharpens() -> None:
    expected = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(draw(plain(temperature=0.5)), expected / expected.sum(), atol=0.04)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.31}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"temperature": 0.0}, {0}),
        ({"logit_bias": {0: -100.0, 3: 100.0}}, {3}),
        ({"logit_bias": {0: float("-inf")}, "temperature": 0.0}, {1}),
    ],
)
def test_filters(changes: dict, allowed: set[int]) -> None:
    assert set(np.flatnonzero(draw(plain(**changes), 300))) == allowed


def test_same_seed_same_tokens() -> None:
    a, b = Sampler(plain(seed=5)), Sampler(plain(seed=5))
    assert [a.sample(LOGITS, []) for _ in range(50)] == [b.sample(LOGITS, []) for _ in range(50)]
    c = Sampler(plain(seed=6))
    assert [a.sample(LOGITS, []) for _ in range(50)] != [c.sample(LOGITS, []) for _ in range(50)]


def test_penalties() -> None:
    scores = np.array([2.0, -2.0, 1.0, 0.0], np.float32)
    options = plain(repeat_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    apply_penalties(scores, [0, 1, 0], options)
    np.testing.assert_allclose(scores, [1.0 - 0.5 - 0.5, -4.0 - 0.5 - 0.25, 1.0, 0.0])


@pytest.mark.parametrize(("last_n", "expected"), [(0, 0), (1, 0), (2, 1), (-1, 1)])
def test_only_recent_tokens_are_penalized(last_n: int, expected: int) -> None:
    options = plain(temperature=0.0, repeat_penalty=10.0, repeat_last_n=last_n)
    logits = np.array([2.0, 1.0, 0.0, 0.0, 0.0, 0.0], np.float32)
    assert Sampler(options).sample(logits, [0, 5]) == expected


def test_banned_tokens_never_come() -> None:
    sampler = Sampler(plain())
    assert {sampler.sample(LOGITS, [], banned=[0, 1]) for _ in range(200)} == {2, 3}
    greedy = Sampler(plain(temperature=0))
    assert greedy.sample(LOGITS, [], banned=[greedy.sample(LOGITS, [])]) != int(LOGITS.argmax())


def test_logits_are_left_alone() -> None:
    before = LOGITS.copy()
    Sampler(plain(repeat_penalty=3.0, logit_bias={1: 5.0})).sample(LOGITS, [0, 1])
    np.testing.assert_array_equal(before, LOGITS)


def test_masks() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    assert keep_top_p(p, 0.8).tolist() == [True, True, False, False]
    assert keep_min_p(p, 0.3).tolist() == [True, True, True, False]


def test_log_softmax_of_huge_logits() -> None:
    found = log_softmax(np.array([1e30, 0, -1e30], np.float32))
    assert found[0] == 0
    assert softmax(np.array([1000.0, 1000.0], np.float32)).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_are_an_error(value: float) -> None:
    with pytest.raises(NumericError, match="not finite"):
        Sampler(plain()).sample(np.array([1.0, value], np.float32), [])


@pytest.mark.parametrize("min_p", [0.0, 0.001, 0.05, 0.4])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_all_tokens_are_drawn_from_as_if_all_were_sorted(min_p: float, top_p: float) -> None:
    """The order of equal scores is part of it: they are drawn from one after the other."""
    options = plain(min_p=min_p, top_p=top_p, seed=9, temperature=1.3)
    sampler, chance = Sampler(options), np.random.default_rng(9)
    rng = np.random.default_rng(4)
    for _ in range(100):
        logits = np.round(rng.standard_normal(5000) * 3, 1).astype(np.float32)
        order = np.argsort(-logits, kind="stable")
        probabilities = softmax(logits[order])
        kept = keep_top_p(probabilities, top_p) & keep_min_p(probabilities, min_p)
        left = order[kept]
        sums = softmax(logits[left] / np.float32(1.3)).cumsum()
        drawn = int((sums / sums[-1]).searchsorted(chance.random(), side="right"))
        assert sampler.sample(logits, []) == left[drawn]


def test_biases_are_added_all_at_once() -> None:
    """A token costs no Python for each of them: after the first one they are not looked at."""
    biases = {token: (token * 37 % 11 - 5) / 3 for token in range(4000)}
    sampler = Sampler(plain(temperature=0, logit_bias=biases))
    biases.clear()
    logits = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    expected = logits + np.array([(i * 37 % 11 - 5) / 3 for i in range(4000)], np.float32)
    assert sampler.sample(logits, []) == int(expected.argmax())


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repeat_penalty": 0.0},
        {"repeat_last_n": -2},
        {"seed": -5},
        {"seed": 2**64},
        {"max_tokens": -1},
        {"stop": 5},
        {"stop": [""]},
        {"logprobs": -1},
        {"logit_bias": {1: float("nan")}},
        {"typical_p": 1.1},
        {"top_n_sigma": -1.0},
        {"xtc_probability": 2.0},
        {"dry_base": 0.5},
        {"dry_allowed_length": 1.5},
        {"dry_sequence_breakers": ["x" * 41]},
        {"dry_sequence_breakers": ":"},
        {"mirostat": 1},
        {"mirostat": True},
        {"min_keep": -1},
        {"samplers": ["top_k", "best"]},
        {"samplers": ["top_k", "top_k"]},
        {"samplers": "top_k"},
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(changes: dict) -> None:
    with pytest.raises(OptionError, match=next(iter(changes))):
        GenerationOptions(**changes)


ENOUGH = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 0},
    {"top_k": 128, "logprobs": 100},
    {"repeat_penalty": 1.3, "repeat_last_n": 64, "top_k": 60},
    {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repeat_last_n": 0},
    {"temperature": 0.0, "frequency_penalty": 2.0, "repeat_last_n": 100},
    {"dynatemp_range": 0.5, "dynatemp_exponent": 2.0},
    {"min_keep": 12, "min_p": 0.9},
    {"samplers": ["top_k", "min_p"], "repeat_penalty": 2.0, "repeat_last_n": -1},
]
NOT_ENOUGH = [
    {"top_k": 0},
    {"typical_p": 0.5},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.5, "temperature": 0.0},
    {"dry_multiplier": 1.0, "temperature": 0.0},
    {"mirostat": 2},
    {"samplers": ["temperature", "top_k"]},
    {"samplers": ["top_p"]},
    {"top_k": 129},
    {"logit_bias": {3: 1.0}},
    {"repeat_penalty": 0.9},
    {"presence_penalty": -0.1},
    {"frequency_penalty": -0.1},
    {"repeat_penalty": 1.1, "repeat_last_n": -1},
    {"repeat_penalty": 1.1, "repeat_last_n": 100},
]


@pytest.mark.parametrize("changes", ENOUGH)
def test_the_best_lead_to_the_same_token_as_all(changes: dict) -> None:
    rng = np.random.default_rng(0)
    banned = [] if changes.get("top_k") == 128 else [7, 2999]
    options = GenerationOptions(seed=3, **changes)
    needed = best_needed(options, ends=len(banned))
    assert 0 < needed <= MOST_CANDIDATES
    all_of_them, few = Sampler(options), Sampler(options)
    tokens: list[int] = []
    for _ in range(150):
        logits = (rng.standard_normal(3000) * 3).astype(np.float32)
        logits[[7, *tokens[-64:]]] += 6
        ids = np.sort(np.argsort(-logits)[:needed])
        token = all_of_them.sample(logits, tokens, banned=banned)
        assert few.sample(logits[ids], tokens, ids=ids, banned=banned) == token
        tokens.append(token)
    assert not set(tokens) & set(banned)


@pytest.mark.parametrize("changes", NOT_ENOUGH)
def test_when_all_are_needed(changes: dict) -> None:
    assert not best_needed(GenerationOptions(**changes), ends=1)


@pytest.mark.slow
def test_defaults_of_the_default_model(smollm2_gguf: Path) -> None:
    tried = load().generation_options()
    assert (tried.temperature, tried.top_p, tried.repeat_penalty) == (0.2, 0.9, 1.1)
    assert load().generation_options(temperature=0.5).repeat_penalty == 1.1
    # greedy is plain, and other files have llama.cpp's
    assert load().generation_options(temperature=0) == GenerationOptions(temperature=0)
    assert load(str(smollm2_gguf)).generation_options() == GenerationOptions()
