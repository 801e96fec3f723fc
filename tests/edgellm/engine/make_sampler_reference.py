"""Writes llama_samplers.json: what llama.cpp's samplers leave of logits, with probabilities.

    python tests/edgellm/engine/make_sampler_reference.py MODEL.gguf

MODEL is the default model's file, of which the vocabulary alone is read; llama.cpp is used through
`llama-cpp-python` (0.3.36, built from source). The logits of a case are drawn from its number, see
`case_logits`; tests draw the same ones.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 300
HISTORY = [5, 9, 20, 31, 7, 5, 9, 20, 44, 5, 9, 20, 31, 60, 61, 5, 9]
# Options of each case; `samplers` is the order, llama.cpp's where it is missing.
CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    {"top_p": 0.7},
    {"top_p": 0.7, "min_keep": 30},
    {"min_p": 0.2},
    {"min_p": 0.6, "min_keep": 12},
    {"typical_p": 0.6},
    {"typical_p": 0.2, "min_keep": 9},
    {"top_k": 25, "typical_p": 0.8, "top_p": 0.9, "min_p": 0.05, "temperature": 1.4},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.3, "top_k": 20, "temperature": 1.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02, "top_k": 10, "min_keep": 8},
    {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    {"temperature": 1.0, "dynatemp_range": 0.7},
    {"temperature": 0.6, "dynatemp_range": 0.9, "dynatemp_exponent": 2.0, "top_k": 30},
    {"repeat_penalty": 1.4, "repeat_last_n": 8, "top_k": 50},
    {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repeat_last_n": -1, "top_k": 50},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": [], "top_k": 60},
    {"dry_multiplier": 2.0, "dry_base": 1.2, "dry_allowed_length": 1, "dry_sequence_breakers": []},
    {"dry_multiplier": 1.0, "dry_penalty_last_n": 9, "dry_sequence_breakers": []},
    {"dry_multiplier": 1.0, "dry_allowed_length": 0, "dry_sequence_breakers": [], "top_k": 80},
    {"dry_multiplier": 1.0, "top_k": 60},
    {"dry_multiplier": 1.0, "dry_sequence_breakers": ["#", "ab"], "top_k": 60},
    {"samplers": ["temperature", "top_p"], "temperature": 2.5, "top_p": 0.5},
    {"samplers": ["min_p", "top_k", "temperature"], "min_p": 0.1, "top_k": 7, "temperature": 0.7},
    {"samplers": ["top_k", "penalties"], "top_k": 9, "repeat_penalty": 3.0, "repeat_last_n": -1},
    {"samplers": ["temperature", "penalties"], "temperature": 0.5, "repeat_penalty": 2.0,
     "repeat_last_n": -1},
    {"samplers": ["xtc", "typ_p"], "xtc_probability": 1.0, "typical_p": 0.5},
    {"samplers": ["top_k", "dry", "top_n_sigma"], "top_k": 90, "dry_multiplier": 5.0,
     "dry_sequence_breakers": [], "top_n_sigma": 0.5},
    {"mirostat": 2, "mirostat_tau": 2.0, "temperature": 1.3},
    {"mirostat": 2, "mirostat_tau": 0.5},
]  # fmt: skip
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
FILE = Path(__file__).parent / "llama_samplers.json"


def case_logits(number: int) -> np.ndarray:
    """Return `[VOCABULARY]` float32; every third case has a few likely tokens."""
    random = np.random.default_rng(number)
    logits = random.standard_normal(VOCABULARY) * 2
    if number % 3 == 0:
        logits[random.choice(VOCABULARY, 5, replace=False)] += 4
    return logits.astype(np.float32)


def main() -> None:
    import llama_cpp as api

    api.llama_backend_init()
    parameters = api.llama_model_default_params()
    parameters.vocab_only = True
    model = api.llama_model_load_from_file(sys.argv[1].encode(), parameters)
    vocab = api.llama_model_get_vocab(model)
    results = []
    for number, case in enumerate(CASES):
        logits = case_logits(number)
        data = (api.llama_token_data * VOCABULARY)()
        for token, logit in enumerate(logits):
            data[token].id, data[token].logit, data[token].p = token, float(logit), 0.0
        array = api.llama_token_data_array(data=data, size=VOCABULARY, selected=-1, sorted=False)
        for sampler in samplers(api, vocab, {**NEUTRAL, **case}):
            for token in HISTORY:
                api.llama_sampler_accept(sampler, token)
            api.llama_sampler_apply(sampler, ctypes.byref(array))
        kept = [(array.data[i].id, array.data[i].logit) for i in range(array.size)]
        scores = np.array([logit for _, logit in kept], np.float64)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        left = {id: float(f"{w:.6g}") for (id, _), w in zip(kept, weights, strict=True) if w > 0}
        results.append({"options": case, "left": left})
    lines = ",\n".join(json.dumps(result) for result in results)
    FILE.write_text(f"[\n{lines}\n]\n")


def samplers(api: Any, vocab: Any, case: dict[str, Any]) -> list[Any]:
    """Return llama.cpp's samplers of a case, in order, without the draw but Mirostat's."""
    if case.get("mirostat"):
        return [
            api.llama_sampler_init_temp(case["temperature"]),
            api.llama_sampler_init_mirostat_v2(1, case["mirostat_tau"], 0.1),
        ]
    keep = case.get("min_keep", 0)
    breakers = case.get("dry_sequence_breakers", ["\n", ":", '"', "*"])
    texts = (ctypes.c_char_p * max(1, len(breakers)))(*(text.encode() for text in breakers))
    made = {
        "penalties": lambda: api.llama_sampler_init_penalties(
            VOCABULARY,
            last if (last := case.get("repeat_last_n", 64)) >= 0 else len(HISTORY),
            case.get("repeat_penalty", 1.0),
            case.get("frequency_penalty", 0.0),
            case.get("presence_penalty", 0.0),
        ),
        "dry": lambda: api.llama_sampler_init_dry(
            vocab,
            case.get("dry_multiplier", 0.0),
            case.get("dry_base", 1.75),
            case.get("dry_allowed_length", 2),
            case.get("dry_penalty_last_n", len(HISTORY)),
            texts,
            len(breakers),
        ),
        "top_n_sigma": lambda: api.llama_sampler_init_top_n_sigma(case.get("top_n_sigma", -1.0)),
        "top_k": lambda: api.llama_sampler_init_top_k(case["top_k"]),
        "typ_p": lambda: api.llama_sampler_init_typical(case.get("typical_p", 1.0), keep),
        "top_p": lambda: api.llama_sampler_init_top_p(case["top_p"], keep),
        "min_p": lambda: api.llama_sampler_init_min_p(case["min_p"], keep),
        "xtc": lambda: api.llama_sampler_init_xtc(
            case.get("xtc_probability", 0.0), case.get("xtc_threshold", 0.1), keep, 1
        ),
        "temperature": lambda: api.llama_sampler_init_temp_ext(
            case["temperature"],
            case.get("dynatemp_range", 0.0),
            case.get("dynatemp_exponent", 1.0),
        ),
    }
    return [made[name]() for name in case.get("samplers", list(made))]


if __name__ == "__main__":
    main()
