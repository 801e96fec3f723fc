"""Judged by transformers' own RoPE initialisation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs import rope_scaling
from edgellm.graphs.architecture import GGUFHeader
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import Attention, LayerConfig, Mlp, Rope
from edgellm.graphs.layer_kinds import FULL, SLIDING

DIM, THETA, CONTEXT = 128, 500000.0, 4096
ORIGINAL = {"original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 64 for i in range(DIM // 2)],
    "long_factor": [2.0 + i for i in range(DIM // 2)],
    **ORIGINAL,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn_mscale": {**YARN, "mscale": 0.5, "mscale_all_dim": 0.9},
    "yarn_one_mscale": {**YARN, "mscale": 0.5},
    "yarn_betas": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn_not_truncated": {**YARN, "truncate": False},
    "longrope": LONGROPE,
    "longrope_factor": {**LONGROPE, "factor": 9.0},
    "longrope_attention_factor": {**LONGROPE, "attention_factor": 1.4},
    "longrope_old": {**LONGROPE, "factor": 0.5},
}


def fields_of(**values: Any) -> Fields:
    return Fields({"max_position_embeddings": CONTEXT, **values}, origin="config.json")


def same(found: Rope, judge: Any) -> None:
    np.testing.assert_allclose(found.inv_freq, judge.inv_freq.numpy(), rtol=2e-6)
    assert found.magnitude == pytest.approx(judge.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("partial", [None, 0.5], ids=["whole", "half"])
@pytest.mark.parametrize("name", SCALINGS)
def test_matches_transformers(name: str, partial: float | None) -> None:
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    scaling = dict(SCALINGS[name])
    if partial is not None:
        for key in {"short_factor", "long_factor"} & scaling.keys():
            scaling[key] = scaling[key][: DIM // 4]
    parameters = {"rope_theta": THETA, "partial_rotary_factor": partial or 1.0, **scaling}
    config = Phi3Config(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=CONTEXT, **ORIGINAL
    )
    config.rope_parameters = dict(parameters)
    judge = Phi3RotaryEmbedding(config)
    same(
        rope_scaling.from_hf(fields_of(rope_parameters=parameters), head_dim=DIM, partial=True),
        judge,
    )
    # as versions before 5 wrote it
    old = fields_of(rope_theta=THETA, rope_scaling=scaling, partial_rotary_factor=partial)
    same(rope_scaling.from_hf(old, head_dim=DIM, partial=True), judge)


def test_original_context_is_found_where_files_have_it() -> None:
    """Outside wins over inside, as in transformers; nowhere, it is the context."""
    inside = {**YARN, "rope_theta": THETA}
    without = {key: value for key, value in inside.items() if key not in ORIGINAL}

    def frequencies(**values: Any) -> tuple[float, ...]:
        return rope_scaling.from_hf(fields_of(**values), head_dim=DIM, partial=True).inv_freq

    outside = frequencies(rope_parameters=inside, original_max_position_embeddings=64)
    assert outside == frequencies(
        rope_parameters={**inside, "original_max_position_embeddings": 64}
    )
    assert outside != frequencies(rope_parameters=inside)
    assert frequencies(rope_parameters=without) == frequencies(
        rope_parameters={**inside, "original_max_position_embeddings": CONTEXT}
    )


def test_types_of_layers_have_settings_of_their_own() -> None:
    nested = {FULL: {**YARN, "rope_theta": THETA}, SLIDING: {"rope_type": "default"}}
    fields = fields_of(rope_parameters=nested, rope_theta=77.0)
    full = rope_scaling.from_hf(fields, head_dim=DIM, layer_type=FULL)
    flat = fields_of(rope_parameters=nested[FULL])
    assert full == rope_scaling.from_hf(flat, head_dim=DIM)
    local = rope_scaling.local_from_hf(fields, head_dim=DIM, theta=300.0)
    assert local == rope_scaling.plain(DIM, 300.0)
    with pytest.raises(UnsupportedModelError, match="full_attention"):
        rope_scaling.from_hf(fields, head_dim=DIM)


@pytest.mark.parametrize(
    ("parameters", "context"),
    [
        (LONGROPE, 1024),
        ({**YARN, "llama_4_scaling_beta": 0.1}, 1024),
        ({**YARN, "llama_4_scaling_beta": 0.0}, CONTEXT),
        (YARN, CONTEXT),
    ],
)
def test_where_a_context_ends(parameters: dict[str, Any], context: int) -> None:
    assert rope_scaling.context_of_hf(fields_of(rope_parameters=parameters)) == context


def test_gguf_factors_divide() -> None:
    base = rope_scaling.base_frequencies(8, 10000.0)
    np.testing.assert_allclose(
        rope_scaling.scale_by_factors(base, [1, 2, 4, 8]) * [1, 2, 4, 8], base
    )
    with pytest.raises(ModelFormatError, match="expected 4 positive"):
        rope_scaling.scale_by_factors(base, [1, 2])


def header(vectors: dict[str, list[float]] | None = None, **values: Any) -> GGUFHeader:
    """A file's keys below `rope.`, with `_of_` in place of other dots."""
    keys = {f"x.rope.{key.replace('_of_', '.')}": value for key, value in values.items()}
    return GGUFHeader(
        model_type="x",
        fields=Fields({"x.context_length": CONTEXT, **keys}, origin="m.gguf", prefix="x."),
        vocab_size=1,
        tensors={name: (len(values),) for name, values in (vectors or {}).items()},
        vector=(vectors or {}).get,
    )


def test_gguf_keys_say_what_config_files_say() -> None:
    def both(gguf: GGUFHeader, **hf: Any) -> None:
        found = rope_scaling.from_gguf(gguf, head_dim=DIM)
        expected = rope_scaling.from_hf(
            fields_of(rope_theta=THETA, **hf), head_dim=DIM, partial=True
        )
        np.testing.assert_allclose(found.inv_freq, expected.inv_freq, rtol=1e-12)
        assert found.magnitude == pytest.approx(expected.magnitude)

    both(header(freq_base=THETA))
    both(header(freq_base=THETA, dimension_count=64), partial_rotary_factor=0.5)
    linear = SCALINGS["linear"]
    both(header(freq_base=THETA, scaling_of_factor=4.0), rope_scaling=linear)
    both(header(freq_base=THETA, scale_linear=4.0), rope_scaling=linear)
    both(header(freq_base=THETA, scaling_of_type="none", scaling_of_factor=4.0))
    yarn = {
        "freq_base": THETA,
        "scaling_of_type": "yarn",
        "scaling_of_factor": 4.0,
        "scaling_of_original_context_length": 1024,
    }
    both(header(**yarn), rope_scaling=YARN)
    both(
        header(**yarn, scaling_of_yarn_beta_fast=8.0, scaling_of_yarn_beta_slow=2.0),
        rope_scaling=SCALINGS["yarn_betas"],
    )
    both(
        header(**yarn, scaling_of_yarn_log_multiplier=0.9),
        rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.9},
    )
    both(
        header(**yarn, scaling_of_yarn_attn_factor=0.7),
        rope_scaling=SCALINGS["yarn_attention_factor"],
    )
    short = {"rope_factors_short.weight": LONGROPE["short_factor"]}
    both(header(short, freq_base=THETA, scaling_of_attn_factor=1.4), rope_scaling={
        **LONGROPE, "attention_factor": 1.4
    })  # fmt: skip


@pytest.mark.parametrize("scaling", [{"type": "cubic"}, {"rope_type": "cubic"}])
def test_unknown_scaling_is_refused_by_name(scaling: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="'cubic'"):
        rope_scaling.from_hf(fields_of(rope_scaling=scaling), head_dim=64)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "linear"}, "factor' is missing"),
        ({"type": "linear", "factor": -1.0}, "factor is -1"),
        ({"type": "yarn", "factor": 0.0}, "factor is 0"),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "context 0"),
        ({"type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "base 1.0"),
        ({"type": "longrope"}, "short_factor' is missing"),
        ({"type": "longrope", "short_factor": ["x"] * 32}, "32 positive"),
        ({**LONGROPE, "short_factor": [1.0] * 32, "original_max_position_embeddings": 1}, "is 1;"),
        ({"type": "dynamic", "alpha": -2.0}, "alpha is -2"),
        ({"partial_rotary_factor": 0.01}, "RoPE dimension 0"),
        ({"rope_theta": -5.0}, "base -5"),
        ({"rope_type": 3}, "expected str"),
    ],
)
def test_settings_that_make_no_sense(scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        rope_scaling.from_hf(fields_of(rope_scaling=scaling), head_dim=64, partial=True)


def test_settings_that_are_not_understood_are_refused_by_name() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 32, "long_mscale": 1.2, **ORIGINAL}
    with pytest.raises(UnsupportedModelError, match=r"long_mscale = .* is not understood"):
        rope_scaling.from_hf(fields_of(rope_scaling=scaling), head_dim=64)


@pytest.mark.parametrize("factor", [2.0, 4.5])
def test_a_stretched_config_is_that_of_yarn_in_the_files(factor: float) -> None:
    plain = rope_scaling.plain(DIM, THETA)
    attention = Attention(heads=4, kv_heads=2, head_dim=DIM)
    window = replace(attention, rope=1, window=64)
    config = ModelConfig(
        model_type="llama",
        vocab_size=320,
        hidden_size=96,
        layers=tuple(
            LayerConfig(mixer=each, mlp=Mlp(intermediate=96)) for each in (attention, window)
        ),
        ropes=(plain, rope_scaling.plain(DIM, 10000.0)),
        norm_eps=1e-5,
        context_length=CONTEXT,
        tied_embedding=True,
    )
    found = rope_scaling.stretch(config, factor)
    yarn = {"rope_type": "yarn", "factor": factor, "rope_theta": THETA}
    yarn["original_max_position_embeddings"] = CONTEXT
    asked = rope_scaling.from_hf(fields_of(rope_parameters=yarn), head_dim=DIM)
    np.testing.assert_allclose(found.ropes[0].inv_freq, asked.inv_freq, rtol=1e-9)
    assert found.ropes[0].magnitude == asked.magnitude
    assert found.ropes[1] == config.ropes[1]
    assert found.context_length == CONTEXT * factor
    windows = replace(config, layers=(LayerConfig(mixer=window, mlp=Mlp(intermediate=96)),))
    with pytest.raises(UnsupportedModelError, match="no layer of the model sees all positions"):
        rope_scaling.stretch(windows, factor)
    for scaled in ({"rope_type": "linear", "factor": 2.0}, SCALINGS["llama3"], yarn):
        parameters = {"rope_theta": THETA, **scaled}
        rope = rope_scaling.from_hf(fields_of(rope_parameters=parameters), head_dim=DIM)
        with pytest.raises(UnsupportedModelError, match="files scale RoPE already"):
            rope_scaling.stretch(replace(config, ropes=(rope, *config.ropes[1:])), factor)
