"""Reference of a quantized linear layer, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.quantized import GROUP


def quantize_activations(
    x: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.float64]]:
    """Quantize rows `[M, K]` to int8 codes, and one scale for every 32 of them, `[M, K/32]`."""
    groups = x.astype(np.float64).reshape(x.shape[0], -1, GROUP)
    scale = np.abs(groups).max(-1) / 127
    divisor = np.where(scale > 0, scale, 1)[..., None]
    return np.rint(groups / divisor).astype(np.int8).reshape(x.shape), scale


def linear(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float64]:
    """Compute y = Q(x) W^T for rows `[M, K]` and a dequantized weight `[N, K]`.

    Q is the rounding of `quantize_activations`.
    """
    codes, scale = quantize_activations(x)
    rounded = codes * np.repeat(scale, GROUP, axis=-1)
    result: NDArray[np.float64] = rounded @ weight.astype(np.float64).T
    return result
