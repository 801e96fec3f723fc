"""Weights of bitsandbytes (github.com/bitsandbytes-foundation/bitsandbytes), of 4 or 8 bits.

4 bits: MODULE.weight [N*K/2, 1], the first of two numbers in the high half of a byte. Other tensors
have names that begin with MODULE.weight: `quant_map` [16], the values of the codes; `absmax`, a
scale for each block of numbers, through all rows; `quant_state.bitsandbytes__nf4` (or `fp4`), JSON
with sizes.
Scales may be codes themselves: `nested_quant_map[absmax] * nested_absmax[block] + nested_offset`.

8 bits: MODULE.weight [N, K] int8 and MODULE.SCB [N]; a number is `code * SCB / 127`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import Fields
from edgellm.graphs.hf_quantization.groups import Groups, read_scales, unpack, unsigned
from edgellm.graphs.safetensors_folder import FLOATS, SafetensorsFolder
from edgellm.graphs.tensor import Tensor

_TYPES = ("nf4", "fp4")
_LARGEST_INT8 = 127


class Reader:
    def __init__(
        self, values: Mapping[str, Any], folder: SafetensorsFolder, *, origin: str
    ) -> None:
        self._folder = folder

    def tensor(self, module: str) -> Tensor | None:
        weight = f"{module}.weight"
        if weight not in self._folder or self._folder.entry(weight).dtype in FLOATS:
            return None
        if self._folder.expect(weight, ("U8", "I8")).dtype == "I8":
            return self._int8(module)
        for name in _TYPES:
            if f"{weight}.quant_state.bitsandbytes__{name}" in self._folder:
                return _FourBits(self._folder, weight, name).tensor()
        raise ModelFormatError(
            f"{self._folder.entry(weight).file}: tensor {weight} holds codes, but neither "
            + " nor ".join(f"{weight}.quant_state.bitsandbytes__{name}" for name in _TYPES)
            + " is there"
        )

    def _int8(self, module: str) -> Tensor:
        weight, scale = f"{module}.weight", f"{module}.SCB"
        rows, columns = self._folder.expect(weight, ("I8",), shape=(None, None)).shape
        self._folder.expect(scale, ("F32",), shape=(rows,))
        layout = f"{module}.weight_format"
        if layout in self._folder and self._folder.read(layout).any():
            raise UnsupportedModelError(
                f"{self._folder.entry(layout).file}: tensor {layout} says that codes lie in tiles; "
                "supported are rows"
            )
        return Groups(
            shape=(rows, columns),
            bits=8,
            groups=1,
            storage="bitsandbytes 8-bit",
            codes=lambda: unsigned(self._folder.read(weight)),
            zeros=lambda: np.full((rows, 1), 128, np.uint8),
            scales=lambda: read_scales(self._folder, scale)[:, None] / np.float32(_LARGEST_INT8),
        ).tensor()


class _FourBits:
    """Weight of 4-bit codes. No kind has their table of values, so `quantized` is None."""

    def __init__(self, folder: SafetensorsFolder, weight: str, name: str) -> None:
        self._folder = folder
        self._weight = weight
        self._name = name
        state = f"{weight}.quant_state.bitsandbytes__{name}"
        origin = f"{folder.path}: tensor {state}"
        fields = Fields(_read_state(folder, state, origin), origin=origin)
        self._block = fields.read(int, "blocksize")
        shape = fields.read(list, "shape")
        if len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape) or self._block < 1:
            raise ModelFormatError(f"{origin}: shape is {shape}, blocksize is {self._block}")
        self._shape = (shape[0], shape[1])
        self._nested_block = fields.optional(int, "nested_blocksize") or 0
        self._nested_offset = fields.optional(float, "nested_offset") or 0.0

    def tensor(self) -> Tensor:
        count = self._shape[0] * self._shape[1]
        expect, blocks = self._folder.expect, -(-count // self._block)
        if count % 2:
            raise ModelFormatError(f"{self._weight}: {count} numbers do not fill bytes")
        size = int(np.prod(expect(self._weight, ("U8",)).shape))
        if size != count // 2:
            raise ModelFormatError(
                f"{self._folder.entry(self._weight).file}: tensor {self._weight} has {size} bytes; "
                f"{list(self._shape)} codes of 4 bits are {count // 2}"
            )
        expect(f"{self._weight}.quant_map", ("F32",), shape=(16,))
        dtypes = ("U8",) if self._nested_block else ("F32",)
        expect(f"{self._weight}.absmax", dtypes, shape=(blocks,))
        if self._nested_block:
            expect(f"{self._weight}.nested_quant_map", ("F32",), shape=(256,))
            nested = -(-blocks // self._nested_block)
            expect(f"{self._weight}.nested_absmax", ("F32",), shape=(nested,))
        return Tensor(self._shape, self._name.upper(), self._float32)

    def _float32(self) -> NDArray[np.float32]:
        data = self._folder.read(self._weight).reshape(1, -1)
        codes = unpack(data >> 4 | data << 4, 4)[0]
        values: NDArray[np.float32] = read_scales(self._folder, f"{self._weight}.quant_map")[codes]
        values *= np.repeat(self._scales(), min(self._block, values.size))[: values.size]
        return values.reshape(self._shape)

    def _scales(self) -> NDArray[np.float32]:
        if not self._nested_block:
            return read_scales(self._folder, f"{self._weight}.absmax")
        codes = self._folder.read(f"{self._weight}.absmax")
        scales: NDArray[np.float32] = read_scales(self._folder, f"{self._weight}.nested_quant_map")[
            codes
        ]
        nested = read_scales(self._folder, f"{self._weight}.nested_absmax")
        scales = scales * np.repeat(nested, min(self._nested_block, scales.size))[: scales.size]
        return scales + np.float32(self._nested_offset)


def _read_state(folder: SafetensorsFolder, key: str, origin: str) -> dict[str, Any]:
    folder.expect(key, ("U8",))
    try:
        values = json.loads(folder.read(key).tobytes())
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{origin}: not readable as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelFormatError(f"{origin}: expected a JSON object")
    return values
