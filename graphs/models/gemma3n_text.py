"""Gemma 3n: four residual streams, a product beside attention, gates above a cutoff.

As in Gemma 4, the last layers read K and V of others, and tokens have embeddings for each layer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import NormalDist

import numpy as np

from edgellm.errors import ModelFormatError
from edgellm.graphs import rope_scaling
from edgellm.graphs.architecture import Architecture, GGUFHeader, Names, PerExpert, with_layers
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import FULL, by_period, layer_types, sliding_of_gguf
from edgellm.graphs.models import gemma4_text
from edgellm.graphs.tensor import Tensor
from edgellm.graphs.translation import with_values

_ALTUP, _LAUREL = "model.layers.{}.altup.", "model.layers.{}.laurel."
_HF_NAMES: Names = {
    **gemma4_text.ARCHITECTURE.hf_names,
    "streams_enter": PerExpert("model.altup_projections.{}.weight"),
    "streams_leave": PerExpert("model.altup_unembed_projections.{}.weight"),
    "altup_router_norm": f"{_ALTUP}router_norm.weight",
    "altup_router": f"{_ALTUP}modality_router.weight",
    "altup_predict": f"{_ALTUP}prediction_coefs.weight",
    "altup_correct": f"{_ALTUP}correction_coefs.weight",
    "altup_scale": f"{_ALTUP}correct_output_scale",
    "laurel_left": f"{_LAUREL}linear_left.weight",
    "laurel_right": f"{_LAUREL}linear_right.weight",
    "laurel_norm": f"{_LAUREL}post_laurel_norm.weight",
}
_GGUF_NAMES: Names = {
    **gemma4_text.ARCHITECTURE.gguf_names,
    "streams_enter": "altup_proj.weight",
    "streams_leave": "altup_unembd_proj.weight",
    "altup_router_norm": "blk.{}.altup_router_norm.weight",
    "altup_router": "blk.{}.altup_router.weight",
    "altup_predict": "blk.{}.altup_predict_coef.weight",
    "altup_correct": "blk.{}.altup_correct_coef.weight",
    "altup_scale": "blk.{}.altup_correct_scale.weight",
    "laurel_left": "blk.{}.laurel_l.weight",
    "laurel_right": "blk.{}.laurel_r.weight",
    "laurel_norm": "blk.{}.laurel_post_norm.weight",
}
# Tensors with numbers of rows that no key says.
_GGUF_TABLE, _GGUF_LAUREL = "per_layer_token_embd.weight", "blk.0.laurel_l.weight"
_THETA, _LOCAL_THETA = 1e6, 10000.0
_SOFTCAP = 30.0
_PERIOD = 5
# Layers whose gates are cut off where a file does not say it, and the share that is cut off.
_SPARSE_LAYERS, _SPARSE = 10, 0.95
# Defaults of keys that files leave out.
_DEFAULTS = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": _THETA,
    "sliding_window": 512,
    "final_logit_softcapping": _SOFTCAP,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume(_DEFAULTS)
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    fields.require("attention_bias", False)
    fields.require("is_causal", True)
    fields.require("altup_active_idx", 0)
    # of training, and one that no code reads
    fields.ignore("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar")
    fields.require("altup_correct_scale", True, False)  # see _hf_fold
    count, heads = (fields.read(int, f"num_{x}") for x in ("hidden_layers", "attention_heads"))
    kv_heads, head_dim = fields.read(int, "num_key_value_heads"), fields.read(int, "head_dim")
    sliding = layer_types(fields, count) or by_period(count, _PERIOD)
    attention = partial(gemma4_text.attention_of, heads, kv_heads, head_dim)
    hidden_size, vocabulary = (fields.read(int, x) for x in ("hidden_size", "vocab_size"))
    known = fields.read(int, "vocab_size_per_layer_input")
    theta = fields.positive("rope_local_base_freq", default=_LOCAL_THETA)
    layers = gemma4_text.Layers(
        sliding=sliding,
        intermediate=gemma4_text.by_layer(fields, "intermediate_size", count),
        local=attention(window=fields.read(int, "sliding_window")),
        full=attention(),
        shared=fields.read(int, "num_kv_shared_layers"),
        scaled=[False] * count,
    )
    config = ModelConfig(
        model_type="gemma3n_text",
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        layers=layers.all(fields.origin),
        ropes=(
            rope_scaling.from_hf(fields, head_dim=head_dim, layer_type=FULL),
            rope_scaling.local_from_hf(fields, head_dim=head_dim, theta=theta),
        ),
        norm_eps=fields.read(float, "rms_norm_eps"),
        context_length=rope_scaling.context_of_hf(fields, layer_type=FULL),
        tied_embedding=fields.optional(bool, "tie_word_embeddings") is not False,
        embedding_scale=hidden_size**0.5,
        logit_softcap=fields.optional(float, "final_logit_softcapping"),
        layer_embedding=fields.read(int, "hidden_size_per_layer_input"),
        # behind them are tokens of images and sound
        layer_tokens=None if known == vocabulary else known,
        streams=fields.read(int, "altup_num_inputs"),
    )
    shares = fields.entries(float, "activation_sparsity_pattern", count)
    cutoffs = _usual_cutoffs(count) if shares is None else [_cutoff(x, fields) for x in shares]
    return _with_parts(config, cutoffs, rank=fields.read(int, "laurel_rank"))


def _cutoff(share: float, fields: Fields) -> float | None:
    """Return the standard deviations above the mean that a share of normal numbers is below."""
    if not 0 <= share < 1:
        raise ModelFormatError(
            f"{fields.origin}: activation_sparsity_pattern has {share}; 0 to below 1 is allowed"
        )
    return NormalDist().inv_cdf(share) if share else None


def _usual_cutoffs(count: int) -> list[float | None]:
    sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
    return [NormalDist().inv_cdf(_SPARSE) if i < sparse else None for i in range(count)]


def _with_parts(config: ModelConfig, cutoffs: list[float | None], *, rank: int) -> ModelConfig:
    return with_layers(
        config,
        lambda i, layer: replace(layer, mlp=replace(layer.mlp, cutoff=cutoffs[i]), laurel=rank),
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    fields = header.fields
    fields.assume({"rope.freq_base": _THETA, "altup.num_inputs": 4})
    fields.require("altup.correct_scale", True)
    fields.ignore("altup.lr_multiplier")
    fields.require("altup.active_idx", 0)
    fields.require("attention.causal", True)
    count = fields.read(int, "block_count")
    # Ollama's converter has names of its own for this and the base of RoPE
    head_dim = fields.optional(int, "attention.key_length") or fields.read(int, "head_dim")
    fields.require("attention.value_length", head_dim)
    local = "rope.freq_base_local" if "rope.freq_base_local" in fields else "rope.freq_base_swa"
    heads, kv_heads = (fields.uniform(f"attention.head_count{x}") for x in ("", "_kv"))
    attention = partial(gemma4_text.attention_of, heads, kv_heads, head_dim)
    hidden_size = fields.read(int, "embedding_length")
    layers = gemma4_text.Layers(
        sliding=sliding_of_gguf(fields, count, period=_PERIOD),
        intermediate=gemma4_text.by_layer(fields, "feed_forward_length", count),
        local=attention(window=fields.read(int, "attention.sliding_window")),
        full=attention(),
        shared=fields.read(int, "attention.shared_kv_layers"),
        scaled=[False] * count,
    )
    theta = fields.positive(local, default=_LOCAL_THETA)
    known, rank = (sum(header.tensors.get(x, ())[:1]) for x in (_GGUF_TABLE, _GGUF_LAUREL))
    config = ModelConfig(
        model_type=header.model_type,
        vocab_size=header.vocab_size,
        hidden_size=hidden_size,
        layers=layers.all(fields.origin),
        ropes=(
            rope_scaling.from_gguf(header, head_dim=head_dim),
            rope_scaling.plain(head_dim, theta),
        ),
        norm_eps=fields.read(float, "attention.layer_norm_rms_epsilon"),
        context_length=rope_scaling.context_of_gguf(header),
        tied_embedding="output.weight" not in header.tensors,
        embedding_scale=hidden_size**0.5,
        logit_softcap=fields.positive("final_logit_softcapping", default=_SOFTCAP),
        layer_embedding=fields.read(int, "embedding_length_per_layer_input"),
        layer_tokens=known if known < header.vocab_size else None,
        streams=fields.read(int, "altup.num_inputs"),
    )
    scales = fields.entries(float, "activation_sparsity_scale", count)
    cutoffs = _usual_cutoffs(count)
    if scales is not None:
        cutoffs = [None if scale == -math.inf else scale for scale in scales]
    return _with_parts(config, cutoffs, rank=rank)


def _hf_fold(name: str, tensor: Tensor, fields: Fields) -> Tensor:
    """Leave out a scale that the config says is unused; see `_fold` for the rest."""
    scaled = fields.optional(bool, "altup_correct_scale") is not False
    if name.endswith(".altup_scale") and not scaled:
        return with_values(tensor, np.ones_like)
    return _fold(name, tensor, fields, count="num_hidden_layers")


def _fold(name: str, tensor: Tensor, fields: Fields, *, count: str) -> Tensor:
    """Divide what the router of streams reads by the width; see `gemma4_text.fold` for the rest."""
    if name.endswith(".altup_router_norm"):
        return with_values(tensor, lambda values: values / np.float32(values.size))
    return gemma4_text.fold(name, tensor, fields, count=count)


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names=_HF_NAMES,
    gguf_names=_GGUF_NAMES,
    hf_fold=_hf_fold,
    gguf_fold=partial(_fold, count="block_count"),
)
