"""What samplers leave of logits, and with which probabilities, beside llama.cpp's."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from make_sampler_reference import FILE, HISTORY, NEUTRAL, case_logits

from edgellm import GenerationOptions, Grammar
from edgellm.engine.samplers import softmax
from edgellm.engine.sampling import Sampler
from edgellm.text.tokenizer import Tokenizer

CASES = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def tokenizer(smollm2: Any) -> Tokenizer:
    """The default model's, by whose texts repetitions end."""
    bundle = smollm2
    return Tokenizer(bundle.path, bundle.manifest.tokenizer, rows=bundle.config.vocab_size)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: json.dumps(CASES[i]["options"]))
def test_the_same_tokens_are_left(number: int, tokenizer: Tokenizer) -> None:
    case = CASES[number]
    options = GenerationOptions(**{"seed": 1, **NEUTRAL, **case["options"]})
    sampler = Sampler(options, tokenizer)
    left = sampler.candidates(case_logits(number), HISTORY)
    probabilities = softmax(left.scores)
    found = {
        left.token(place): float(p) for place, p in enumerate(probabilities) if p > 0 or p != p
    }
    expected = {int(token): p for token, p in case["left"].items()}
    if options.mirostat:  # its cut comes with the draw
        drawn = {sampler.sample(case_logits(number), HISTORY) for _ in range(1)}
        assert drawn <= set(expected)
        best = sorted(found, key=lambda token: -found[token])[: len(expected)]
        assert set(best) == set(expected)
        return
    assert set(found) == set(expected)
    for token, probability in expected.items():
        assert found[token] == pytest.approx(probability, rel=2e-4)


def test_forbidden_tokens_never_come(tokenizer: Tokenizer) -> None:
    """Whatever the samplers are: a filter's or a ban's scores of minus infinity stay out."""
    logits = np.full(50, -math.inf, np.float32)
    logits[[7, 9]] = [1.0, 2.0]
    extreme = [
        {"xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"temperature": 1e-50},
        {"temperature": 0.5, "dynatemp_range": 0.5, "dynatemp_exponent": 100.0},
        {"typical_p": 0.01, "min_keep": 40},
        {"top_n_sigma": 0.001},
        {"dry_multiplier": 100.0, "dry_base": 50.0, "dry_allowed_length": 0},
        {"mirostat": 2, "mirostat_tau": 0.0},
        {"repeat_penalty": 100.0, "repeat_last_n": -1},
    ]
    history = [7, 9] * 300
    for changes in extreme:
        options = GenerationOptions(**{"seed": 3, **NEUTRAL, **changes})
        sampler = Sampler(options, tokenizer)
        assert {sampler.sample(logits, history) for _ in range(20)} <= {7, 9}, changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"samplers": ["temperature", "penalties"], "repeat_penalty": 10.0}, 3),
        ({"samplers": ["penalties", "temperature"], "repeat_penalty": 10.0}, 4),
        ({"samplers": ["xtc", "temperature"], "xtc_probability": 1.0, "xtc_threshold": 0.1}, 4),
        ({"samplers": ["temperature", "xtc"], "xtc_probability": 1.0, "xtc_threshold": 0.1}, 3),
        ({"samplers": []}, 3),
    ],
    ids=str,
)
def test_greedy_takes_the_best_where_it_stands(changes: dict[str, Any], expected: int) -> None:
    logits = np.array([0, 0, 0, 3.0, 2.5, 0], np.float32)
    options = GenerationOptions(**{**NEUTRAL, **changes, "temperature": 0.0})
    assert Sampler(options).sample(logits, [3]) == expected


def test_mirostat_moves_towards_its_target() -> None:
    """The mean surprise of many draws is near the target, whatever the logits."""
    logits = (np.random.default_rng(0).standard_normal(2000) * 2).astype(np.float32)
    probabilities = softmax(logits)
    for tau in (2.0, 4.0, 6.0):
        options = GenerationOptions(**{**NEUTRAL, "mirostat": 2, "mirostat_tau": tau, "seed": 1})
        sampler = Sampler(options)
        drawn = [sampler.sample(logits, []) for _ in range(2000)]
        kept = set(drawn[200:])
        mass = sum(probabilities[token] for token in kept)
        surprise = -np.log2([probabilities[token] / mass for token in drawn[200:]])
        assert float(surprise.mean()) == pytest.approx(tau, abs=0.7)


def test_an_answer_takes_them(tiny: Any) -> None:
    """All at once, with a grammar, over the library's own call."""
    answer = tiny.generate(
        "a b a b a b",
        max_tokens=12,
        seed=1,
        samplers=["dry", "typ_p", "xtc", "top_n_sigma", "temperature"],
        dry_multiplier=0.8,
        typical_p=0.9,
        xtc_probability=0.5,
        top_n_sigma=2.0,
        dynatemp_range=0.3,
        grammar=Grammar("regex", "[a-z ]{12,40}"),
    )
    assert answer.text
    assert set(answer.text) <= set("abcdefghijklmnopqrstuvwxyz ")
