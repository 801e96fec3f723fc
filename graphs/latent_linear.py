"""Linear layers around attention over latents, as sub-graphs: what of them needs no positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.graphs.builder import Array, GraphBuilder, Norm, NormStyle
from edgellm.graphs.linear import Activation, Linear

_LAST = np.iinfo(np.int64).max


def head_matrices(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return the matrices of all heads, one behind the other `[H*N, K]`, as `[H, K, N]`."""
    stack = weight.reshape(heads, -1, weight.shape[1])
    return np.ascontiguousarray(stack.swapaxes(1, 2))


@dataclass(frozen=True)
class LowRankLinear:
    """Linear layer of a low rank with a norm within: `up(norm(down(x)))`."""

    down: Linear
    norm: Norm
    up: Linear
    epsilon: float

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return self.down.activation(graph, x)

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        style = NormStyle(self.epsilon, basic=True)
        normed = self.norm.apply(graph, self.down.apply(graph, x), style)
        return self.up.apply(graph, self.up.activation(graph, normed))


@dataclass(frozen=True)
class LatentQueries:
    """Queries `[C, H * (D + rank)]`: what RoPE will turn, then the rest through each head's matrix.

    Attributes:
        linear: layer that gives what RoPE turns, then the rest of each head, `[C, H * (D + key)]`.
        keys: matrices `[H, key, rank]`, float32 or float16.
        rotated: numbers of a head that RoPE turns, D.
    """

    linear: Linear
    keys: Array
    rotated: int

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return self.linear.activation(graph, x)

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        count, key, rank = _shape(self.keys)
        heads = _split(graph, self.linear.apply(graph, x), count, self.rotated + key)
        turned = _columns(graph, heads, 0, self.rotated)
        rest = _columns(graph, heads, self.rotated, _LAST)
        scoring = multiplied_heads(graph, rest, self.keys)
        queries = graph.op("Concat", turned, scoring, axis=-1)
        return _joined(graph, queries, count * (self.rotated + rank))


@dataclass(frozen=True)
class LatentValues:
    """Output projection of values that each head makes of a sum of latents.

    Attributes:
        linear: the output projection.
        values: matrices `[H, rank, value]`, float32 or float16.
    """

    linear: Linear
    values: Array

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        count, rank, value = _shape(self.values)
        made = multiplied_heads(graph, _split(graph, x, count, rank), self.values)
        return self.linear.activation(graph, _joined(graph, made, count * value))

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        return self.linear.apply(graph, x)


def _shape(matrices: Array) -> tuple[int, int, int]:
    heads, inputs, outputs = (int(n) for n in matrices.shape.numpy())
    return heads, inputs, outputs


def _split(graph: GraphBuilder, x: ir.Value, heads: int, width: int) -> ir.Value:
    return graph.op("Reshape", x, graph.constant([-1, heads, width], np.int64))


def _joined(graph: GraphBuilder, x: ir.Value, width: int) -> ir.Value:
    return graph.op("Reshape", x, graph.constant([-1, width], np.int64))


def _columns(graph: GraphBuilder, x: ir.Value, first: int, end: int) -> ir.Value:
    ends = (graph.constant([at], np.int64) for at in (first, end, 2))
    return graph.op("Slice", x, *ends)


def multiplied_heads(graph: GraphBuilder, x: ir.Value, matrices: Array) -> ir.Value:
    """Multiply the rows `[C, H, K]` of each head by its matrix; returns `[C, H, N]` in float32."""
    by_head, half = graph.op("Transpose", x, perm=[1, 0, 2]), ir.DataType.FLOAT16
    if matrices.dtype == half:
        by_head = graph.op("Cast", by_head, to=int(half))
    product = graph.op("MatMul", by_head, graph.weight(matrices))
    if matrices.dtype == half:
        product = graph.op("Cast", product, to=int(ir.DataType.FLOAT))
    return graph.op("Transpose", product, perm=[1, 0, 2])
