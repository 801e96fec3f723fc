"""Keys of exported models: the same scores, and little lost in a quantized KV cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_checkpoint import CONFIGS, RandomCheckpoint
from random_weights import random_weight

from edgellm.engine.one_sequence import Hooks, compute_prompt, compute_tokens
from edgellm.errors import BundleError
from edgellm.export import export, exporter
from edgellm.export.equalized import EqualizedCheckpoint, choose_basis, scaled_rows, within_halves
from edgellm.graphs.checkpoint import Checkpoint, open_checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import Attention, LayerConfig, Mlp, Rope
from edgellm.graphs.tensor import Tensor
from edgellm.kernels import rope
from edgellm.kernels.quantized import KINDS, dequantize
from edgellm.kernels.rope import reference as rope_reference
from edgellm.llm import LLM, load
from edgellm.quantize.weights import quantize_groups, quantize_int4
from edgellm.store.bundle import Bundle, open_bundle
from edgellm.store.key_basis import KeyBasis, open_key_basis

HUGE = 200.0
TOKENS = np.random.default_rng(1).integers(0, 256, 170).tolist()


@dataclass
class Memory:
    """A checkpoint of one layer: Q in int4 groups, K in int8 groups, biases in float32."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    path: Path = Path("memory")
    mtp: None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def memory(*, rotated: int = 16, scale: float = 1.0) -> Memory:
    rng = np.random.default_rng(0)
    config = ModelConfig(
        model_type="qwen2",
        vocab_size=320,
        hidden_size=64,
        layers=(
            LayerConfig(
                mixer=Attention(heads=6, kv_heads=2, head_dim=16, qkv_bias=True),
                mlp=Mlp(intermediate=96),
            ),
        ),
        ropes=(Rope(inv_freq=tuple(1e6 ** (-np.arange(0, rotated, 2) / rotated))),),
        norm_eps=1e-5,
        context_length=1024,
        tied_embedding=True,
    )
    spread = np.exp2(rng.integers(-3, 4, (96, 1))) * scale
    q = quantize_int4((rng.standard_normal((96, 64)) * spread).astype(np.float32))
    k = quantize_groups((rng.standard_normal((32, 64)) / spread[:32]).astype(np.float32))
    floats = {
        "attention_norm": np.ones(64, np.float32),
        "q_bias": rng.standard_normal(96).astype(np.float32),
        "k_bias": (50 * rng.standard_normal(32)).astype(np.float32),
    }
    tensors = {n: Tensor(v.shape, "F32", lambda v=v: v) for n, v in floats.items()}  # type: ignore[misc]
    tensors["q"] = Tensor((96, 64), "Q4_1", lambda: dequantize(q), lambda: q)
    tensors["k"] = Tensor((32, 64), "Q8_0", lambda: dequantize(k), lambda: k)
    return Memory(config, {f"layers.0.{name}": tensor for name, tensor in tensors.items()})


def scores(checkpoint: Checkpoint) -> np.ndarray:
    """Of 5 tokens by 5, `[H, 5, 5]` float64."""
    config, x = checkpoint.config, np.random.default_rng(2).standard_normal((5, 64))
    table = rope.table(config.ropes[0].inv_freq, 5)
    q, k = (
        rope.apply(
            (
                x @ checkpoint.tensor(f"layers.0.{part}").float32().T.astype(np.float64)
                + checkpoint.tensor(f"layers.0.{part}_bias").float32()
            ).reshape(5, -1, 16),
            table,
            0,
        )
        for part in "qk"
    )
    keys = np.repeat(k, config.heads // config.kv_heads, axis=1)
    return np.einsum("qhd,khd->hqk", q, keys)


@pytest.mark.parametrize("rotated", [16, 6])
def test_scores_are_the_same(rotated: int) -> None:
    checkpoint = memory(rotated=rotated)
    basis = choose_basis(checkpoint)
    assert np.any(basis.exponents)
    exact = scores(checkpoint)
    found = scores(EqualizedCheckpoint(checkpoint, basis))
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max(), rtol=0)


@pytest.mark.parametrize("name", ["head_norms", "width_norms", "norms_after_rope", "olmo2"])
def test_powers_are_in_the_norms(name: str) -> None:
    """Projections stay as they are; one weight for all heads has one set of powers."""
    checkpoint = RandomCheckpoint(CONFIGS[name])
    basis = choose_basis(checkpoint)
    equalized = EqualizedCheckpoint(checkpoint, basis)
    shared = checkpoint.config.attention.qk_norm != "width"
    assert basis.offsets is None
    for part in ("q", "k"):
        before, after = (
            source.tensor(f"layers.0.{part}_norm").float32().reshape(-1, 16)
            for source in (checkpoint, equalized)
        )
        assert len(before) == (1 if shared else {"q": 6, "k": 2}[part])
        powers = np.log2(np.abs(after / before))
        heads = np.concatenate([basis.exponents[0]] * 2, axis=1)
        expected = heads[:1] if shared else np.repeat(heads, len(before) // 2, axis=0)
        np.testing.assert_array_equal(powers, expected if part == "q" else -expected)
        for tensor in (f"layers.0.{part}", "layers.0.v"):
            assert equalized.tensor(tensor).float32().tolist() == (
                checkpoint.tensor(tensor).float32().tolist()
            )
    if shared:
        for exponents in basis.exponents:
            np.testing.assert_array_equal(exponents[0], exponents[1])


def test_what_keys_have_in_common() -> None:
    """After RoPE, its magnitude as well, and only where softmax does not see it."""
    config = CONFIGS["magnitude"]
    checkpoint = RandomCheckpoint(config)
    basis = choose_basis(checkpoint)
    bias = EqualizedCheckpoint(checkpoint, basis).tensor("layers.0.k_bias").float32()
    turn = config.ropes[0]
    everywhere = np.broadcast_to(bias.reshape(1, 2, 16), (4096, 2, 16))
    exact = rope_reference.apply(everywhere, turn.inv_freq, 0, turn.magnitude).mean(axis=0)
    assert basis.offsets is not None
    np.testing.assert_allclose(basis.offsets[0], exact, atol=1e-5)
    attention = replace(config.attention, softcap=4.0)
    capped = replace(config, layers=(replace(config.layers[0], mixer=attention),))
    assert not np.any(choose_basis(RandomCheckpoint(capped)).offsets)


def test_quantized_rows_are_scaled_exactly() -> None:
    checkpoint = memory()
    equalized = EqualizedCheckpoint(checkpoint, choose_basis(checkpoint))
    q, k = equalized.tensor("layers.0.q"), equalized.tensor("layers.0.k")
    assert q.quantized is not None
    assert k.quantized is not None
    np.testing.assert_array_equal(dequantize(q.quantized()), q.float32())
    np.testing.assert_array_equal(dequantize(k.quantized()), k.float32())
    for name in ("layers.0.q", "layers.0.k"):
        before, after = checkpoint.tensor(name).float32(), equalized.tensor(name).float32()
        powers = np.log2(np.abs(after).max(axis=1) / np.abs(before).max(axis=1))
        assert (powers == np.rint(powers)).all()
        assert powers.any()


def test_scales_stay_halves() -> None:
    """Where a scale would leave them, an exponent stays nearer to 0."""
    asked = np.array([[-6] * 8, [5] * 8], np.int8)
    checkpoint = memory(scale=2.0**-16)
    found = within_halves(asked, checkpoint, 0)
    assert (np.abs(found) <= np.abs(asked)).all()
    assert (found[0] > -6).any()
    assert (found[1] == 5).all()
    basis = KeyBasis(found[None], None)
    q = EqualizedCheckpoint(checkpoint, basis).tensor("layers.0.q")
    assert q.quantized is not None
    np.testing.assert_array_equal(dequantize(q.quantized()), q.float32())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_are_scaled_exactly(kind: str) -> None:
    weight = random_weight(kind, 12, 512, np.random.default_rng(0), size=64.0)
    tensor = Tensor(weight.shape, kind, lambda: dequantize(weight), lambda: weight)
    exponents = np.arange(-6, 6).astype(np.int8)
    scaled = scaled_rows(tensor, exponents)
    assert scaled.quantized is not None
    assert scaled.quantized().kind == weight.kind
    np.testing.assert_array_equal(dequantize(scaled.quantized()), scaled.float32())


def test_rows_of_a_real_file(smollm2_gguf: Path) -> None:
    tensor = open_checkpoint(smollm2_gguf).tensor("layers.0.k")
    exponents = np.random.default_rng(0).integers(-3, 4, 192).astype(np.int8)
    scaled = scaled_rows(tensor, exponents)
    assert scaled.quantized is not None
    expected = np.ldexp(tensor.float32(), exponents.astype(np.int32)[:, None])
    np.testing.assert_array_equal(scaled.float32(), expected)
    np.testing.assert_array_equal(dequantize(scaled.quantized()), expected)


@pytest.fixture
def huge_keys(make_model: Callable[..., Path], edgellm_home: Path) -> Path:
    """A random Qwen2 whose K biases are huge where RoPE turns slowly, as in Qwen2.5."""
    from safetensors.numpy import load_file, save_file

    rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
    folder = make_model(model_type="qwen2", rope_parameters=rope_parameters)
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith("k_proj.bias"):
            values.reshape(2, 16)[:, [5, 6, 7, 15]] += HUGE
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(llm: LLM, tokens: list[int]) -> np.ndarray:
    """Of every position."""
    rows: list[np.ndarray] = []
    sequence = llm.engine.cache.sequence()
    compute_prompt(
        llm.engine.prefill, tokens, sequence, Hooks(on_hidden=lambda r: rows.append(r.copy()))
    )
    sequence.truncate(0)
    return llm.engine.prefill.logits(np.concatenate(rows))


def float_llm(folder: Path, kv_format: str) -> LLM:
    return load(str(folder), precision="f32", decode="reference", kv_format=kv_format)


def lost(folder: Path, kv_format: str) -> float:
    """What a KV format changes, as a share of how far logits are apart."""
    exact = logits(float_llm(folder, "f32"), TOKENS)
    found = logits(float_llm(folder, kv_format), TOKENS)
    return float(np.abs(found - exact).mean() / exact.std())


def test_huge_keys_are_what_transformers_computes(huge_keys: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(huge_keys, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = judge(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(logits(float_llm(huge_keys, "f32"), TOKENS), expected, atol=2e-3)


@pytest.mark.parametrize(("kv_format", "most"), [("f16", 1e-3), ("int8", 0.015)])
def test_huge_keys_in_a_rounded_cache(huge_keys: Path, kv_format: str, most: float) -> None:
    assert lost(huge_keys, kv_format) < most


def test_huge_keys_as_they_are_lose_far_more(
    huge_keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_it_is(checkpoint: Checkpoint) -> KeyBasis:
        chosen = choose_basis(checkpoint)
        assert chosen.offsets is not None
        zeros = [0 * exponents for exponents in chosen.exponents]
        return KeyBasis(zeros, [0 * offset for offset in chosen.offsets])

    monkeypatch.setattr(exporter, "choose_basis", as_it_is)
    assert lost(huge_keys, "int8") > 0.03


def test_precisions_share_a_cache(huge_keys: Path) -> None:
    """A prompt in one precision and tokens in another, on the same keys."""
    whole = logits(float_llm(huge_keys, "int8"), TOKENS)[-1]
    for options in ({"prefill": "cpu", "decode": "portable"}, {}):
        llm = load(str(huge_keys), kv_format="int8", **options)
        sequence = llm.engine.cache.sequence()
        compute_prompt(llm.engine.prefill, TOKENS[:-20], sequence, Hooks())
        for token in TOKENS[-20:]:
            found = compute_tokens(llm.engine.decoder, [token], sequence)[0]
        assert np.abs(found - whole).mean() < 0.25 * whole.std()


def exported(folder: Path, out: Path, *precisions: str) -> Bundle:
    return export(folder, out, name="m", source="m", precisions=precisions)


def test_precisions_that_are_added_take_the_basis_that_is_there(
    huge_keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bundle"
    before = exported(huge_keys, out, "packed").manifest
    monkeypatch.setattr(exporter, "choose_basis", lambda _: pytest.fail("chosen twice"))
    again = exported(huge_keys, out, "int4")
    after = again.manifest
    assert set(after.precisions) == {"packed", "int4"}
    assert after.keys == before.keys
    basis = open_key_basis(out, after.keys, again.config)
    assert basis.offsets is not None
    assert np.abs(basis.offsets).max() > HUGE / 10


def test_another_basis_is_another_cache(
    huge_keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions and prefixes on disk are only for keys that are stored alike."""
    first = load(str(exported(huge_keys, tmp_path / "a", "packed", "int4", "w8a8").path))
    monkeypatch.setattr(
        exporter,
        "choose_basis",
        lambda c: KeyBasis([0 * e for e in choose_basis(c).exponents], choose_basis(c).offsets),
    )
    second = load(str(exported(huge_keys, tmp_path / "b", "packed", "int4", "w8a8").path))
    assert first.engine.fingerprint != second.engine.fingerprint


def test_a_bundle_without_its_keys_is_refused(huge_keys: Path, tmp_path: Path) -> None:
    path = exported(huge_keys, tmp_path / "bundle", "packed").path
    shutil.rmtree(path / "keys")
    with pytest.raises(BundleError, match=r"keys/weights\.bin is missing"):
        open_bundle(path)
