"""RMS and layer norms as sub-graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from edgellm.graphs.builder import GraphBuilder

Array = ir.TensorProtocol


class NormStyle(NamedTuple):
    """Choices for writing the norms of a graph.

    Attributes:
        epsilon: number added to mean squares, or to the variance.
        basic: whether to use basic operators, for providers without operators for norms.
    """

    epsilon: float
    basic: bool = False


@dataclass(frozen=True)
class Norm:
    """RMS norm (arXiv:1910.07467), or layer norm with a bias (arXiv:1607.06450).

    Attributes:
        weight, bias: `[E]`.
    """

    weight: Array
    bias: Array | None = None

    def apply(self, graph: GraphBuilder, x: ir.Value, style: NormStyle) -> ir.Value:
        if style.basic:
            return self._written_out(graph, x, style.epsilon)
        weight = graph.weight(self.weight)
        if self.bias is None:
            return graph.op("RMSNormalization", x, weight, axis=-1, epsilon=style.epsilon)
        bias = graph.weight(self.bias)
        return graph.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=style.epsilon)

    def _written_out(self, graph: GraphBuilder, x: ir.Value, epsilon: float) -> ir.Value:
        if self.bias is not None:
            x = graph.op("Sub", x, _mean(graph, x))
        size = _mean(graph, graph.op("Mul", x, x))
        size = graph.op("Add", size, graph.constant(epsilon, np.float32))
        scaled = graph.op("Div", x, graph.op("Sqrt", size))
        scaled = graph.op("Mul", scaled, graph.weight(self.weight))
        return scaled if self.bias is None else graph.op("Add", scaled, graph.weight(self.bias))


def _mean(graph: GraphBuilder, x: ir.Value) -> ir.Value:
    return graph.op("ReduceMean", x, graph.constant([-1], np.int64), keepdims=1)
