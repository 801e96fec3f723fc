"""Judged by HF transformers in float32, with weights read by its own GGUF loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import GenerationOptions
from edgellm.backends.int8_support import int8_products_are_exact
from edgellm.engine.one_sequence import Hooks, compute_prompt, compute_tokens
from edgellm.llm import LLM, load

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = [1, 31, 32, 33, 127, 128, 129, 256, 385, 1000]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "Water boils at 100 degrees because",
    "The three laws of motion were described by",
]
GREEDY = GenerationOptions(temperature=0.0, max_tokens=64)


@dataclass(frozen=True)
class Judged:
    """A model in float32 throughout, and its judge."""

    llm: LLM
    judge: Any
    text: str  # a long one

    def tokens(self, count: int) -> list[int]:
        return self.llm.engine.tokenizer.encode(self.text)[:count]


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def judged(request: pytest.FixtureRequest) -> Judged:
    """A random model, and the default one."""
    from pydoc_data import topics

    import torch
    from transformers import AutoModelForCausalLM

    if request.param == "smollm2":
        llm = request.getfixturevalue("reference_llm")
        file: Path = request.getfixturevalue("smollm2_gguf")
        source: dict[str, Any] = {"gguf_file": file.name}
        folder = file.parent
    else:
        folder, source = request.getfixturevalue("tiny_model"), {}
        llm = load(str(folder), precision="f32", decode="reference", kv_format="f32")
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
    return Judged(llm, judge.eval(), topics.topics["typesseq"])


def judge_logits(judge: Any, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return judge(torch.tensor([tokens])).logits[0].numpy()


def prefill_logits(llm: LLM, tokens: list[int]) -> np.ndarray:
    """Logits of every position through the chunked prefill executor."""
    rows: list[np.ndarray] = []
    sequence = llm.engine.cache.sequence()
    compute_prompt(
        llm.engine.prefill,
        tokens,
        sequence,
        Hooks(on_hidden=lambda hidden: rows.append(hidden.copy())),
    )
    sequence.truncate(0)
    return llm.engine.prefill.logits(np.concatenate(rows))


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_logits(judged: Judged, length: int) -> None:
    tokens = judged.tokens(length)
    assert len(tokens) == length
    difference = np.abs(prefill_logits(judged.llm, tokens) - judge_logits(judged.judge, tokens))
    assert difference.max() < 2e-3


def test_decode_logits(judged: Judged) -> None:
    tokens, engine = judged.tokens(140), judged.llm.engine
    sequence = engine.cache.sequence()
    found = [compute_tokens(engine.decoder, [token], sequence)[0] for token in tokens]
    sequence.truncate(0)
    assert np.abs(np.stack(found) - judge_logits(judged.judge, tokens)).max() < 2e-3


@pytest.mark.parametrize(
    "prompt", [PROMPTS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in PROMPTS[1:])]
)
def test_greedy_tokens(judged: Judged, prompt: str) -> None:
    import torch

    tokens = judged.llm.engine.tokenizer.encode(prompt)
    expected = judged.judge.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=64,
        do_sample=False,
        pad_token_id=0,
    )[0, len(tokens) :].tolist()
    with judged.llm.session() as session:
        session.append(tokens)
        found = list(session.generate(options=GREEDY).tokens)
    assert found == expected


def test_chunk_size_makes_no_difference(judged: Judged) -> None:
    tokens, engine = judged.tokens(300), judged.llm.engine
    model = engine.prefill.model
    results = []
    for chunk in (300, 128, 32, 7):
        sequence = engine.cache.sequence()
        for start in range(0, 300, chunk):
            hidden = model.forward(tokens[start : start + chunk], sequence, chunk=chunk)
        results.append(model.head.logits(hidden[-1:]))
        sequence.truncate(0)
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("precision", ["f32", "w8a8"])
def test_poisoned_padding_never_shows(
    tiny_model: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(str(tiny_model), prefill="cpu", precision=precision)
    tokens = np.random.default_rng(0).integers(0, 320, 45).tolist()
    model = llm.engine.prefill.model
    buffers = model.segments.buffers(32)
    sequence = llm.engine.cache.sequence()
    model.forward(tokens[:32], sequence, chunk=32)
    expected = model.head.logits(model.forward(tokens[32:], sequence, chunk=32))
    sequence.truncate(32)

    def poisoning(run: Callable[[], None]) -> Callable[[], None]:
        def poisoned() -> None:
            for array in (buffers.x, *buffers.attention):
                array[13:] = np.nan
            run()

        return poisoned

    monkeypatch.setattr(
        model.segments,
        "buffers",
        lambda *_, slot: replace_runs(buffers, map(poisoning, buffers.segments)),  # noqa: ARG005
    )
    hidden = model.forward(tokens[32:], sequence, chunk=32)
    np.testing.assert_array_equal(model.head.logits(hidden), expected)


def replace_runs(buffers: Any, runs: Any) -> Any:
    from dataclasses import replace

    return replace(buffers, segments=list(runs))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "mistral", "sliding_window": 40},
        {"model_type": "qwen2", "head_dim": 16},
        {"tie_word_embeddings": True, "num_key_value_heads": 6},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"model_type": "qwen3"},
        {"model_type": "gemma2", "sliding_window": 40},
        {"model_type": "olmo2"},
        {"model_type": "starcoder2"},
    ],
    ids=lambda changes: ", ".join(f"{name} {value}" for name, value in changes.items())[:40],
)
def test_random_models(
    make_model: Callable[..., Path], edgellm_home: Path, changes: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_model(**changes)
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = load(str(folder), precision="f32", decode="reference", kv_format="f32")
    tokens = np.random.default_rng(0).integers(0, 320, 170).tolist()
    expected = judge_logits(judge, tokens)
    np.testing.assert_allclose(prefill_logits(llm, tokens), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_quantized_weights_agree_with_float_on_random_weights(
    make_model: Callable[..., Path], edgellm_home: Path, model_type: str
) -> None:
    folder = make_model(initializer_range=0.05, model_type=model_type)
    tokens = np.random.default_rng(0).integers(0, 320, 170).tolist()
    exact, int8, int4 = (
        prefill_logits(load(str(folder), **options), tokens)
        for options in ({"precision": "f32"}, {"precision": "w8a8"}, {})
    )
    if int8_products_are_exact():
        assert np.abs(exact - int8).max() < 0.1 * np.abs(exact).max()
    assert np.abs(exact - int4).mean() < 0.2 * np.abs(exact).mean()


@pytest.mark.parametrize(
    ("model_type", "backends"),
    [
        ("qwen3", {}),
        ("gemma2", {"prefill": "cpu", "decode": "portable"}),
        ("olmo2", {"prefill": "cpu", "decode": "portable"}),
        ("starcoder2", {}),
    ],
)
def test_every_part_in_every_back_end(
    make_model: Callable[..., Path], edgellm_home: Path, model_type: str, backends: dict[str, str]
) -> None:
    """Prefill and decode as `auto` chooses them, on an int8 cache."""
    folder = make_model(model_type=model_type)
    tokens = np.random.default_rng(0).integers(0, 320, 170).tolist()
    exact = prefill_logits(load(str(folder), precision="f32", decode="reference"), tokens)
    llm = load(str(folder), **backends)  # type: ignore[arg-type]
    assert np.abs(exact - prefill_logits(llm, tokens)).mean() < 0.1 * np.abs(exact).mean()
    sequence = llm.engine.cache.sequence()
    decoded = [compute_tokens(llm.engine.decoder, [token], sequence)[0] for token in tokens[:20]]
    sequence.truncate(0)
    assert np.abs(exact[:20] - np.stack(decoded)).mean() < 0.2 * np.abs(exact[:20]).mean()


# How far below the other back end's best logit a greedy token may be, to count as a near-tie. The
# largest gap on these prompts is 0.28 with AVX-512 and 0.53 with AVX2, whose sums are in another
# order.
NEAR_TIE = 0.8


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_native_and_portable_agree_up_to_near_ties(
    chosen_llm: LLM, portable_llm: LLM, prompt: str
) -> None:
    """Portable is teacher-forced with the 64 tokens that native takes."""
    if chosen_llm.engine.decoder.name != "native":
        pytest.skip("installed without a compiler")
    start = chosen_llm.engine.tokenizer.encode(prompt)
    tokens = chosen_llm.generate(prompt, temperature=0, max_tokens=64, ignore_eos=True).tokens
    engine = portable_llm.engine
    sequence = engine.cache.sequence()
    logits = compute_prompt(engine.prefill, start, sequence)
    ends = sorted(engine.tokenizer.eos_ids)
    for token in tokens:
        logits[ends] = -np.inf
        assert logits.max() - logits[token] < NEAR_TIE
        logits = compute_tokens(engine.decoder, [token], sequence)[0]
    sequence.truncate(0)
