from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from random_checkpoint import CONFIGS

from edgellm.backends.providers import PROVIDERS
from edgellm.backends.registry import DECODE_BACKENDS
from edgellm.export.precisions import PRECISIONS
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import (
    OTHER_MODEL,
    Attention,
    Latent,
    LayerConfig,
    Mlp,
    SharedExpert,
)
from edgellm.graphs.state_mixers import DeltaNet, Mamba2, ShortConv
from edgellm.kernels.experts import Routing
from edgellm.store.precision_support import PARTS, needs_host, why_not, why_untried

CONFIG = CONFIGS["llama"]
LAYER = CONFIG.layers[0]
ROUTED = replace(LAYER, experts=Routing(experts=4, used=2))
NETS = {"key_heads": 1, "value_heads": 1, "key_dim": 16, "value_dim": 32}
MAMBA = Mamba2(heads=2, head_dim=16, state_dim=16, groups=1, taps=4, norm_eps=1e-5)
# Fields that all precisions and back ends compute, those of experts where there are experts; others
# are parts of the table.
EVERYWHERE: dict[type, set[str]] = {
    LayerConfig: {"mlp", "shared"},
    Mlp: {"intermediate", "gated", "bias"},
    Attention: {
        *("heads", "kv_heads", "head_dim", "rope", "window", "scale", "qk_norm", "softcap"),
        *("qkv_bias", "output_bias"),
    },
    Routing: {field.name for field in fields(Routing)},
    SharedExpert: {"intermediate", "routed"},
    ModelConfig: {
        *("model_type", "vocab_size", "hidden_size", "layers", "ropes", "norm_eps"),
        "layer_tokens",  # of a model with embeddings for each layer
        "settings",  # in the weights
        *("context_length", "tied_embedding", "embedding_scale", "logit_softcap"),
    },
}


def layer(of: LayerConfig = LAYER, **changes: Any) -> ModelConfig:
    return replace(CONFIG, layers=(LAYER, replace(of, **changes)))


def attention(**changes: Any) -> ModelConfig:
    return layer(mixer=replace(LAYER.attention, **changes))


NORMED = {"qk_norm": "head"}
# Field of a config -> a model with it, and the part that it is.
CASES: dict[tuple[type, str], tuple[ModelConfig, str]] = {
    (LayerConfig, "experts"): (layer(ROUTED), "experts"),
    (SharedExpert, "beside"): (
        layer(ROUTED, norms="sandwich", shared=SharedExpert(intermediate=32, beside=True)),
        "an MLP beside experts",
    ),
    (LayerConfig, "beside"): (layer(beside=MAMBA), "a mixer beside attention"),
    (LayerConfig, "scaled"): (layer(scaled=True), "scaled layers"),
    (LayerConfig, "laurel"): (layer(norms="sandwich", laurel=32), "products beside attention"),
    (LayerConfig, "norms"): (layer(norms="sandwich"), "norms of what attention and MLP add"),
    (LayerConfig, "mixer"): (layer(mixer=ShortConv(channels=96, taps=3)), "layers with states"),
    (Mlp, "activation"): (
        layer(mlp=replace(LAYER.mlp, activation="clamped_swiglu")),
        "a clamped SwiGLU without experts",
    ),
    (Mlp, "cutoff"): (layer(mlp=replace(LAYER.mlp, cutoff=1.6)), "gates above a cutoff"),
    (Attention, "v_norm"): (attention(v_norm=True, **NORMED), "norms of V"),
    (Attention, "k_as_v"): (attention(k_as_v=True, **NORMED), "V made of K"),
    (Attention, "kv_from"): (attention(kv_from=0), "layers that share K and V"),
    (Attention, "output_gate"): (attention(output_gate=True), "gates of attention"),
    (Attention, "sinks"): (attention(sinks=True), "attention sinks"),
    (Attention, "latent"): (
        attention(kv_heads=1, scale=0.1, latent=Latent(rank=64, key=32, value=32)),
        "attention over latents",
    ),
    (ModelConfig, "norm"): (replace(CONFIG, norm="layer"), "layer norms"),
    (ModelConfig, "backbone"): (
        replace(
            CONFIG,
            layers=(replace(LAYER, mixer=replace(LAYER.attention, kv_from=OTHER_MODEL)),),
            backbone=64,
        ),
        "K and V of another model",
    ),
    (ModelConfig, "streams"): (replace(CONFIG, streams=2), "several residual streams"),
    (ModelConfig, "layer_embedding"): (
        replace(CONFIG, layer_embedding=32),
        "embeddings for each layer",
    ),
}

# Parts that the C++ kernels compute between graphs, or decode alone.
BETWEEN = (
    *((Attention, field) for field in ("latent", "kv_from", "v_norm", "k_as_v")),
    *((LayerConfig, "scaled"), (LayerConfig, "laurel"), (SharedExpert, "beside"), (Mlp, "cutoff")),
    *((ModelConfig, "layer_embedding"), (ModelConfig, "streams")),
)


def test_every_field_is_in_the_table_or_computed_everywhere() -> None:
    for kind, known in EVERYWHERE.items():
        parts = {name for of, name in CASES if of is kind}
        assert {field.name for field in fields(kind)} == known | parts, kind


@pytest.mark.parametrize("field", CASES, ids=lambda field: f"{field[0].__name__}.{field[1]}")
def test_a_part_is_named(field: tuple[type, str]) -> None:
    config, name = CASES[field]
    reasons = [why_not(each, config) for part in PARTS for each in part.lacking]
    assert any(name in (reason or "") for reason in reasons)


def test_names_are_those_of_precisions_and_back_ends() -> None:
    assert {name for part in PARTS for name in part.lacking} <= {
        *PRECISIONS,
        *DECODE_BACKENDS,
        *PROVIDERS,
    }
    for name in ("packed", "native"):
        assert all(name not in part.lacking for part in PARTS)


def test_triton_has_mixers() -> None:
    for changes in ({"mixer": DeltaNet(**NETS, taps=4)}, {"mixer": MAMBA}, {"beside": MAMBA}):
        assert why_not("triton", layer(**changes)) is None


def test_auto_leaves_alone_what_no_gpu_has_computed() -> None:
    assert why_untried("triton", layer(ROUTED)) is None
    assert why_untried("native", CASES[Attention, "sinks"][0]) is None
    routed = layer(replace(ROUTED, experts=replace(ROUTED.experts, scores="sigmoid")))
    for config, part in (
        (layer(mixer=DeltaNet(**NETS, taps=4)), "layers with states"),
        (layer(beside=MAMBA), "layers with states"),
        (attention(sinks=True), "attention sinks"),
        (CASES[Attention, "latent"][0], "attention over latents"),
        (CASES[Attention, "kv_from"][0], "layers that share K and V"),
        (CASES[Attention, "k_as_v"][0], "V made of K"),
        (CASES[Attention, "v_norm"][0], "norms of V"),
        (CASES[LayerConfig, "scaled"][0], "scaled layers"),
        (CASES[ModelConfig, "layer_embedding"][0], "embeddings for each layer"),
        (CASES[ModelConfig, "streams"][0], "several residual streams"),
        (CASES[LayerConfig, "laurel"][0], "products beside attention"),
        (CASES[Mlp, "cutoff"][0], "gates above a cutoff"),
        (attention(heads=2 * LAYER.attention.heads), "layers that differ in heads"),
        (layer(ROUTED, shared=SharedExpert(intermediate=32)), "shared experts"),
        (routed, "routers with sigmoids"),
    ):
        assert f"it has {part}" in (why_untried("triton", config) or "")


@pytest.mark.parametrize(
    "config",
    [
        layer(mixer=DeltaNet(**NETS, taps=4)),
        layer(beside=MAMBA),
        *(CASES[each][0] for each in BETWEEN),
    ],
)
def test_what_stands_between_graphs(config: ModelConfig) -> None:
    assert needs_host(config)
    rotates = config.layers[1].norms == "pre"
    for name in ("f32", "f16", "w4a16", *(["w8a8"] if rotates else [])):
        assert why_not(name, config) is None
    for name in ("w8a16-qdq", "int4", "portable", "cuda"):
        assert f"which {name} does not compute" in (why_not(name, config) or "")


def test_what_needs_no_host() -> None:
    assert not needs_host(CONFIG)
    reason = "it has layers with states, which w8a16-qdq does not compute"
    assert why_not("w8a16-qdq", layer(mixer=DeltaNet(**NETS, taps=4))) == reason
