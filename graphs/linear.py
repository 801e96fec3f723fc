"""Linear layers as sub-graphs, one class per precision.

`activation` prepares an input once (by quantizing it); `apply` multiplies. Layers that share an
input, such as gate and up, share the prepared input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.graphs.builder import GraphBuilder, WeightFile
from edgellm.kernels.quantized import GROUP, QuantizedWeight

# Smallest scale of a row: a row of zeros must not divide by zero, and any scale yields its zeros.
_SMALLEST_SCALE = 1e-12
_UINT8_ZERO_POINT = 128


class Activation(NamedTuple):
    """Prepared input of a linear layer: values to multiply, and the scale of each row if any."""

    values: ir.Value
    extra: ir.Value | None = None


class Linear(Protocol):
    """Linear layer: y = x W^T with x `[C, K]` and W `[N, K]`."""

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation: ...

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value: ...


@dataclass(frozen=True)
class FloatLinear:
    """Linear layer with a float32 weight `[N, K]`."""

    weight: ir.TensorProtocol

    @classmethod
    def store(cls, file: WeightFile, name: str, weight: NDArray[np.float32]) -> FloatLinear:
        return cls(file.add(name, weight))

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return Activation(x)

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        return graph.op("Gemm", x.values, graph.weight(self.weight), transB=1)


@dataclass(frozen=True)
class Int8Linear:
    """Linear layer with an int8 weight `[K, N]`, a scale per column, and uint8 activations.

    Activations have a scale per row. They are unsigned around 128 because ORT's x86 kernel for
    signed ones is 13 times slower (67 against 880 GOP/s at 128 x 576 x 3072 with AVX-512 VNNI).
    MatMulIntegerToFloat instead of MatMulInteger, Cast, Mul saves a fifth (1,090 GOP/s).
    """

    weight: ir.TensorProtocol
    scale: ir.TensorProtocol

    @classmethod
    def store(
        cls, file: WeightFile, name: str, weight: NDArray[np.int8], scale: NDArray[np.float32]
    ) -> Int8Linear:
        """Store codes `[N, K]` and scales `[N]` of a layer."""
        return cls(file.add(name, weight.T), file.add(f"{name}.scale", scale))

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        largest = graph.op(
            "ReduceMax", graph.op("Abs", x), graph.constant([-1], np.int64), keepdims=1
        )
        scale = graph.op("Mul", largest, graph.constant(1 / 127, np.float32))
        scale = graph.op("Max", scale, graph.constant(_SMALLEST_SCALE, np.float32))  # [C, 1]
        codes = graph.op(
            "QuantizeLinear",
            graph.op("Div", x, scale),
            graph.constant(1.0, np.float32),
            graph.constant(_UINT8_ZERO_POINT, np.uint8),
        )
        return Activation(codes, scale)

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        product = graph.op(
            "MatMulIntegerToFloat",
            x.values,
            graph.weight(self.weight),
            graph.constant(1.0, np.float32),
            graph.weight(self.scale),
            graph.constant(_UINT8_ZERO_POINT, np.uint8),
            domain="com.microsoft",
        )
        return graph.op("Mul", product, x.extra)


@dataclass(frozen=True)
class Int8PairLinear:
    """Linear layer with an int8 weight, and an int8 weight for its rounding error: 16 bits."""

    high: Linear
    low: Linear

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return self.high.activation(graph, x)

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        return graph.op("Add", self.high.apply(graph, x), self.low.apply(graph, x))


@dataclass(frozen=True)
class ConcatLinear:
    """Linear layers with the same prepared input, whose outputs are concatenated."""

    parts: tuple[Linear, ...]

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return self.parts[0].activation(graph, x)

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        return graph.op("Concat", *(part.apply(graph, x) for part in self.parts), axis=-1)


@dataclass(frozen=True)
class SplitLinear:
    """Linear layers with an input each, which lie side by side, and whose outputs are added.

    Attributes:
        parts: layers with the widths of their inputs.
    """

    parts: tuple[tuple[Linear, int], ...]

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return Activation(x)

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        products, first = [], 0
        for linear, width in self.parts:
            ends = (graph.constant([at], np.int64) for at in (first, first + width, 1))
            own = graph.op("Slice", x.values, *ends)
            products.append(linear.apply(graph, linear.activation(graph, own)))
            first += width
        return graph.op("Sum", *products)


@dataclass(frozen=True)
class BiasedLinear:
    """Linear layer with a bias, `[N]` float32."""

    linear: Linear
    bias: ir.TensorProtocol

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return self.linear.activation(graph, x)

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        return graph.op("Add", self.linear.apply(graph, x), graph.weight(self.bias))


@dataclass(frozen=True)
class BlockRotatedLinear:
    """Linear layer whose input is rotated first, in runs of b channels.

    Attributes:
        rotation: `[b, b]`, multiplied with every run of b inputs.
        width: number of inputs, K.
        factor: factor of the input before the rotation, or None. Qualcomm's compiler runs out of
            memory on a Reshape of a segment's own input (onnxruntime-qnn 2.7), and not on one
            behind a product.
        across: `[K/b, K/b]`, which mixes the runs after the rotation, or None. Both together mix
            all inputs, for `b + K/b` products each instead of K.
    """

    linear: Linear
    rotation: ir.TensorProtocol
    width: int
    factor: float | None = None
    across: ir.TensorProtocol | None = None

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return self.linear.activation(graph, self.rotated(graph, x))

    def rotated(self, graph: GraphBuilder, x: ir.Value) -> ir.Value:
        size = int(self.rotation.shape.numpy()[0])
        if self.factor is not None:
            x = graph.op("Mul", x, graph.constant(self.factor, np.float32))
        runs = [-1, size] if self.across is None else [-1, self.width // size, size]
        blocks = graph.op("Reshape", x, graph.constant(runs, np.int64))
        blocks = graph.op("MatMul", blocks, graph.weight(self.rotation))
        if self.across is not None:
            blocks = graph.op("MatMul", graph.weight(self.across), blocks)
        return graph.op("Reshape", blocks, graph.constant([-1, self.width], np.int64))

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        return self.linear.apply(graph, x)


@dataclass(frozen=True)
class GroupLinear:
    """Linear layer with a quantized weight of any kind, represented exactly.

    MatMulNBits knows codes of 4 and 8 bits and is fast only with its implied zero point. So it
    multiplies by `(code - 8) * scale` or `(code - 128) * scale`, and the rest of an affine form is
    a small product with the sums of the input's groups.
    """

    codes: ir.TensorProtocol
    scale: ir.TensorProtocol
    excess: ir.TensorProtocol | None  # [K/32, N]; None where all zero
    shape: tuple[int, int]
    bits: int
    group: int

    @classmethod
    def store(
        cls, file: WeightFile, name: str, weight: QuantizedWeight, *, whole_bytes: bool = False
    ) -> GroupLinear:
        """Store codes as `name` and scales as `name.scale`.

        Args:
            whole_bytes: whether each code takes a whole byte, as tables of embeddings need it.
        """
        kind, values = weight.kind, weight.values()
        bits = 8 if whole_bytes or kind.table or kind.bits > 4 else 4
        # the code for 0: the implied zero point, unless the kind's codes need all bits
        zero = kind.zero if kind.bits == bits else 1 << bits - 1
        stored = (values + zero).astype(np.uint8)
        scale = weight.scales()
        excess = weight.offsets()
        if zero != 1 << bits - 1:
            excess += scale * np.float32((1 << bits - 1) - zero)
        groups = stored.reshape(len(stored), -1, kind.group)
        return cls(
            file.add(name, groups if bits == 8 else packed_nibbles(stored)),
            file.add(f"{name}.scale", scale),
            file.add(f"{name}.excess", excess.T) if excess.any() else None,
            weight.shape,
            bits,
            kind.group,
        )

    def activation(self, graph: GraphBuilder, x: ir.Value) -> Activation:
        return Activation(x)

    def apply(self, graph: GraphBuilder, x: Activation) -> ir.Value:
        product = self._product(graph, x.values)
        if self.excess is None:
            return product
        # layers with the same input repeat these sums in the graph; ORT computes them once
        runs = graph.constant([-1, self.shape[1] // GROUP, GROUP], np.int64)
        groups = graph.op("Reshape", x.values, runs)
        sums = graph.op("ReduceSum", groups, graph.constant([-1], np.int64), keepdims=0)
        return graph.op("Add", product, graph.op("MatMul", sums, graph.weight(self.excess)))

    def _product(self, graph: GraphBuilder, x: ir.Value) -> ir.Value:
        """Add ORT's group-quantized product with int8 activations, which accuracy_level 4 asks for.

        Other levels compute in float32: one row by 2048 x 2048 on one core took 0.16 ms against
        0.04 ms with 4 bits, and 4.1 ms against 0.06 ms with 8.
        """
        outputs, inputs = self.shape
        return graph.op(
            "MatMulNBits",
            x,
            graph.weight(self.codes),
            graph.weight(self.scale),
            domain="com.microsoft",
            K=inputs,
            N=outputs,
            bits=self.bits,
            block_size=self.group,
            accuracy_level=4,
        )


def packed_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack codes `[N, K]` of 4 bits for MatMulNBits, `[N, K/32, 16]`: two in a byte."""
    pairs = codes.reshape(codes.shape[0], -1, GROUP // 2, 2)
    return pairs[..., 0] | np.left_shift(pairs[..., 1], 4, dtype=np.uint8)


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
