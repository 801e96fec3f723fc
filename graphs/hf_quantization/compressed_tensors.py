"""Weights as llm-compressor writes them (github.com/vllm-project/compressed-tensors).

    pack-quantized     MODULE.weight_packed [N, K*b/32] words, MODULE.weight_shape [2], and
                       MODULE.weight_zero_point [N*b/32, G] words, or int8 [N, G]
    int-quantized      MODULE.weight [N, K] int8, MODULE.weight_zero_point int8
    float-quantized    MODULE.weight [N, K] E4M3
    mxfp4-pack-quantized, nvfp4-pack-quantized: see `packed_float_tensor`

and MODULE.weight_scale beside all of them. Integers are stored plus half their range in words,
and as they are in int8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import Fields
from edgellm.graphs.hf_quantization import fp8
from edgellm.graphs.hf_quantization.fp8 import read_block
from edgellm.graphs.hf_quantization.gptq import read_group_index
from edgellm.graphs.hf_quantization.groups import (
    Bytes,
    Groups,
    read_powers_of_two,
    read_scales,
    unpack,
    unsigned,
)
from edgellm.graphs.hf_quantization.mxfp4 import e2m1, mxfp4_tensor
from edgellm.graphs.safetensors_folder import FLOATS, SafetensorsFolder
from edgellm.graphs.tensor import Tensor

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
)


@dataclass(frozen=True)
class Scheme:
    """Quantization of the weights of one config group.

    Attributes:
        bits: bits of a code.
        floats: whether codes are floats, not integers.
        group_size: inputs that share a scale; None where each output, each block or the whole
            weight has one scale.
        symmetric: whether there are no zero points.
        block: outputs and inputs of a block; None where there are no blocks.
    """

    bits: int
    floats: bool
    group_size: int | None
    symmetric: bool
    block: tuple[int, int] | None

    def allows(self, bits: int, floats: bool, group_size: int | None, symmetric: bool) -> bool:
        """Whether tensors with these properties can belong to the scheme.

        Scales for one group of all inputs look like scales of outputs, so a `group_size` of None
        fits any scheme.
        """
        return (
            (bits, floats) == (self.bits, self.floats)
            and group_size in (None, self.group_size)
            # symmetric weights may have zero points, all in the middle
            and (self.symmetric or not symmetric)
        )

    def __str__(self) -> str:
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        zeros = "" if self.symmetric else " with zero points"
        return f"{'float' if self.floats else 'int'} {self.bits}{groups}{zeros}"


def read_schemes(values: Mapping[str, Any], *, origin: str) -> list[Scheme]:
    """Read the schemes of all config groups that have weights.

    Raises:
        ModelFormatError: a group is incomplete.
        UnsupportedModelError: the format is not supported, or the weights are also rotated or
            sparse.
    """
    fields = Fields(values, origin=origin)
    _check_format(fields.optional(str, "format"), origin)
    for key in ("transform_config", "sparsity_config"):
        if any((fields.optional(dict, key) or {}).values()):
            raise UnsupportedModelError(
                f"{origin}: {key} is set: rotations and sparse weights are not read; take a file "
                "of the model without them"
            )
    schemes = []
    for name, group in fields.read(dict, "config_groups").items():
        where = f"{origin}: config_groups.{name}"
        if not isinstance(group, dict):
            raise UnsupportedModelError(f"{where} is {group!r}; supported are objects")
        group_fields = Fields(group, origin=where)
        _check_format(group_fields.optional(str, "format"), where)
        weights = group_fields.optional(dict, "weights")
        if weights is not None:
            schemes.append(_scheme(weights, f"{where}.weights"))
    return schemes


def _check_format(name: str | None, origin: str) -> None:
    if name is not None and name not in _FORMATS:
        raise UnsupportedModelError(
            f"{origin}: format {name!r} is not read; read are {', '.join(_FORMATS)}"
        )


def _scheme(weights: Mapping[str, Any], origin: str) -> Scheme:
    fields = Fields(weights, origin=origin)
    fields.require("type", "int", "float")
    fields.require("actorder", False, "group", "weight", "static", "dynamic")
    symmetric = fields.optional(bool, "symmetric")
    return Scheme(
        bits=fields.read(int, "num_bits"),
        floats=fields.optional(str, "type") == "float",
        group_size=fields.optional(int, "group_size"),
        symmetric=True if symmetric is None else symmetric,
        block=read_block(weights, "block_structure", origin=origin),
    )


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


_FLOAT_BITS = 4
_MX_GROUP, _NV_GROUP = 32, 16


def packed_float_tensor(
    folder: SafetensorsFolder, module: str, *, origin: str
) -> tuple[Tensor, int]:
    """Return a module's weight, and its group size, which follows from the dtype of its scales.

    Raises:
        ModelFormatError: tensors are missing or do not fit each other.
    """
    packed, scale = f"{module}.weight_packed", f"{module}.weight_scale"
    rows, size = folder.expect(packed, ("U8",), shape=(None, None)).shape
    columns = 2 * size
    entry = folder.expect(scale, ("U8", "F8_E8M0", "F8_E4M3"))
    group_size = _NV_GROUP if entry.dtype == "F8_E4M3" else _MX_GROUP
    if columns % group_size:
        raise ModelFormatError(
            f"{origin}: the {columns} inputs of {module} are not groups of {group_size}"
        )
    folder.expect(scale, (entry.dtype,), shape=(rows, columns // group_size))
    if group_size == _NV_GROUP:
        return _nvfp4(folder, module, (rows, columns)), group_size
    tensor = mxfp4_tensor(
        (rows, columns),
        codes=lambda: unpack(folder.read(packed), _FLOAT_BITS),
        scales=lambda: read_powers_of_two(folder, scale),
    )
    return tensor, group_size


def _nvfp4(folder: SafetensorsFolder, module: str, shape: tuple[int, int]) -> Tensor:
    """Return a weight in NVFP4.

    No kind has groups of 16 with E4M3 scales, so `quantized` is None.
    """
    key = f"{module}.weight_global_scale"
    entry = folder.expect(key, ("F32",))
    if int(np.prod(entry.shape)) != 1:
        raise ModelFormatError(
            f"{entry.file}: tensor {key} has shape {list(entry.shape)}; one number is expected"
        )

    def float32() -> NDArray[np.float32]:
        divisor = float(read_scales(folder, key).reshape(()))
        if divisor <= 0:
            raise ModelFormatError(f"{entry.file}: tensor {key} is {divisor}; above 0 is expected")
        scales = read_scales(folder, f"{module}.weight_scale") / np.float32(divisor)
        codes = unpack(folder.read(f"{module}.weight_packed"), _FLOAT_BITS)
        groups = e2m1(codes).reshape(shape[0], -1, _NV_GROUP) * scales[..., None]
        return groups.reshape(shape)

    return Tensor(shape, "NVFP4", float32)
