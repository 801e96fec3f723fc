"""Configuration of a model: the frozen numbers that every part of edgellm reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import check_groups, check_positive, check_sizes, key_of, parse, shown
from edgellm.graphs.layer_config import OTHER_MODEL, Attention, LayerConfig, Rope
from edgellm.kernels.altup import MOST_STREAMS

_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "layer_count": 1 << 12,
    "context_length": (1 << 31) - 1,
    "layer_embedding": 1 << 12,
    "layer_tokens": 1 << 24,
    "backbone": 1 << 18,
}
# Fields that came later, with the values of models before there were any.
_LATER: Mapping[str, Mapping[str, Any]] = {
    "layer": {"experts": None, "shared": None, "scaled": False, "beside": None, "laurel": None},
    "mlp": {"cutoff": None},
    "mixer": {
        "sinks": False,
        "output_gate": False,
        "gate_norm": True,
        "v_norm": False,
        "k_as_v": False,
        "kv_from": None,
        "latent": None,
    },
    "experts": {
        "scores": "softmax",
        "bias": False,
        "selection_bias": False,
        "scaled": False,
        "groups": 1,
        "used_groups": 1,
    },
    "shared": {"beside": False},
}
# RoPE turns at least one in this many channels; models turn a quarter of a head or more (GPT-NeoX).
_ROTATED_SHARE = 4
_MOST_ROWS = 1 << 31


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
        layer_embedding: width of the embeddings that a token has for each layer; None: it has none.
        layer_tokens: number of first tokens that have them; all others have those of token 0. None:
            all tokens have them.
        settings: settings of the model's own folder that its weights have been multiplied by, which
            are not to be seen in them; without them no adapter in a folder can be multiplied.
        backbone: width of the hidden states of another model, for which this one drafts: it reads
            these, that model's embeddings, and its K and V. None: it is a model by itself.
        streams: number of residual streams; a layer computes the first and predicts the others
            (AltUp, arXiv:2301.13310), which embeddings for each layer are added to. None: there is
            one.
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
    layer_embedding: int | None = None
    layer_tokens: int | None = None
    backbone: int | None = None
    streams: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_sizes(self, _LARGEST)
        if not (math.isfinite(self.norm_eps) and 0 < self.norm_eps < 1):
            raise ModelFormatError(
                f"model config: norm_eps is {self.norm_eps}; it must be between 0 and 1"
            )
        check_positive("embedding_scale", self.embedding_scale)
        check_positive("logit_softcap", self.logit_softcap)
        if self.streams is not None and not 2 <= self.streams <= MOST_STREAMS:
            raise UnsupportedModelError(
                f"model config: {shown(self.streams)} residual streams; 2 to {MOST_STREAMS} are "
                "supported"
            )
        self._check_layers()
        self._check_ropes()
        self._check_sources()
        for name in ("hidden_size", "backbone", "layer_embedding"):
            check_groups(name, getattr(self, name))
        if self.layer_embedding is not None:
            rows = self.layer_rows
            if rows >= _MOST_ROWS:
                raise ModelFormatError(
                    f"model config: tokens have {rows} embeddings for layers; below {_MOST_ROWS} "
                    "is allowed"
                )

        if self.layer_tokens is not None and (
            self.layer_embedding is None or self.layer_tokens > self.vocab_size
        ):
            raise ModelFormatError(
                f"model config: {self.layer_tokens} tokens have embeddings for layers, of the "
                f"width {self.layer_embedding}; {self.vocab_size} is the most"
            )

    def _check_layers(self) -> None:
        if not self.attentions:
            raise UnsupportedModelError(
                "model config: no layer attends; supported are models in which one does"
            )
        for index, layer in enumerate(self.layers):
            check_groups("intermediate_size", layer.mlp.intermediate)
            if layer.shared is not None:
                check_groups("the shared expert's intermediate_size", layer.shared.intermediate)
            check_groups("attention_size" if layer.attends else "size", layer.mixer.size)
            if layer.beside is not None:
                check_groups("size", layer.beside.size)
            if layer.scaled and self.streams is not None:
                raise UnsupportedModelError("model config: scaled layers of several streams")
            if not layer.attends:
                continue
            if not 0 <= layer.attention.rope < len(self.ropes):
                raise ModelFormatError(
                    f"model config: layer {index} names RoPE {layer.attention.rope} of "
                    f"{len(self.ropes)}"
                )

    def _check_ropes(self) -> None:
        for attention in self.attentions.values():
            rotated = 2 * len(self.ropes[attention.rope].inv_freq)
            head_dim = attention.head_dim
            if not head_dim // _ROTATED_SHARE <= rotated <= head_dim:
                raise ModelFormatError(
                    f"model config: RoPE rotates {rotated} dimensions, but a head has {head_dim}; "
                    "a quarter of them to all is allowed"
                )

    def _check_sources(self) -> None:
        for index, attention in self.attentions.items():
            source = attention.kv_from
            if (source == OTHER_MODEL) != (self.backbone is not None):
                raise ModelFormatError(
                    f"model config: layer {index} reads K and V of layer {source}, and backbone is "
                    f"{self.backbone}; all layers of a model with a backbone, and no others, read "
                    "those of another model"
                )
            if source is None or source == OTHER_MODEL:
                continue
            own = self.attentions.get(source)
            if not 0 <= source < index or own is None or own.kv_from is not None:
                raise ModelFormatError(
                    f"model config: layer {index} reads K and V of layer {source}; a layer before "
                    "it with K and V of its own is allowed"
                )
            kinds = [
                (x.kv_heads, x.head_dim, x.window, x.rope, x.qk_norm) for x in (attention, own)
            ]
            if kinds[0] != kinds[1]:
                raise ModelFormatError(
                    f"model config: layers {index} and {source} share K and V, and differ in KV "
                    "heads, head_dim, window, RoPE or norms"
                )

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def residual_width(self) -> int:
        """Width of all residual streams, side by side."""
        return self.hidden_size * (self.streams or 1)

    @property
    def attentions(self) -> dict[int, Attention]:
        """Attention of each layer that has K and V, by the layer's index."""
        return {i: layer.attention for i, layer in enumerate(self.layers) if layer.attends}

    @property
    def sources(self) -> set[int]:
        """Indices of the layers whose K and V others read."""
        return {each.kv_from for each in self.attentions.values() if each.kv_from is not None}

    @property
    def attention(self) -> Attention:
        """Attention of the first layer that attends; that of others may differ."""
        return next(iter(self.attentions.values()))

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
        attentions = self.attentions.values()
        return len({(each.heads, each.kv_heads, each.head_dim) for each in attentions}) == 1

    @property
    def layer_rows(self) -> int:
        """Rows of the table of tokens' embeddings for layers."""
        return (self.layer_tokens or self.vocab_size) * self.layer_count

    @property
    def has_experts(self) -> bool:
        """Whether some layer has experts."""
        return any(layer.experts is not None for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state, in place of K and V or beside them."""
        return any(layer.state_mixer is not None for layer in self.layers)

    def rope_of(self, layer: int) -> Rope:
        return self.ropes[self.layers[layer].attention.rope]

    def to_json(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        known = {layer: _layer_json(layer) for layer in dict.fromkeys(self.layers)}  # few differ
        values["layers"] = tuple(known[layer] for layer in self.layers)
        values["ropes"] = tuple(map(asdict, self.ropes))
        for name in ("layer_embedding", "layer_tokens", "backbone", "streams"):
            if values[name] is None:
                del values[name]
        if not self.settings:
            del values["settings"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelConfig:
        return parse(cls, values, where="model config")


def _layer_json(layer: LayerConfig) -> dict[str, Any]:
    """Return a layer as before it had parts that came later: sessions name models by it."""
    values = asdict(layer)
    if layer.experts is not None:
        _leave_out(values["experts"], _LATER["experts"])
    if layer.shared is not None:
        _leave_out(values["shared"], _LATER["shared"])
    _leave_out(values["mlp"], _LATER["mlp"])
    _leave_out(values["mixer"], _LATER["mixer"])
    _leave_out(values, _LATER["layer"])
    return {key_of(type(layer.mixer)): values.pop("mixer"), **values}


def _leave_out(values: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Remove fields that have their values of before."""
    for name, default in defaults.items():
        if values.get(name, default) == default:
            values.pop(name, None)


def repeated(layer: LayerConfig, count: int) -> tuple[LayerConfig, ...]:
    """Return `count` equal layers.

    Raises:
        ModelFormatError: `count` is below 1, or larger than in any model.
    """
    largest = _LARGEST["layer_count"]
    if not 1 <= count <= largest:
        raise ModelFormatError(f"model config: layers is {shown(count)}; 1 to {largest} is allowed")
    return (layer,) * count
