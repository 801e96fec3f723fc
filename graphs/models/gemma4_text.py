"""Gemma 4: the last layers read K and V of others, and tokens have embeddings for each layer.

In 26B-A4B the MLP stands beside experts, each behind and before norms of its own. An assistant is a
small Gemma 4 that drafts for a large one: all its layers read K and V of that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs import rope_scaling
from edgellm.graphs.architecture import (
    GGUF_NAMES,
    HF_SANDWICH_NAMES,
    Architecture,
    Fused,
    GGUFHeader,
    Names,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import (
    OTHER_MODEL,
    Attention,
    LayerConfig,
    Mlp,
    Rope,
    SharedExpert,
)
from edgellm.graphs.layer_kinds import FULL, SLIDING, layer_types, sliding_of_gguf
from edgellm.graphs.tensor import Tensor, cut_rows, rows_of_tensor
from edgellm.graphs.translation import with_values
from edgellm.kernels.experts import Routing

_HF_NAMES: Names = {
    **HF_SANDWICH_NAMES,
    "layer_embedding": "model.embed_tokens_per_layer.weight",
    "layer_embedding_norm": "model.per_layer_projection_norm.weight",
    "layer_context": "model.per_layer_model_projection.weight",
    "layer_gate": "model.layers.{}.per_layer_input_gate.weight",
    "layer_output": "model.layers.{}.per_layer_projection.weight",
    "post_layer_norm": "model.layers.{}.post_per_layer_input_norm.weight",
    "layer_scale": "model.layers.{}.layer_scalar",
    "combine": "pre_projection.weight",
    "project": "post_projection.weight",
    **{f"shared_{x}": f"model.layers.{{}}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    "shared_post_norm": "model.layers.{}.post_feedforward_layernorm_1.weight",
    "router": "model.layers.{}.router.proj.weight",
    "router_norm": "model.layers.{}.router.scale",
    "expert_scale": "model.layers.{}.router.per_expert_scale",
    "experts_norm": "model.layers.{}.pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "model.layers.{}.post_feedforward_layernorm_2.weight",
    **{
        f"expert_{x}": Fused("model.layers.{}.experts.gate_up_proj", ("gate", "up"))
        for x in ("gate", "up")
    },
    "expert_down": "model.layers.{}.experts.down_proj",
}
_EXPERT_SCALE = "blk.0.ffn_down_exps.scale"
_SCALE = "blk.{}.layer_output_scale.weight"
_GGUF_NAMES: Names = {
    **GGUF_NAMES,
    "layer_embedding": "per_layer_token_embd.weight",
    "layer_embedding_norm": "per_layer_proj_norm.weight",
    "layer_context": "per_layer_model_proj.weight",
    "layer_gate": "blk.{}.inp_gate.weight",
    "layer_output": "blk.{}.proj.weight",
    "post_layer_norm": "blk.{}.post_norm.weight",
    "layer_scale": _SCALE,
    "combine": "nextn.pre_projection.weight",
    "project": "nextn.post_projection.weight",
    **{f"shared_{x}": f"blk.{{}}.ffn_{x}.weight" for x in ("gate", "up", "down")},
    "shared_post_norm": "blk.{}.post_ffw_norm_1.weight",
    "router_norm": "blk.{}.ffn_gate_inp.scale",
    "expert_scale": "blk.{}.ffn_down_exps.scale",
    "experts_norm": "blk.{}.pre_ffw_norm_2.weight",
    "experts_post_norm": "blk.{}.post_ffw_norm_2.weight",
}
# Defaults of keys that files leave out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
_UNIFIED = "gemma4_unified_text"
# Those of the 12B model, which has other names, and no embeddings for each layer.
_UNIFIED_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_FULL_HEAD_DIM = 512
_LOCAL_THETA = 10000.0
_PERIOD = 6
# A divisor of a RoPE frequency from which on the pair does not turn, as llama.cpp writes it.
_NO_TURN = 1e-20


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Sizes of all layers, in either format.

    Attributes:
        sliding: for each layer, whether it has the window.
        intermediate: width of each layer's MLP.
        local, full: attention of layers with and without the window.
        shared: number of last layers that read K and V of others; all of them: of another model.
        scaled: for each layer, whether the residual is multiplied at its end.
        experts, expert_width: choice of experts beside each MLP, and their width; None: there are
            none.
    """

    sliding: Sequence[bool]
    intermediate: Sequence[int]
    local: Attention
    full: Attention
    shared: int
    scaled: Sequence[bool]
    experts: Routing | None = None
    expert_width: int = 0

    def all(self, origin: str) -> tuple[LayerConfig, ...]:
        layers = []
        for index, width in enumerate(self.intermediate):
            shared = None
            if self.experts is not None:
                shared, width = SharedExpert(intermediate=width, beside=True), self.expert_width
            layer = LayerConfig(
                mixer=self._attention(index, origin),
                mlp=Mlp(intermediate=width, activation="gelu_tanh"),
                norms="sandwich",
                experts=self.experts,
                shared=shared,
                scaled=self.scaled[index],
            )
            layers.append(layer)
        return tuple(layers)

    def _attention(self, index: int, origin: str) -> Attention:
        kind = self.local if self.sliding[index] else self.full
        first = len(self.sliding) - self.shared
        if not 0 <= self.shared <= len(self.sliding):
            raise ModelFormatError(f"{origin}: {self.shared} layers share K and V of others")
        if index < first:
            return kind
        if first == 0:
            return replace(kind, kv_from=OTHER_MODEL, k_as_v=False)
        sources = [i for i in range(first) if self.sliding[i] == self.sliding[index]]
        if not sources:
            raise ModelFormatError(
                f"{origin}: layer {index} shares K and V, and no layer before it has its window"
            )
        return replace(kind, kv_from=sources[-1], k_as_v=False)


def attention_of(
    heads: int, kv_heads: int, head_dim: int, *, window: int | None = None, k_as_v: bool = False
) -> Attention:
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=0 if window is None else 1,
        window=window,
        scale=1.0,
        qk_norm="head",
        v_norm=True,
        k_as_v=k_as_v,
    )


def config_from_hf(fields: Fields) -> ModelConfig:
    unified = fields.read(str, "model_type") == _UNIFIED
    fields.assume({**_DEFAULTS, **(_UNIFIED_DEFAULTS if unified else {})})
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    fields.require("is_causal", True)
    fields.require("attention_bias", False)
    fields.require("use_bidirectional_attention", "vision")  # of images alone
    vocabulary = fields.read(int, "vocab_size")
    count, heads = (fields.read(int, f"num_{x}") for x in ("hidden_layers", "attention_heads"))
    sliding = layer_types(fields, count) or [(i + 1) % _PERIOD != 0 for i in range(count)]
    if sliding:
        sliding[-1] = False  # as transformers does
    k_as_v = fields.optional(bool, "attention_k_eq_v") or False
    kv_heads, head_dim = fields.read(int, "num_key_value_heads"), fields.read(int, "head_dim")
    full_heads, full_dim = _full_sizes(fields, sliding, kv_heads, k_as_v=k_as_v)
    backbone = fields.optional(int, "backbone_hidden_size")
    shared = fields.optional(int, "num_kv_shared_layers") or (0 if backbone is None else count)
    wide = 2 if fields.optional(bool, "use_double_wide_mlp") else 1
    width = fields.optional(int, "hidden_size_per_layer_input") or None
    if width is not None:
        fields.require("vocab_size_per_layer_input", vocabulary)
    experts = None
    if fields.optional(bool, "enable_moe_block"):
        experts = Routing(
            experts=fields.read(int, "num_experts"),
            used=fields.read(int, "top_k_experts"),
            scaled=True,
        )
    layers = Layers(
        sliding=sliding,
        experts=experts,
        expert_width=fields.optional(int, "moe_intermediate_size") or 0,
        intermediate=[
            fields.read(int, "intermediate_size") * (wide if i >= count - shared else 1)
            for i in range(count)
        ],
        local=attention_of(heads, kv_heads, head_dim, window=fields.read(int, "sliding_window")),
        full=attention_of(heads, full_heads, full_dim, k_as_v=k_as_v),
        shared=shared,
        scaled=[True] * count,
    )
    hidden_size = fields.read(int, "hidden_size")
    return ModelConfig(
        model_type="gemma4_text",
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        layers=layers.all(fields.origin),
        ropes=(
            rope_scaling.from_hf(fields, head_dim=full_dim, layer_type=FULL),
            rope_scaling.from_hf(fields, head_dim=head_dim, layer_type=SLIDING),
        ),
        norm_eps=fields.read(float, "rms_norm_eps"),
        context_length=rope_scaling.context_of_hf(fields, layer_type=FULL),
        tied_embedding=fields.optional(bool, "tie_word_embeddings") is not False,
        embedding_scale=hidden_size**0.5,
        logit_softcap=_softcap(fields, backbone),
        layer_embedding=width,
        backbone=backbone,
    )


def _softcap(fields: Fields, backbone: int | None) -> float | None:
    softcap = fields.optional(float, "final_logit_softcapping") or None
    return softcap if backbone is None else None  # an assistant's settings may name it, unused


def _full_sizes(
    fields: Fields, sliding: Sequence[bool], kv_heads: int, *, k_as_v: bool
) -> tuple[int, int]:
    """Return KV heads and head_dim of layers without a window.

    Newer files have them in `per_layer_config`, by the numbers of the layers.
    """
    layers = fields.optional(dict, "per_layer_config")
    if layers is None:
        head_dim = fields.optional(int, "global_head_dim") or _FULL_HEAD_DIM
        other = fields.optional(int, "num_global_key_value_heads")
        return other if k_as_v and other is not None else kv_heads, head_dim
    full = {str(index) for index, local in enumerate(sliding) if not local}
    sizes = [layers[key] for key in layers if layers[key]]
    if {key for key in layers if layers[key]} != full or any(x != sizes[0] for x in sizes):
        raise UnsupportedModelError(
            f"{fields.origin}: per_layer_config = {layers!r:.200} is not supported; supported is "
            "the same for all layers without a window, and nothing for the others"
        )
    each = Fields(sizes[0], origin=f"{fields.origin}: per_layer_config")
    head_dim = each.read(int, "head_dim")
    full_kv_heads = each.optional(int, "num_key_value_heads")
    each.refuse_unread()
    return kv_heads if full_kv_heads is None else full_kv_heads, head_dim


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    fields = header.fields
    fields.require("attention.causal", True)
    count = fields.read(int, "block_count")
    sliding = sliding_of_gguf(fields, count, period=_PERIOD)
    heads = fields.uniform("attention.head_count")
    kv_heads = by_layer(fields, "attention.head_count_kv", count)
    full_dim = fields.read(int, "attention.key_length")
    local_dim = fields.optional(int, "attention.key_length_swa") or full_dim
    fields.require("attention.value_length", full_dim)
    fields.require("attention.value_length_swa", local_dim)
    backbone = fields.optional(int, "embedding_length_out")
    shared = fields.optional(int, "attention.shared_kv_layers") or 0
    if backbone is not None:
        fields.ignore("nextn_predict_layers")
        shared = count
    own = range(max(count - shared, 0))
    k_as_v = any(f"blk.{i}.attn_v.weight" not in header.tensors for i in own if not sliding[i])
    theta = fields.positive("rope.freq_base_swa", default=_LOCAL_THETA)
    local = rope_scaling.plain(fields.optional(int, "rope.dimension_count_swa") or local_dim, theta)
    window = fields.read(int, "attention.sliding_window")
    experts = None
    if fields.optional(int, "expert_count"):
        fields.require("expert_gating_func", 0, 1)  # softmax
        experts = Routing(
            experts=fields.read(int, "expert_count"),
            used=fields.read(int, "expert_used_count"),
            scaled=_EXPERT_SCALE in header.tensors,
        )
    layers = Layers(
        sliding=sliding,
        experts=experts,
        expert_width=fields.optional(int, "expert_feed_forward_length") or 0,
        intermediate=by_layer(fields, "feed_forward_length", count),
        local=attention_of(heads, _one(fields, kv_heads, sliding, True), local_dim, window=window),
        full=attention_of(heads, _one(fields, kv_heads, sliding, False), full_dim, k_as_v=k_as_v),
        shared=shared,
        scaled=[_SCALE.format(i) in header.tensors for i in range(count)],
    )
    hidden_size = fields.read(int, "embedding_length")
    return ModelConfig(
        model_type=header.model_type,
        vocab_size=header.vocab_size,
        hidden_size=hidden_size,
        layers=layers.all(fields.origin),
        ropes=(_turning(rope_scaling.from_gguf(header, head_dim=full_dim)), local),
        norm_eps=fields.read(float, "attention.layer_norm_rms_epsilon"),
        context_length=rope_scaling.context_of_gguf(header),
        tied_embedding="output.weight" not in header.tensors,
        embedding_scale=hidden_size**0.5,
        logit_softcap=_softcap(fields, backbone),
        backbone=backbone,
        layer_embedding=fields.optional(int, "embedding_length_per_layer_input") or None,
    )


def by_layer(fields: Fields, key: str, count: int) -> list[int]:
    """Return the entries of a key that is a number or has one for each layer."""
    if not fields.holds(list, key):
        return [fields.read(int, key)] * count
    return fields.entries(int, key, count) or []


def _one(fields: Fields, values: Sequence[int], sliding: Sequence[bool], local: bool) -> int:
    """Return the KV heads of layers with or without the window, which are the same in all."""
    counts = {value for value, here in zip(values, sliding, strict=True) if here == local}
    if len(counts) > 1:
        raise UnsupportedModelError(
            f"{fields.origin}: layers of one kind have {sorted(counts)} KV heads; supported is one "
            "number for each kind"
        )
    return counts.pop() if counts else values[0]


def _turning(rope: Rope) -> Rope:
    return replace(rope, inv_freq=tuple(x if x > _NO_TURN else 0.0 for x in rope.inv_freq))


def fold(name: str, tensor: Tensor, fields: Fields, *, count: str) -> Tensor:
    """Cut the table's rows, and the rows of the projection that belong to a layer.

    The router divides what it reads by the root of its width.

    Args:
        count: key of the number of layers.
    """
    if name.endswith(".router_norm"):
        return with_values(tensor, lambda values: values * np.float32(values.size**-0.5))
    if name == "layer_embedding":
        return cut_rows(tensor, fields.read(int, count))
    if name.endswith(".layer_context"):
        layers = fields.read(int, count)
        width, layer = tensor.shape[0] // layers, int(name.split(".")[1])
        return rows_of_tensor(tensor, slice(layer * width, (layer + 1) * width))
    return tensor


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names=_HF_NAMES,
    gguf_names=_GGUF_NAMES,
    hf_fold=partial(fold, count="num_hidden_layers"),
    gguf_fold=partial(fold, count="block_count"),
)
