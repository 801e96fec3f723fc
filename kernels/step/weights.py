"""What the fused steps in C++ and Triton read, and whether its parts fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.kv_blocks import KVBlocks
from edgellm.kernels.linear import PANEL, Panels

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LayerWeights:
    """One layer: norm weights `[E]` and linear layers.

    Attributes:
        qkv_bias: added to Q, K and V, `[outputs]` of all three, or None.
    """

    attention_norm: Floats
    mlp_norm: Floats
    q: Panels
    k: Panels
    v: Panels
    o: Panels
    gate: Panels
    up: Panels
    down: Panels
    qkv_bias: Floats | None = None


@dataclass(frozen=True)
class Weights:
    """All weights of a model; `head` is `embedding` where they are tied.

    Attributes:
        embedding, head: `[V, E]`.
        heads: query heads.
        window: sliding window, or None.
        epsilon: of the RMS norms.
    """

    layers: Sequence[LayerWeights]
    final_norm: Floats
    embedding: Panels
    head: Panels
    heads: int
    window: int | None
    epsilon: float

    @property
    def nbytes(self) -> int:
        """Bytes of all linear layers, which are nearly all of it."""
        tables = {id(panels): panels for panels in (self.embedding, self.head)}
        linears = [p for x in self.layers for p in (x.q, x.k, x.v, x.o, x.gate, x.up, x.down)]
        return sum(panels.data.nbytes for panels in (*tables.values(), *linears))


def check_weights(weights: Weights) -> None:
    """Refuse weights whose shapes are not those of one model.

    Raises:
        ValueError: names the part that does not fit.
    """
    hidden, vocabulary = weights.embedding.inputs, weights.embedding.outputs
    _require_floats("final_norm", weights.final_norm, hidden)
    for name, table in (("embedding", weights.embedding), ("head", weights.head)):
        _require(name, (table.outputs, table.inputs), (vocabulary, hidden))
    if not weights.layers:
        raise ValueError("weights without a layer")
    for layer in weights.layers:
        _check_layer(layer, hidden, weights.layers[0].gate.outputs, weights.heads)


def _check_layer(layer: LayerWeights, hidden: int, intermediate: int, heads: int) -> None:
    width, values = layer.q.outputs, layer.v.outputs
    for name, linear in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
        _require(f"inputs of {name}", linear.inputs, hidden)
    _require("outputs of k", layer.k.outputs, values)
    _require("o", (layer.o.outputs, layer.o.inputs), (hidden, width))
    for name, linear in (("gate", layer.gate), ("up", layer.up)):
        _require(name, (linear.outputs, linear.inputs), (intermediate, hidden))
    _require("down", (layer.down.outputs, layer.down.inputs), (hidden, intermediate))
    _require_floats("attention_norm", layer.attention_norm, hidden)
    _require_floats("mlp_norm", layer.mlp_norm, hidden)
    if layer.qkv_bias is not None:
        _require_floats("qkv_bias", layer.qkv_bias, width + 2 * values)
    # a row of Q, K and V ends where the next begins: a padded panel would write over it
    if width % PANEL or values % PANEL or width % heads:
        raise ValueError(
            f"q has {width} outputs, k and v {values}; needed are whole panels of {PANEL} and "
            f"{heads} heads"
        )


def check_blocks(weights: Weights, blocks: KVBlocks) -> None:
    """Refuse a pool that was made for another model.

    Raises:
        ValueError: its layers or heads are others.
    """
    layer = weights.layers[0]
    head_dim = layer.o.inputs // weights.heads
    needed = len(weights.layers), layer.v.outputs // head_dim, head_dim
    there = blocks.layers, blocks.kv_heads, blocks.head_dim
    if there != needed:
        raise ValueError(f"blocks of layers, KV heads and head_dim {there}; needed are {needed}")


def check_rows(tokens: int, logit_rows: int) -> None:
    """Refuse a call without tokens, or for logits of more than there are.

    Raises:
        ValueError: it is one.
    """
    if tokens < 1 or not 0 <= logit_rows <= tokens:
        raise ValueError(f"{tokens} tokens and {logit_rows} rows of logits")


def _require(name: str, value: object, needed: object) -> None:
    if value != needed:
        raise ValueError(f"{name} is {value}; needed is {needed}")


def _require_floats(name: str, array: NDArray[Any], size: int) -> None:
    if array.dtype != np.float32 or array.shape != (size,) or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype} {array.shape}; needed is float32 ({size},)")
