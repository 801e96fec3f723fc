"""Float weights to symmetric int8, per output channel or per group of 32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GROUP = 32
ZERO_POINT = 128
# An interrupt is not seen within a call of numpy's, and a whole embedding takes seconds.
_WEIGHTS_AT_ONCE = 1 << 20


def quantize_channels(
    weight: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes `[N, K]` int8 and one scale a row `[N]` float32: `w = code * scale`."""
    scale = channel_scale(weight)
    divisor = np.where(scale > 0, scale, 1)
    return np.rint(weight / divisor[:, None]).astype(np.int8), scale


def channel_scale(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """The steps `[N]` of rows `[N, K]`: their largest weights become 127 of them."""
    return np.asarray(np.abs(weight).max(axis=1) * np.float32(1 / 127))


def quantize_groups(
    weight: NDArray[np.float32],
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes `[N, K/32, 32]` uint8 around 128 and scales `[N, K/32]`: `w = (code - 128) * scale`.

    Scales are rounded to half precision, in which Q8_0 and the native kernels store them.
    """
    rows, columns = weight.shape
    codes = np.empty((rows, columns // GROUP, GROUP), np.uint8)
    scale = np.empty((rows, columns // GROUP), np.float32)
    step = max(_WEIGHTS_AT_ONCE // max(columns, 1), 1)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        codes[part], scale[part] = _quantize_rows(weight[part])
    return codes, scale


def _quantize_rows(weight: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scale = np.abs(groups).max(axis=-1) * np.float32(1 / 127)
    scale = scale.astype(np.float16).astype(np.float32)
    divisor = np.where(scale > 0, scale, 1)
    codes = np.rint(groups / divisor[..., None]).clip(-127, 127) + ZERO_POINT
    return codes.astype(np.uint8), scale


def dequantize_groups(
    codes: NDArray[np.uint8], scale: NDArray[np.float32]
) -> NDArray[np.float32]:  # [..., K/32, 32], [..., K/32] -> [..., K]
    """The float32 rows that group-32 codes stand for."""
    values = (codes.astype(np.float32) - np.float32(ZERO_POINT)) * scale[..., None]
    return values.reshape(*codes.shape[:-2], -1)
