from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import OptionError
from edgellm.backends.int8_support import int8_products_are_exact
from edgellm.llm import LLM, load
from edgellm.measure.perplexity import perplexity


def prose() -> str:
    """About 8,000 tokens of the Python language reference, which every Python carries."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in ("typesseq", "objects", "exceptions"))


@pytest.mark.filterwarnings("ignore")
def test_two_windows_against_transformers(smollm2_all: Any, smollm2_gguf: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    exact = load(str(smollm2_all.path), precision="f32", decode="reference", kv_format="f32")
    tokens = exact.engine.tokenizer.encode(prose())
    total, count = 0.0, 0
    for start in (0, 256):
        window = torch.tensor(tokens[start : start + 256])
        with torch.no_grad():
            logprobs = judge(window[None]).logits[0].double().log_softmax(-1)
        total -= float(logprobs[:-1].gather(1, window[1:, None]).sum())
        count += 255
    expected = math.exp(total / count)
    bounds: list[tuple[dict[str, Any], str, float]] = [
        ({"precision": "f32", "decode": "reference", "kv_format": "f32"}, "prefill", 5e-4),
        ({"precision": "f32", "kv_format": "int8"}, "prefill", 3e-3),
        ({"precision": "f32", "kv_format": "f16"}, "prefill", 1e-3),
        ({}, "prefill", 2e-2),
        ({}, "decode", 2e-2),
    ]
    if int8_products_are_exact():
        bounds.append(({"precision": "w8a8"}, "prefill", 1e-2))
    for options, through, bound in bounds:
        engine = load(str(smollm2_all.path), **options).engine
        found = perplexity(engine, prose(), window=256, max_windows=2, through=through)
        assert found.tokens == count
        assert found.perplexity == pytest.approx(expected, rel=bound), (options, through)


def test_both_paths_of_the_reference_agree(reference_llm: LLM) -> None:
    engine = reference_llm.engine
    a, b = (
        perplexity(engine, prose(), window=40, max_windows=2, through=path)
        for path in ("prefill", "decode")
    )
    assert a.tokens == b.tokens == 78
    assert a.perplexity == pytest.approx(b.perplexity, rel=1e-4)


def test_a_short_text_is_one_window(llm: LLM) -> None:
    found = perplexity(llm.engine, "Paris is the capital of France.")
    assert found.windows == 1
    assert found.tokens == 6
    assert np.isfinite(found.perplexity)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "0 tokens"),
        ("a", {}, "1 tokens"),
        ("some text", {"window": 1}, "`window` is 1"),
        ("some text", {"window": 100_000}, "context size"),
        ("some text", {"max_windows": 0}, "max_windows"),
        ("some text", {"through": "nothing"}, "prefill, decode"),
    ],
)
def test_bad_input(llm: LLM, text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        perplexity(llm.engine, text, **options)
