"""Weights in GPTQ's format, versions 1 and 2 (github.com/ModelCloud/GPTQModel).

    MODULE.qweight [K*b/32, N]    MODULE.qzeros [K/g, N*b/32]    MODULE.scales [K/g, N]
    MODULE.g_idx [K]: the group of each input

Words of 32 bits hold codes of b bits from the lowest bits on: of inputs in qweight, of outputs in
qzeros. Version 1 stores zeros less 1: from each word a word of ones is taken away, so that a zero
of 0 borrows from the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError
from edgellm.graphs.fields import Fields
from edgellm.graphs.hf_quantization.groups import (
    Bytes,
    Groups,
    group_count,
    read_choice,
    read_group_size,
    read_scales,
    unpack,
)
from edgellm.graphs.safetensors_folder import FLOATS, SafetensorsFolder
from edgellm.graphs.tensor import Tensor

_BITS = (4, 8)


class Reader:
    def __init__(
        self, values: Mapping[str, Any], folder: SafetensorsFolder, *, origin: str
    ) -> None:
        fields = Fields(values, origin=origin)
        for key in ("checkpoint_format", "format"):
            fields.require(key, "gptq", "gptq_v2")
        fields.require("is_marlin_format", False)
        # a model with rotated weights would have to rotate its activations too
        fields.require("rotation", False)
        self._bits = read_choice(fields, "bits", _BITS, origin=origin)
        self._group_size = read_group_size(fields, origin=origin)
        version = fields.optional(str, "checkpoint_format") or fields.optional(str, "format")
        # a word of codes 1
        ones = ((1 << 32) - 1) // ((1 << self._bits) - 1)
        self._taken_away = np.uint32(0 if version == "gptq_v2" else ones)
        self._scattered = fields.optional(bool, "desc_act") or False
        self._folder = folder
        self._origin = origin

    def tensor(self, module: str) -> Tensor | None:
        if f"{module}.qweight" not in self._folder:
            return None
        expect, per_word = self._folder.expect, 32 // self._bits
        words, rows = expect(f"{module}.qweight", ("I32",), shape=(None, None)).shape
        columns = words * per_word
        groups = group_count(columns, self._group_size, module=module, origin=self._origin)
        expect(f"{module}.qzeros", ("I32",), shape=(groups, -(-rows // per_word)))
        expect(f"{module}.scales", FLOATS, shape=(groups, rows))
        return Groups(
            shape=(rows, columns),
            bits=self._bits,
            groups=groups,
            storage=f"GPTQ {self._bits}-bit",
            codes=lambda: unpack(self._folder.read(f"{module}.qweight").T, self._bits),
            zeros=lambda: self._zeros(f"{module}.qzeros", rows),
            scales=lambda: read_scales(self._folder, f"{module}.scales").T,
            group_of=self._group_of(module, columns, groups),
        ).tensor()

    def _zeros(self, key: str, rows: int) -> Bytes:
        """Unpack words `[G, N*b/32]` of zeros to `[N, G]`."""
        words = self._folder.read(key).view(np.uint32) + self._taken_away
        return unpack(words, self._bits)[:, :rows].T

    def _group_of(self, module: str, columns: int, groups: int) -> NDArray[np.intp] | None:
        """Return the group of each input, `[K]`; None where groups are runs of inputs."""
        key = f"{module}.g_idx"
        if key not in self._folder and not self._scattered:
            return None
        return read_group_index(self._folder, key, columns=columns, groups=groups)


def read_group_index(
    folder: SafetensorsFolder, key: str, *, columns: int, groups: int
) -> NDArray[np.intp] | None:
    """Read the group of each input, `[K]`; None where groups are runs of inputs, in order.

    Raises:
        ModelFormatError: the tensor names a group that does not exist.
    """
    entry = folder.expect(key, ("I32", "I64"), shape=(columns,))
    index: NDArray[np.intp] = folder.read(key).astype(np.intp)
    if index.size and not 0 <= index.min() <= index.max() < groups:
        raise ModelFormatError(
            f"{entry.file}: tensor {key} puts inputs into groups {index.min()} to {index.max()}; "
            f"the scales are those of groups 0 to {groups - 1}"
        )
    runs = np.arange(columns) // (columns // groups)
    return None if (index == runs).all() else index
