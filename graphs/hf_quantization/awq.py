"""Weights in AWQ's format, layout `gemm` (github.com/casper-hansen/AutoAWQ).

    MODULE.qweight [K, N/8]    MODULE.qzeros [K/g, N/8]    MODULE.scales [K/g, N]

Words of 32 bits hold 8 outputs in the order 0 2 4 6 1 3 5 7, from the lowest bits on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import UnsupportedModelError
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

_BITS = 4
_PER_WORD = 8
# Place of each of 8 outputs in a word.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


class Reader:
    def __init__(
        self, values: Mapping[str, Any], folder: SafetensorsFolder, *, origin: str
    ) -> None:
        fields = Fields(values, origin=origin)
        for key in ("version", "format", "checkpoint_format"):
            layout = fields.optional(str, key)
            if layout is not None and layout.lower() != "gemm":
                raise UnsupportedModelError(
                    f"{origin}: {key} {layout!r} is another layout of AWQ; supported is 'gemm'"
                )
        read_choice(fields, "bits", (_BITS,), origin=origin)
        self._group_size = read_group_size(fields, origin=origin)
        self._folder = folder
        self._origin = origin

    def tensor(self, module: str) -> Tensor | None:
        if f"{module}.qweight" not in self._folder:
            return None
        expect = self._folder.expect
        columns, words = expect(f"{module}.qweight", ("I32",), shape=(None, None)).shape
        groups = group_count(columns, self._group_size, module=module, origin=self._origin)
        rows = words * _PER_WORD
        expect(f"{module}.qzeros", ("I32",), shape=(groups, words))
        expect(f"{module}.scales", FLOATS, shape=(groups, rows))
        return Groups(
            shape=(rows, columns),
            bits=_BITS,
            groups=groups,
            storage="AWQ 4-bit",
            codes=partial(self._codes, f"{module}.qweight"),
            zeros=partial(self._codes, f"{module}.qzeros"),
            scales=lambda: read_scales(self._folder, f"{module}.scales").T,
        ).tensor()

    def _codes(self, key: str) -> Bytes:
        """Unpack words `[K, N/8]` to codes `[N, K]`."""
        return _transposed(unpack(self._folder.read(key), _BITS))


def _transposed(codes: Bytes) -> Bytes:
    ordered: NDArray[np.uint8] = codes.reshape(len(codes), -1, _PER_WORD)[:, :, _PLACES]
    return np.ascontiguousarray(ordered.reshape(len(codes), -1).T)
