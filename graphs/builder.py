"""A thin layer over onnx_ir: record operators, take weights from one shared external file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from edgellm.graphs.contract import WEIGHTS_FILE, Grid, StoredArray

# Opset 23 brings RMSNormalization; ORT takes it on the CPU since 1.23.
OPSETS = {"": 23, "com.microsoft": 1}
IR_VERSION = 11
# A cache line.
_ALIGNMENT = 64


class WeightFile:
    """The external data of all graphs in one folder, written front to back.

    ONNX Runtime refuses external data outside a model's own folder, so a folder has one such file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / WEIGHTS_FILE
        self.folder = folder
        self._file: BinaryIO = self._path.open("wb")
        self.arrays: dict[str, StoredArray] = {}

    def add(self, name: str, array: NDArray[Any]) -> ir.ExternalTensor:
        """Append an array and give the tensor that stands for it in a graph."""
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
        """Write what has been added so far, so that graphs which use it can be opened."""
        self._file.flush()

    def clear(self) -> None:
        """Begin again with a new file; what has the old one open keeps it."""
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
    """Records one graph.

    Args:
        grids: what `quantized` rounds tensors to, by their names; None makes them outputs instead,
            for a calibration run to look at.
    """

    def __init__(self, name: str, *, grids: Mapping[str, Grid] | None = None) -> None:
        self._name = name
        self._grids = grids
        self._observed: dict[str, ir.Value] = {}
        self._tape = Tape()
        self._initializers: dict[str, ir.Value] = {}
        self._inputs: list[ir.Value] = []

    def input(self, name: str, shape: Sequence[int | str]) -> ir.Value:
        """A float32 graph input."""
        value = ir.Value(
            name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(tuple(shape))
        )
        self._inputs.append(value)
        return value

    def weight(self, tensor: ir.TensorProtocol) -> ir.Value:
        """An initializer; the same tensor is added once."""
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
        """A small array kept inside the graph; equal ones are shared."""
        array = np.asarray(value, dtype)
        key = "_".join(str(n) for n in array.reshape(-1).tolist())
        return self.weight(ir.tensor(array, name=f"{array.dtype.name}_{array.ndim}d_{key}"))

    def op(
        self, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> ir.Value:
        """One operator with one output."""
        return self._tape.op(kind, inputs, attributes, domain=domain)

    def quantized(self, name: str, x: ir.Value) -> ir.Value:
        """`x` on the fixed points of its grid, as a QuantizeLinear and a DequantizeLinear."""
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
        """The finished model; `outputs` names values and states their shapes.

        What is observed comes after them, through an Identity, since it may be an input.
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
