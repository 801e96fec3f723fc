"""Weights in MLX's format (github.com/ml-explore/mlx, `mlx.core.quantize`).

    MODULE.weight [N, K*b/32] words    MODULE.scales, MODULE.biases [N, K/g]

All of them have one dimension more where they are those of several experts.

Modes are `affine` and `mxfp4`. Codes lie along the inputs, from the lowest bits on, and may go on
in the next word. A number is `code * scale + bias`; `mxfp4` has no biases and bytes for scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import Fields
from edgellm.graphs.hf_quantization.groups import (
    Bytes,
    Groups,
    read_choice,
    read_powers_of_two,
    read_scales,
    unpack,
)
from edgellm.graphs.hf_quantization.mxfp4 import mxfp4_tensor
from edgellm.graphs.safetensors_folder import FLOATS, SafetensorsFolder
from edgellm.graphs.tensor import Tensor, reshaped

# Mode -> allowed bits of a code, and group sizes.
_MODES = {"affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)), "mxfp4": ((4,), (32,))}


@dataclass(frozen=True)
class _Scheme:
    mode: str
    bits: int
    group_size: int


class Reader:
    def __init__(
        self, values: Mapping[str, Any], folder: SafetensorsFolder, *, origin: str
    ) -> None:
        self._values = values
        self._default = _scheme(values, origin=origin)
        self._folder = folder
        self._origin = origin

    def tensor(self, module: str) -> Tensor | None:
        weight, scales, biases = (f"{module}.{part}" for part in ("weight", "scales", "biases"))
        if scales not in self._folder:
            return None
        scheme, expect = self._scheme(module), self._folder.expect
        sizes = (None,) * max(2, min(3, len(self._folder.entry(weight).shape)))
        *stack, words = expect(weight, ("U32",), shape=sizes).shape
        columns = words * 32 // scheme.bits
        if words * 32 % (scheme.bits * scheme.group_size):
            raise ModelFormatError(
                f"{self._origin}: {words} words a row in tensor {weight} are not groups of "
                f"{scheme.group_size} codes of {scheme.bits} bits"
            )
        groups = columns // scheme.group_size
        if scheme.mode == "mxfp4":
            expect(scales, ("U8",), shape=(*stack, groups))
        else:
            for part in (scales, biases):
                expect(part, FLOATS, shape=(*stack, groups))
        flat = self._flat(module, scheme, math.prod(stack), groups)
        return reshaped(flat, *stack, columns)

    def _flat(self, module: str, scheme: _Scheme, rows: int, groups: int) -> Tensor:
        """Return the weight of a module with all rows in one matrix."""
        weight, scales, biases = (f"{module}.{part}" for part in ("weight", "scales", "biases"))
        shape = rows, groups * scheme.group_size

        def codes() -> Bytes:
            return unpack(self._folder.read(weight).reshape(rows, -1), scheme.bits)

        if scheme.mode == "mxfp4":
            return mxfp4_tensor(
                shape,
                codes=codes,
                scales=lambda: read_powers_of_two(self._folder, scales).reshape(rows, groups),
            )
        return Groups(
            shape=shape,
            bits=scheme.bits,
            groups=groups,
            storage=f"MLX {scheme.bits}-bit",
            codes=codes,
            scales=lambda: read_scales(self._folder, scales).reshape(rows, groups),
            offsets=lambda: read_scales(self._folder, biases).reshape(rows, groups),
        ).tensor()

    def _scheme(self, module: str) -> _Scheme:
        """Return the scheme of a module: its own if the description has one, else the default."""
        own = self._values.get(module)
        if own is None or own is True:
            return self._default
        origin = f"{self._origin}: {module}"
        if own is False:
            raise ModelFormatError(
                f"{origin} is not to be quantized, but its tensors are; config and weights belong "
                "to different models"
            )
        if not isinstance(own, dict):
            raise ModelFormatError(f"{origin} is {own!r}; expected an object, true or false")
        return _scheme(own, origin=origin)


def _scheme(values: Mapping[str, Any], *, origin: str) -> _Scheme:
    fields = Fields(values, origin=origin)
    mode = fields.optional(str, "mode") or "affine"
    if mode not in _MODES:
        raise UnsupportedModelError(
            f"{origin}: mode {mode!r} is not read; read are {', '.join(_MODES)}"
        )
    bits, group_sizes = _MODES[mode]
    return _Scheme(
        mode,
        read_choice(fields, "bits", bits, origin=origin),
        read_choice(fields, "group_size", group_sizes, origin=origin),
    )
