"""Building of ONNX graphs over onnx_ir, with weights in one external file for all graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from edgellm.graphs.contract import WEIGHTS_FILE, Grid, StoredArray

# Opset 23 brings RMSNormalization; ORT takes it on the CPU since 1.23.
OPSETS = {"": 23, "com.microsoft": 1}
IR_VERSION = 11
# Bytes of a cache line.
_ALIGNMENT = 64
Array = ir.TensorProtocol


class WeightFile:
    """External data file of all graphs in one folder, written front to back.

    ONNX Runtime refuses external data outside a model's own folder, so a folder has one such file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / WEIGHTS_FILE
        self.folder = folder
        self._file: BinaryIO = self._path.open("wb")
        self.arrays: dict[str, StoredArray] = {}

    def add(self, name: str, array: NDArray[Any]) -> ir.ExternalTensor:
        """Append an array, and return the tensor that stands for it in a graph."""
        offset = self._file.tell() + (-self._file.tell() % _ALIGNMENT)
        self._file.write(b"\0" * (offset - self._file.tell()))
        data = np.ascontiguousarray(array)
        self._file.write(data.data)
        self.arrays[name] = StoredArray(
            f"{self.folder.name}/{WEIGHTS_FILE}", offset, data.dtype.name, data.shape
        )
        return ir.ExternalTensor(
            WEIGHTS_FILE,
            offset,
            data.nbytes,
            ir.DataType.from_numpy(data.dtype),
            shape=ir.Shape(data.shape),
            name=name,
            base_dir=self.folder,
        )

    def flush(self) -> None:
        """Write the arrays added so far, so that graphs that use them can be opened."""
        self._file.flush()

    def clear(self) -> None:
        """Begin again with a new file; graphs that have the old file open keep it."""
        self._file.close()
        self._path.unlink()
        self._file = self._path.open("wb")
        self.arrays.clear()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


class GraphBuilder:
    """Recorder of the operators of one graph.

    Args:
        grids: grids that `quantized` rounds tensors to, by name; None makes these tensors outputs
            of the graph instead, for a calibration run.
    """

    def __init__(self, name: str, *, grids: Mapping[str, Grid] | None = None) -> None:
        self._name = name
        self._grids = grids
        self._observed: dict[str, ir.Value] = {}
        self._tape = Tape()
        self._initializers: dict[str, ir.Value] = {}
        self._inputs: list[ir.Value] = []

    def input(self, name: str, shape: Sequence[int | str]) -> ir.Value:
        """Add a float32 input to the graph."""
        value = ir.Value(
            name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(tuple(shape))
        )
        self._inputs.append(value)
        return value

    def weight(self, tensor: ir.TensorProtocol) -> ir.Value:
        """Add a tensor as an initializer; tensors of the same name are added once."""
        name = tensor.name or ""
        if name not in self._initializers:
            self._initializers[name] = ir.Value(
                name=name,
                const_value=tensor,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(tuple(int(n) for n in tensor.shape.numpy())),
            )
        return self._initializers[name]

    def constant(self, value: Any, dtype: Any) -> ir.Value:
        """Add a small array that is kept inside the graph; equal arrays are shared."""
        array = np.asarray(value, dtype)
        key = "_".join(str(n) for n in array.reshape(-1).tolist())
        # `ir.tensor` looks at what it is given through protocols: a sixth of an export's time
        return self.weight(ir.Tensor(array, name=f"{array.dtype.name}_{array.ndim}d_{key}"))

    def op(
        self, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> ir.Value:
        """Add an operator, and return its only output."""
        return self._tape.op(kind, inputs, attributes, domain=domain)

    def quantized(self, name: str, x: ir.Value) -> ir.Value:
        """Round `x` to the points of its grid, by a QuantizeLinear and a DequantizeLinear.

        Without grids, `x` is returned as it is, and becomes an output for a calibration run.
        """
        if self._grids is None:
            self._observed[name] = x
            return x
        grid = self._grids[name]
        dtype = np.uint8 if grid.bits == 8 else np.uint16
        scale = self.constant(grid.scale, np.float32)
        zero_point = self.constant(1 << grid.bits - 1, dtype)
        codes = self.op("QuantizeLinear", x, scale, zero_point)
        return self.op("DequantizeLinear", codes, scale, zero_point)

    def build(self, outputs: Mapping[str, tuple[ir.Value, Sequence[int | str]]]) -> ir.Model:
        """Return the finished model.

        Tensors for a calibration run follow the outputs, through an Identity, because such a tensor
        may be an input of the graph.

        Args:
            outputs: values and shapes of the outputs, by name.
        """
        observed = [self._observe(name, value) for name, value in self._observed.items()]
        for name, (value, shape) in outputs.items():
            value.name = name
            value.type = ir.TensorType(ir.DataType.FLOAT)
            value.shape = ir.Shape(tuple(shape))
        graph = ir.Graph(
            self._inputs,
            [*(value for value, _ in outputs.values()), *observed],
            nodes=self._tape.nodes,
            initializers=list(self._initializers.values()),
            opset_imports=OPSETS,
            name=self._name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="edgellm")

    def _observe(self, name: str, value: ir.Value) -> ir.Value:
        copy = self.op("Identity", value)
        copy.name, copy.type = name, ir.TensorType(ir.DataType.FLOAT)
        return copy


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
