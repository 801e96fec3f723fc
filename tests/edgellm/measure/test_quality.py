"""How far a model is from float32, and whether the judge of that is right."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from edgellm import NumericError, OptionError, SourceError
from edgellm.engine.one_sequence import compute_tokens
from edgellm.export.calibrate import default_text
from edgellm.export.float_segments import float_hidden
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.llm import load
from edgellm.measure.quality import Comparison, quality, sample_text
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import MANIFEST

TEXT = sample_text()[:1000]
FLOAT = {"precision": "f32", "prefill": "cpu", "decode": "reference", "kv_format": "f32"}


@pytest.fixture(scope="module")
def bundle_path(
    export_static: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("quality") / "bundle"
    return export_static(out, precisions=("f32", "int4", "packed"))


def changed(bundle: Path, copy: Path, change: Callable[[np.ndarray], None]) -> Path:
    """The same bundle with other weights of f32, which the manifest says are right."""
    shutil.copytree(bundle, copy)
    path = copy / "f32" / "weights.bin"
    weights = np.fromfile(path, np.float32)
    change(weights)
    weights.tofile(path)
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"]["f32/weights.bin"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (copy / MANIFEST).write_text(json.dumps(manifest))
    (copy / ".checked.json").unlink(missing_ok=True)
    return copy


@pytest.mark.parametrize("through", ["prefill", "decode"])
def test_float32_is_like_itself(bundle_path: Path, through: str) -> None:
    engine = load(str(bundle_path), **FLOAT).engine
    found = quality(engine, TEXT, window=100, max_windows=3, through=through)
    assert found.kl_mean <= found.kl_99 < 1e-9
    assert found.same_top == 1.0
    assert found.perplexity == pytest.approx(found.float_perplexity, rel=1e-5)
    assert (found.tokens, found.windows, found.precision) == (3 * 99, 3, "f32")
    assert engine.cache.used_blocks == 0


def test_roundings_cost_more_the_coarser_they_are(bundle_path: Path) -> None:
    divergences = []
    for change in ({}, {"kv_format": "f16"}, {"kv_format": "int8"}):
        engine = load(str(bundle_path), **{**FLOAT, **change}).engine
        divergences.append(quality(engine, TEXT, window=100, max_windows=3).kl_mean)
    exact, f16, int8 = divergences
    assert exact < 1e-9 < f16 < int8
    engine = load(str(bundle_path), decode="portable", prefill="cpu", precision="f32").engine
    weights = quality(engine, TEXT, window=100, max_windows=3, through="decode")
    assert int8 < weights.kl_mean < 0.1
    assert weights.precision == "int4"


def test_a_damaged_layer_shows(bundle_path: Path, tmp_path: Path) -> None:
    def damage(weights: np.ndarray) -> None:
        weights[len(weights) // 2 :] *= -1

    path = changed(bundle_path, tmp_path / "damaged", damage)
    found = quality(load(str(path), **FLOAT).engine, TEXT, window=100, max_windows=3)
    assert found.kl_mean > 0.1
    assert found.same_top < 0.9


def test_logits_that_are_no_numbers(bundle_path: Path, tmp_path: Path) -> None:
    def damage(weights: np.ndarray) -> None:
        weights[len(weights) // 2 :] = np.nan

    path = changed(bundle_path, tmp_path / "damaged", damage)
    with pytest.raises(NumericError, match="not a number"):
        quality(load(str(path), **FLOAT).engine, TEXT, window=100)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"model_type": "qwen2", "dtype": torch.bfloat16},
        {"model_type": "mistral", "sliding_window": 16},
    ],
)
def test_the_judge_against_transformers(
    make_model: Callable[..., Path], changes: dict[str, Any]
) -> None:
    path = make_model(**changes)
    windows = np.random.default_rng(0).integers(0, 320, (3, 80)).tolist()
    judge = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    steps: list[int] = []
    found = float_hidden(open_checkpoint(path), [*windows, [7]], on_segment=steps.append)
    for tokens, hidden in zip((*windows, [7]), found, strict=True):
        with torch.no_grad():
            states = judge(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1]
        np.testing.assert_allclose(hidden, states[0].numpy(), atol=2e-4)
    assert steps == [0, 1, 2]


def test_divergence_of_known_distributions() -> None:
    judge = np.log(np.array([[0.5, 0.5, 1e-30], [0.9, 0.1, 1e-30]], np.float32))
    model = np.log(np.array([[0.25, 0.75, 1e-30], [0.1, 0.9, 1e-30]], np.float32)) + 3
    found = Comparison.of(model, judge, [2, 1, 0], 0)
    first = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    second = 0.9 * math.log(9) + 0.1 * math.log(1 / 9)
    np.testing.assert_allclose(found.divergences, [first, second], rtol=1e-6)
    np.testing.assert_allclose(np.exp(found.logprobs), [0.75, 0.1], rtol=1e-6)
    np.testing.assert_allclose(np.exp(found.exact_logprobs), [0.5, 0.9], rtol=1e-6)
    assert found.same_top.tolist() == [False, False]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_real_weights_against_transformers(smollm2: Bundle, smollm2_gguf: Path) -> None:
    judge = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    engine = load(str(smollm2.path)).engine
    text = sample_text()
    found = quality(engine, text, window=256, max_windows=2)
    ids = engine.tokenizer.encode(text)[: 2 * 256]
    losses, divergences, same = [], [], []
    for tokens in (ids[:256], ids[256:]):
        with torch.no_grad():
            exact = judge(torch.tensor([tokens])).logits[0].double().log_softmax(-1)[:-1].numpy()
        hidden: list[np.ndarray] = []
        sequence = engine.cache.sequence()
        for token in tokens[:-1]:
            hidden.append(compute_tokens(engine.decoder, [token], sequence)[0].astype(np.float64))
        sequence.truncate(0)
        logits = np.array(hidden)
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        losses.append(-exact[np.arange(255), tokens[1:]])
        divergences.append((np.exp(exact) * (exact - logprobs)).sum(-1))
        same.append(exact.argmax(-1) == logprobs.argmax(-1))
    assert found.float_perplexity == pytest.approx(math.exp(np.mean(losses)), rel=5e-4)
    assert found.kl_mean == pytest.approx(np.mean(divergences), rel=0.05)
    assert found.kl_99 == pytest.approx(np.quantile(divergences, 0.99), rel=0.1)
    assert found.same_top == pytest.approx(np.mean(same), abs=0.005)


def test_the_text_is_not_the_one_for_calibration() -> None:
    text, calibration = sample_text(), default_text()
    assert len(text) > 100_000
    for begin in range(0, len(text) - 200, 500):
        assert text[begin : begin + 200] not in calibration


def test_a_checkpoint_that_is_gone_or_changed(
    export_static: Callable[..., Path], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model()
    path = export_static(tmp_path / "bundle", model=model, precisions=("f32",))
    engine = load(str(path), **FLOAT).engine
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = b"\0\0\0\0"
    weights.write_bytes(data)
    with pytest.raises(SourceError, match="other weights now"):
        quality(engine, TEXT)
    shutil.rmtree(model)
    with pytest.raises(SourceError, match=r"bundle: the weights .*no such file .* put the file"):
        quality(engine, TEXT)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "0 tokens"),
        ("some text", {"window": 1}, "`window` is 1"),
        ("some text", {"max_windows": 0}, "max_windows"),
        ("some text", {"through": "nothing"}, "prefill, decode"),
    ],
)
def test_bad_input(bundle_path: Path, text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        quality(load(str(bundle_path), **FLOAT).engine, text, **options)


def test_the_command(bundle_path: Path, cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    flags = [word for k, v in FLOAT.items() for word in (f"--{k.replace('_', '-')}", v)]
    flags += ["--window", "100"]
    given = cli("quality", str(bundle_path), str(tmp_path / "text"), *flags, "--json")
    result = json.loads(given.stdout)
    assert result["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert abs(result["perplexity_change"]) < 1e-5
    piped = cli("quality", "-", "-m", str(bundle_path), *flags, "--json", stdin=TEXT)
    assert piped.returncode == 2  # MODEL is named twice
    piped = cli("quality", str(bundle_path), "-", *flags, "--json", stdin=TEXT)
    assert json.loads(piped.stdout) == result
    shown = cli("quality", "-m", str(bundle_path), *flags, "--max-windows", "1").stdout
    assert shown.startswith("perplexity")
    assert "same top token    100.00%" in shown
    assert "99 tokens (1 windows of 100), prefill f32, KV cache f32" in shown
    twice = cli("quality", str(bundle_path), "a", "--file", "b")
    assert (twice.returncode, "given twice" in twice.stderr) == (2, True)
