"""Linear layers for accelerators that need integer products with static scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.graphs.builder import GraphBuilder, WeightFile
from edgellm.graphs.linear import Activation, Linear

_INPUT = ".input"


def input_name(layer: str) -> str:
    """Return the name of the grid of a layer's input; gate and up share one grid."""
    return layer.replace(".up", ".gate") + _INPUT


def is_input(name: str) -> bool:
    """Whether the name is that of an input's grid."""
    return name.endswith(_INPUT)


@dataclass(frozen=True)
class StaticLinear:
    """Linear layer with an int8 weight `[K, N]`, a scale per column, and rounded input and output.

    Qualcomm's HTP takes this QDQ form as one integer product: DequantizeLinear on both sides of a
    MatMul, QuantizeLinear behind it. Operators between two linear layers (norm, SiLU, residual)
    stay float, half precision on the HTP.

    Attributes:
        name: name of the layer, which the names of its grids begin with.
        zero_point: `[N]`, all zero.
    """

    name: str
    weight: ir.TensorProtocol
    scale: ir.TensorProtocol
    zero_point: ir.TensorProtocol

    @classmethod
    def store(
        cls, file: WeightFile, name: str, weight: NDArray[np.int8], scale: NDArray[np.float32]
    ) -> StaticLinear:
        """Store codes `[N, K]` and scales `[N]` of a layer."""
        return cls(
            name,
            file.add(name, weight.T),
            file.add(f"{name}.scale", scale),
            file.add(f"{name}.zero_point", np.zeros(weight.shape[0], np.int8)),
        )

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return Activation(graph.quantized(input_name(self.name), x))

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        weight = graph.op(
            "DequantizeLinear",
            graph.weight(self.weight),
            graph.weight(self.scale),
            graph.weight(self.zero_point),
            axis=1,
        )
        return graph.quantized(f"{self.name}.output", graph.op("MatMul", x.values, weight))


@dataclass(frozen=True)
class ObservedLinear:
    """Linear layer whose grids are not chosen yet; its `StaticLinear` will have the same name."""

    name: str
    linear: Linear

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return self.linear.activation(graph, graph.quantized(input_name(self.name), x))

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        return graph.quantized(f"{self.name}.output", self.linear.apply(graph, x))
