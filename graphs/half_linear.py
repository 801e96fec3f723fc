"""Linear layers in half precision, for GPUs: products of halves, float32 around them.

The residual stream, norms and SiLU stay float32: casts cost little beside a product, and the sum
over all layers keeps its precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.graphs.builder import GraphBuilder, WeightFile
from edgellm.graphs.linear import Activation, packed_nibbles
from edgellm.kernels.quantized import GROUP, QuantizedWeight


@dataclass(frozen=True)
class HalfLinear:
    """Linear layer with a float16 weight `[N, K]`."""

    weight: ir.TensorProtocol

    @classmethod
    def store(cls, file: WeightFile, name: str, weight: NDArray[np.float32]) -> HalfLinear:
        return cls(file.add(name, _halves(weight)))

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return Activation(_cast(graph, x, ir.DataType.FLOAT16))

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        product = graph.op("Gemm", x.values, graph.weight(self.weight), transB=1)
        return _cast(graph, product, ir.DataType.FLOAT)


@dataclass(frozen=True)
class HalfInt4Linear:
    """Linear layer with an int4 affine weight in groups of 32, multiplied by halves.

    `value = (code - zero_point) * scale`; a zero point need not be an integer, so it is a half too.
    """

    packed: ir.TensorProtocol
    scale: ir.TensorProtocol
    zero_point: ir.TensorProtocol
    shape: tuple[int, int]

    @classmethod
    def store(cls, file: WeightFile, name: str, weight: QuantizedWeight) -> HalfInt4Linear:
        scale, offset = weight.scales(), weight.offsets()
        flat = scale == 0  # all values are the offset: stored as (0 - -1) * offset
        scale = np.where(flat, offset, scale)
        with np.errstate(divide="ignore", invalid="ignore"):
            zero_point = np.where(flat, -1, weight.kind.zero - offset / scale)
        packed = packed_nibbles(weight.codes)
        return cls(
            file.add(name, np.where(flat[..., None], np.uint8(0), packed)),
            file.add(f"{name}.scale", _halves(scale)),
            file.add(f"{name}.zero_point", _halves(zero_point)),
            weight.shape,
        )

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return Activation(_cast(graph, x, ir.DataType.FLOAT16))

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        product = graph.op(
            "MatMulNBits",
            x.values,
            graph.weight(self.packed),
            graph.weight(self.scale),
            graph.weight(self.zero_point),
            domain="com.microsoft",
            K=self.shape[1],
            N=self.shape[0],
            bits=4,
            block_size=GROUP,
        )
        return _cast(graph, product, ir.DataType.FLOAT)


def _halves(values: NDArray[np.float32]) -> NDArray[np.float16]:
    return np.clip(values, -65504, 65504).astype(np.float16)


def _cast(graph: GraphBuilder, x: ir.Value, to: ir.DataType) -> ir.Value:
    return graph.op("Cast", x, to=int(to))
