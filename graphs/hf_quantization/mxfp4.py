"""Weights in MXFP4: 4-bit floats (E2M1) with one scale, a power of two, for every 32 inputs.

The format is OCP Microscaling Formats 1.0. gpt-oss has MODULE_blocks [X, N, K/32, 16], the first of
two numbers in the low half of a byte, and MODULE_scales [X, N, K/32], of all experts X.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs.hf_quantization.groups import Bytes, half_scales, read_powers_of_two, unpack
from edgellm.graphs.safetensors_folder import SafetensorsFolder
from edgellm.graphs.tensor import Tensor, reshaped
from edgellm.kernels.quantized import GROUP, KINDS, QuantizedWeight

KIND = KINDS["mxfp4"]
# Code of E2M1 -> twice its value.
_DOUBLED = np.array(KIND.table, np.float32)
_HALF = np.float32(0.5)


class Reader:
    def __init__(
        self, values: Mapping[str, Any], folder: SafetensorsFolder, *, origin: str
    ) -> None:
        self._folder = folder

    def tensor(self, module: str) -> Tensor | None:
        blocks, scales = f"{module}_blocks", f"{module}_scales"
        if blocks not in self._folder:
            return None
        half = GROUP // 2
        stacked = len(self._folder.entry(blocks).shape) == 4
        sizes = (None, None, None, half) if stacked else (None, None, half)
        *stack, groups, _ = self._folder.expect(blocks, ("U8",), shape=sizes).shape
        self._folder.expect(scales, ("U8", "F8_E8M0"), shape=(*stack, groups))
        rows = math.prod(stack)
        tensor = mxfp4_tensor(
            (rows, groups * GROUP),
            codes=lambda: unpack(self._folder.read(blocks).reshape(rows, -1), KIND.bits),
            scales=lambda: read_powers_of_two(self._folder, scales).reshape(rows, groups),
        )
        return reshaped(tensor, *stack, groups * GROUP)


def mxfp4_tensor(
    shape: tuple[int, int],
    *,
    codes: Callable[[], Bytes],
    scales: Callable[[], NDArray[np.float32]],
) -> Tensor:
    """Return a weight of E2M1 codes `[N, K]` and scales `[N, K/32]`; scales are read at once.

    Scales are taken over exactly. `quantized` is None if a scale is beyond the powers of two that
    halves hold, and its codes are not all zeros.

    Args:
        shape: `(N, K)`.
        codes, scales: read the codes and the scales.
    """

    def unused() -> NDArray[np.bool_]:
        return np.asarray((_by_group(codes()) == 0).all(axis=2))

    def halves() -> NDArray[np.float16] | None:
        return half_scales(scales() * _HALF, unused)

    def float32() -> NDArray[np.float32]:
        return (_by_group(codes()) * (scales() * _HALF)[..., None]).reshape(shape)

    def quantized() -> QuantizedWeight:
        scale = halves()
        assert scale is not None
        return QuantizedWeight(KIND, codes(), scale)

    return Tensor(shape, "MXFP4", float32, None if halves() is None else quantized)


def e2m1(codes: Bytes) -> NDArray[np.float32]:
    """Return the values of 4-bit floats: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    return _DOUBLED[codes] * _HALF


def _by_group(codes: Bytes) -> NDArray[np.float32]:
    """Return twice the values of codes `[N, K]` as `[N, K/32, 32]`."""
    return _DOUBLED[codes].reshape(len(codes), -1, GROUP)
