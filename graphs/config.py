"""Configuration of a model: the frozen numbers that every part of edgellm reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.layer_config import Attention, LayerConfig, Rope, check_sizes, shown
from edgellm.graphs.typed_json import parse

_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "layer_count": 1 << 12,
    "context_length": (1 << 31) - 1,
}
# RoPE turns at least one in this many channels; models turn a quarter of a head or more (GPT-NeoX).
_ROTATED_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of a decoder-only transformer.

    Attributes:
        model_type: name of the architecture's file in `graphs/models/`.
        layers: layers from the first to the last, each with parts and sizes of its own.
        ropes: RoPEs that layers name by their index.
        norm: RMS norms (arXiv:1910.07467), or layer norms with biases.
        norm_eps: number added to mean squares, or to the variance, also in norms of Q and K.
        embedding_scale: factor for rows of the embedding before the first layer.
        logit_softcap: soft cap: logits `x` become `logit_softcap * tanh(x / logit_softcap)`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[Rope, ...]
    norm_eps: float
    context_length: int
    tied_embedding: bool
    norm: Literal["rms", "layer"] = "rms"
    embedding_scale: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, _LARGEST)
        if not (math.isfinite(self.norm_eps) and 0 < self.norm_eps < 1):
            raise ModelFormatError(
                f"model config: norm_eps is {self.norm_eps}; it must be between 0 and 1"
            )
        for name in ("embedding_scale", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ModelFormatError(f"model config: {name} is {value}; it must be positive")
        self._check_layers()
        self._check_ropes()
        _check_groups("hidden_size", self.hidden_size)

    def _check_layers(self) -> None:
        for index, layer in enumerate(self.layers):
            _check_groups("intermediate_size", layer.mlp.intermediate)
            _check_groups("attention_size", layer.attention.size)
            if not 0 <= layer.attention.rope < len(self.ropes):
                raise ModelFormatError(
                    f"model config: layer {index} names RoPE {layer.attention.rope} of "
                    f"{len(self.ropes)}"
                )

    def _check_ropes(self) -> None:
        for layer in self.layers:
            rotated = 2 * len(self.ropes[layer.attention.rope].inv_freq)
            head_dim = layer.attention.head_dim
            if not head_dim // _ROTATED_SHARE <= rotated <= head_dim:
                raise ModelFormatError(
                    f"model config: RoPE rotates {rotated} dimensions, but a head has {head_dim}; "
                    "a quarter of them to all is allowed"
                )

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> Attention:
        """Attention of the first layer; that of others may differ."""
        return self.layers[0].attention

    @property
    def heads(self) -> int:
        return self.attention.heads

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def has_equal_heads(self) -> bool:
        """Whether the number of heads and their width are the same in all layers."""
        attentions = [layer.attention for layer in self.layers]
        return len({(each.heads, each.kv_heads, each.head_dim) for each in attentions}) == 1

    @property
    def has_experts(self) -> bool:
        """Whether some layer has experts."""
        return any(layer.experts is not None for layer in self.layers)

    def rope_of(self, layer: int) -> Rope:
        return self.ropes[self.layers[layer].attention.rope]

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        for layer in values["layers"]:  # as before there were experts: sessions name models by it
            if layer["experts"] is None:
                del layer["experts"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelConfig:
        return parse(cls, values, where="model config")


def _check_groups(name: str, size: int) -> None:
    if size % 32:
        raise UnsupportedModelError(
            f"model config: {name} is {size}; weights are quantized in groups of 32, so it must be "
            "a multiple of 32"
        )


def repeated(layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Return `count` equal layers.

    Raises:
        ModelFormatError: `count` is below 1, or larger than in any model.
    """
    largest = _LARGEST["layer_count"]
    if not 1 <= count <= largest:
        raise ModelFormatError(f"model config: layers is {shown(count)}; 1 to {largest} is allowed")
    return (layer,) * count
