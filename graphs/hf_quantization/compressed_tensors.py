"""Weights as llm-compressor writes them (github.com/vllm-project/compressed-tensors).

    pack-quantized     MODULE.weight_packed [N, K*b/32] words, MODULE.weight_shape [2], and
                       MODULE.weight_zero_point [N*b/32, G] words, or int8 [N, G]
    int-quantized      MODULE.weight [N, K] int8, MODULE.weight_zero_point int8
    float-quantized    MODULE.weight [N, K] E4M3
    mxfp4-pack-quantized, nvfp4-pack-quantized: see packed_floats.py

and MODULE.weight_scale beside all of them. Integers are stored plus half their range in words,
and as they are in int8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError
from edgellm.graphs.hf_quantization import fp8
from edgellm.graphs.hf_quantization.gptq import read_group_index
from edgellm.graphs.hf_quantization.groups import Groups
from edgellm.graphs.hf_quantization.packed_floats import packed_float_tensor
from edgellm.graphs.hf_quantization.packing import Bytes, unpack, unsigned
from edgellm.graphs.hf_quantization.scales import read_scales
from edgellm.graphs.hf_quantization.schemes import read_schemes
from edgellm.graphs.safetensors_folder import FLOATS, SafetensorsFolder
from edgellm.graphs.tensor import Tensor

_BITS = (4, 8)


class Reader:
    """Reader of compressed-tensors' formats.

    The scheme of a module follows from its tensors, and must be among the config's schemes.
    """

    def __init__(
        self, values: Mapping[str, Any], folder: SafetensorsFolder, *, origin: str
    ) -> None:
        self._schemes = read_schemes(values, origin=origin)
        self._folder = folder
        self._origin = origin

    def tensor(self, module: str) -> Tensor | None:
        weight, packed = f"{module}.weight", f"{module}.weight_packed"
        if packed in self._folder:
            if self._folder.expect(packed, ("I32", "U8")).dtype == "I32":
                return self._packed_integers(module)
            tensor, group_size = packed_float_tensor(self._folder, module, origin=self._origin)
            self._check(module, bits=4, floats=True, group_size=group_size)
            return tensor
        if weight not in self._folder or self._folder.entry(weight).dtype in FLOATS:
            return None
        if self._folder.expect(weight, ("I8", fp8.DTYPE)).dtype == "I8":
            return self._int8(module)
        self._check(module, bits=8, floats=True)
        block = next((scheme.block for scheme in self._schemes if scheme.block is not None), None)
        return fp8.fp8_tensor(self._folder, weight, f"{module}.weight_scale", block=block)

    def _packed_integers(self, module: str) -> Tensor:
        key = f"{module}.weight_packed"
        rows, words = self._folder.expect(key, ("I32",), shape=(None, None)).shape
        columns = self._columns(module, rows)
        bits = next((b for b in _BITS if columns and -(-columns * b // 32) == words), None)
        if bits is None:
            raise ModelFormatError(
                f"{self._folder.entry(key).file}: tensor {key} has {words} words a row; "
                f"{columns} inputs of 4 or 8 bits take others"
            )

        def codes() -> Bytes:
            return unpack(self._folder.read(key), bits)[:, :columns]

        return self._integers(module, (rows, columns), bits, codes)

    def _columns(self, module: str, rows: int) -> int:
        """Read the number of a module's inputs from `weight_shape`."""
        key = f"{module}.weight_shape"
        entry = self._folder.expect(key, ("I64", "I32"), shape=(2,))
        shape: list[int] = self._folder.read(key).tolist()
        if shape[0] != rows or shape[1] < 1:
            raise ModelFormatError(
                f"{entry.file}: tensor {key} is {shape}, but {module}.weight_packed has {rows} rows"
            )
        return shape[1]

    def _int8(self, module: str) -> Tensor:
        key = f"{module}.weight"
        rows, columns = self._folder.expect(key, ("I8",), shape=(None, None)).shape
        return self._integers(module, (rows, columns), 8, lambda: unsigned(self._folder.read(key)))

    def _integers(
        self, module: str, shape: tuple[int, int], bits: int, codes: Callable[[], Bytes]
    ) -> Tensor:
        key = f"{module}.weight_scale"
        groups = self._groups(key, shape)
        group_size = shape[1] // groups if groups > 1 else None
        symmetric = f"{module}.weight_zero_point" not in self._folder
        self._check(module, bits=bits, floats=False, group_size=group_size, symmetric=symmetric)
        each = (shape[0], groups)
        self._check_zeros(module, each, bits)
        return Groups(
            shape=shape,
            bits=bits,
            groups=groups,
            storage=f"compressed-tensors {bits}-bit",
            codes=codes,
            zeros=lambda: self._zeros(module, each, bits),
            scales=lambda: np.broadcast_to(
                read_scales(self._folder, key).reshape(-1, groups), each
            ),
            group_of=self._group_of(module, shape[1], groups),
        ).tensor()

    def _groups(self, key: str, shape: tuple[int, int]) -> int:
        """Return the number of groups of inputs, by the shape of the scales.

        One group stands for scales of outputs, or for one scale of the whole weight.
        """
        entry, (rows, columns) = self._folder.expect(key, FLOATS), shape
        if int(np.prod(entry.shape)) == 1 or entry.shape in ((rows,), (rows, 1)):
            return 1
        if len(entry.shape) == 2 and entry.shape[0] == rows and columns % entry.shape[1] == 0:
            return entry.shape[1]
        raise ModelFormatError(
            f"{entry.file}: tensor {key} has shape {list(entry.shape)}, which does not divide a "
            f"weight of shape {list(shape)} into groups of inputs"
        )

    def _check_zeros(self, module: str, each: tuple[int, int], bits: int) -> None:
        key = f"{module}.weight_zero_point"
        if key not in self._folder:
            return
        entry = self._folder.expect(key, ("I32", "I8"))
        if entry.dtype == "I32":
            self._folder.expect(key, ("I32",), shape=(-(-each[0] * bits // 32), each[1]))
        elif entry.shape not in (each, each[:1]) and int(np.prod(entry.shape)) != 1:
            self._folder.expect(key, ("I8",), shape=each)

    def _zeros(self, module: str, each: tuple[int, int], bits: int) -> Bytes:
        """Read the zero points `[N, G]`; without a tensor, they are half the range of the codes."""
        key, half = f"{module}.weight_zero_point", 1 << (bits - 1)
        if key not in self._folder:
            return np.full(each, half, np.uint8)
        stored: NDArray[Any] = self._folder.read(key)
        if stored.dtype == np.int32:
            return unpack(stored.T, bits)[:, : each[0]].T
        centred = (stored.astype(np.int16) + half).astype(np.uint8)
        return np.broadcast_to(centred.reshape(-1, each[1]), each)

    def _group_of(self, module: str, columns: int, groups: int) -> NDArray[np.intp] | None:
        """Return the group of each input, `[K]`; None where groups are runs of inputs."""
        key = f"{module}.weight_g_idx"
        if key not in self._folder or (self._folder.read(key) == -1).all():
            return None
        return read_group_index(self._folder, key, columns=columns, groups=groups)

    def _check(
        self,
        module: str,
        *,
        bits: int,
        floats: bool,
        group_size: int | None = None,
        symmetric: bool = True,
    ) -> None:
        """Refuse a module whose tensors fit none of the config's schemes."""
        if any(scheme.allows(bits, floats, group_size, symmetric) for scheme in self._schemes):
            return
        kind = "float" if floats else "int"
        groups = "" if group_size is None else f" in groups of {group_size}"
        zeros = "" if symmetric else " with zero points"
        raise ModelFormatError(
            f"{self._origin}: no config group has weights of type {kind} and {bits} bits{groups}"
            f"{zeros}, as the tensors of {module} are; there is "
            + ", ".join(str(scheme) for scheme in self._schemes)
        )
