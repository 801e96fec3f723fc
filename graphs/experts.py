"""Experts in config files: their number, their size, and how a router chooses among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.architecture import GGUFHeader, with_layers
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import LayerConfig
from edgellm.kernels.experts import Routing

_SOFTMAX = 1
# Keys of both formats for the number of experts; transformers writes either.
_COUNTS = ("num_experts", "num_local_experts")


def with_experts(
    config: ModelConfig,
    experts: Routing,
    *,
    intermediate: int | None = None,
    sparse: Sequence[bool] | None = None,
) -> ModelConfig:
    """Return the config with experts in place of one MLP.

    Args:
        intermediate: size of an expert; None: that of the MLP.
        sparse: for each layer, whether it has experts; None: all have.
    """

    def change(index: int, layer: LayerConfig) -> LayerConfig:
        if sparse is not None and not sparse[index]:
            return layer
        mlp = replace(layer.mlp, intermediate=intermediate or layer.mlp.intermediate)
        return replace(layer, mlp=mlp, experts=experts)

    return with_layers(config, change)


def routing_from_hf(fields: Fields, *, normalized: bool) -> Routing:
    """Read the experts of a `config.json`.

    Args:
        normalized: whether the weights of a token's experts have the sum 1.

    Raises:
        ModelFormatError: the number of experts is missing, or there are two.
    """
    counts = {fields.optional(int, key) for key in _COUNTS} - {None}
    if len(counts) > 1:
        raise ModelFormatError(f"{fields.origin}: {' and '.join(_COUNTS)} differ")
    key = next((key for key in _COUNTS if key in fields), _COUNTS[0])
    used = fields.read(int, "num_experts_per_tok")
    return Routing(experts=fields.read(int, key), used=used, normalized=normalized)


def experts_from_gguf(config: ModelConfig, header: GGUFHeader, *, normalized: bool) -> ModelConfig:
    """Return the config with the experts of a GGUF file in all layers.

    Args:
        normalized: whether the weights of a token's experts have the sum 1 where the file does not
            say it.

    Raises:
        UnsupportedModelError: a router of another kind, experts that all tokens share, or a tensor
            for each expert.
    """
    fields = header.fields
    if "blk.0.ffn_gate.0.weight" in header.tensors:
        raise UnsupportedModelError(
            f"{fields.origin}: each expert has tensors of its own, as llama.cpp wrote them until "
            "April 2024; take a newer file of the model"
        )
    for key in ("expert_shared_count", "expert_shared_feed_forward_length"):
        fields.require(key, 0)
    fields.require("expert_gating_func", 0, _SOFTMAX)
    said = fields.optional(bool, "expert_weights_norm")
    experts = Routing(
        experts=fields.read(int, "expert_count"),
        used=fields.read(int, "expert_used_count"),
        normalized=normalized if said is None else said,
        # files write 0 for none
        scale=fields.optional(float, "expert_weights_scale") or 1.0,
    )
    return with_experts(
        config, experts, intermediate=fields.optional(int, "expert_feed_forward_length")
    )
