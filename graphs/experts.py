"""Experts in config files: their number, their size, and how a router chooses among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.architecture import GGUFHeader, with_layers
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import LayerConfig, SharedExpert
from edgellm.kernels.experts import Routing, Scores

# `expert_gating_func` of GGUF files: the softmax of all logits, the sigmoid of each, the softmax of
# the chosen ones.
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3
# Keys for the number of experts in config.json; transformers writes one of them.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Keys for the size of the shared experts in GGUF files: of all of them, or their number.
_SHARED_SIZE, _SHARED_COUNT = "expert_shared_feed_forward_length", "expert_shared_count"


def with_experts(
    config: ModelConfig,
    experts: Routing,
    *,
    intermediate: int | None = None,
    shared: SharedExpert | None = None,
    sparse: Sequence[bool] | None = None,
) -> ModelConfig:
    """Return the config with experts in place of one MLP.

    Args:
        intermediate: size of an expert; None: that of the MLP.
        shared: expert that all tokens go through as well; None: there is none.
        sparse: for each layer, whether it has experts; None: all have.
    """

    def change(index: int, layer: LayerConfig) -> LayerConfig:
        if sparse is not None and not sparse[index]:
            return layer
        mlp = replace(layer.mlp, intermediate=intermediate or layer.mlp.intermediate)
        return replace(layer, mlp=mlp, experts=experts, shared=shared)

    return with_layers(config, change)


def routing_from_hf(fields: Fields, *, normalized: bool) -> Routing:
    """Read the experts of a `config.json`.

    Args:
        normalized: whether the weights of a token's experts have the sum 1.

    Raises:
        ModelFormatError: the number of experts is missing, or there are two.
    """
    keys = [key for key in _COUNTS if key in fields]
    if len({fields.read(int, key) for key in keys}) > 1:
        raise ModelFormatError(f"{fields.origin}: {' and '.join(keys)} differ")
    key = keys[0] if keys else _COUNTS[0]
    used = fields.read(int, "num_experts_per_tok")
    return Routing(experts=fields.read(int, key), used=used, normalized=normalized)


def sigmoids_from_hf(fields: Fields) -> Routing:
    """Read experts that are chosen by their sigmoids, of some groups, with a bias (DeepSeek-V3)."""
    return replace(
        routing_from_hf(fields, normalized=fields.optional(bool, "norm_topk_prob") is not False),
        scores="sigmoid",
        selection_bias=True,
        scale=fields.positive("routed_scaling_factor", default=1.0),
        groups=fields.optional(int, "n_group") or 1,
        used_groups=fields.optional(int, "topk_group") or 1,
    )


def sparse_layers(fields: Fields, count: int) -> list[bool]:
    """Return for each layer of a `config.json` of Qwen whether it has experts."""
    step = fields.optional(int, "decoder_sparse_step")
    step = 1 if step is None else step
    if step < 1:
        raise ModelFormatError(
            f"{fields.origin}: decoder_sparse_step is {step}; 1 or more is allowed"
        )
    dense = fields.optional(list, "mlp_only_layers") or []
    return [(index + 1) % step == 0 and index not in dense for index in range(count)]


def experts_from_gguf(
    config: ModelConfig,
    header: GGUFHeader,
    *,
    normalized: bool,
    scores: Scores = "softmax",
    selection_bias: bool = False,
) -> ModelConfig:
    """Return the config with the experts of a GGUF file in all layers behind the dense ones.

    Args:
        normalized: whether the weights of a token's experts have the sum 1 where the file does not
            say it.
        scores: scores of the experts where the file does not say it.
        selection_bias: whether the choice of experts has a bias.

    Raises:
        UnsupportedModelError: a router of another kind, or a tensor for each expert.
    """
    fields = header.fields
    if "blk.0.ffn_gate.0.weight" in header.tensors:
        raise UnsupportedModelError(
            f"{fields.origin}: each expert has tensors of its own, as llama.cpp wrote them until "
            "April 2024; take a newer file of the model"
        )
    fields.require("expert_gating_func", 0, _SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN)
    kind = fields.optional(int, "expert_gating_func")
    said = fields.optional(bool, "expert_weights_norm")
    dense = fields.optional(int, "leading_dense_block_count") or 0
    of_last = f"blk.{config.layer_count - 1}."
    experts = Routing(
        experts=fields.read(int, "expert_count"),
        used=fields.read(int, "expert_used_count"),
        normalized=kind == _SOFTMAX_OF_CHOSEN or (normalized if said is None else said),
        # files write 0 for none
        scale=fields.optional(float, "expert_weights_scale") or 1.0,
        scores="sigmoid" if kind == _SIGMOID else "softmax" if kind else scores,
        bias=f"{of_last}ffn_gate_inp.bias" in header.tensors,
        selection_bias=selection_bias,
        groups=fields.optional(int, "expert_group_count") or 1,
        used_groups=fields.optional(int, "expert_group_used_count") or 1,
    )
    size = fields.optional(int, "expert_feed_forward_length")
    return with_experts(
        config,
        experts,
        intermediate=size,
        shared=_shared_from_gguf(header, size or config.layers[0].mlp.intermediate, of_last),
        sparse=[index >= dense for index in range(config.layer_count)],
    )


def _shared_from_gguf(header: GGUFHeader, size: int, of_layer: str) -> SharedExpert | None:
    """Read the shared experts, which are one MLP of the size of all, where a file has some.

    Args:
        size: size of one of the experts that the router chooses.
        of_layer: what the names of a layer's tensors begin with.
    """
    fields = header.fields
    count = fields.optional(int, _SHARED_COUNT) or 0
    whole = fields.optional(int, _SHARED_SIZE) or count * size
    if f"{of_layer}ffn_up_shexp.weight" not in header.tensors:
        # keys that say it, without tensors
        for key in (_SHARED_SIZE, _SHARED_COUNT):
            fields.require(key, 0)
        return None
    routed = f"{of_layer}ffn_gate_inp_shexp.weight" in header.tensors
    return SharedExpert(intermediate=whole, routed=routed)
