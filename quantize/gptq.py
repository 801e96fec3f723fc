"""Rounding of weights to int8 by GPTQ: errors compensate each other for the inputs that were seen.

The error of a weight's products counts, not that of the weight: tr(E M E^T) for weight errors
E [N, K] and second moments M = mean(x^T x) of the inputs. Columns are rounded one after the other,
and the errors of all columns before are moved onto the next one (GPTQ, Frantar et al.,
arXiv:2210.17323, in the form that QuIP calls LDLQ and shows to be the same, Chee et al.,
arXiv:2307.13304, section 4.1):

    q_k = round(w_k + sum over i < k of (w_i - q_i) A[i, k])        M = A D A^T, A unit upper
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.quantize.weights import channel_scale

# Columns of a block: errors move one by one within a block, and together onto columns behind it.
_BLOCK = 64
# Share of the mean square input that is added to every input's: directions that calibration hardly
# shows must not be free.
_DAMPING = 0.01


def quantize_channels_for(
    weight: NDArray[np.float32], moments: NDArray[np.float32]
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round a weight as `quantize_channels` does, to the same scales, for inputs of known moments.

    Args:
        weight: `[N, K]`.
        moments: second moments of the inputs, `[K, K]`.

    Returns:
        Codes `[N, K]` int8 and one scale a row `[N]` float32: `w = code * scale`.
    """
    scale = channel_scale(weight)
    feedback = _feedback(moments)
    exact = (weight / np.where(scale > 0, scale, 1)[:, None]).T  # [K, N], in steps
    codes = np.empty(exact.shape, np.int8)
    errors = np.empty(exact.shape, np.float32)
    for first in range(0, len(exact), _BLOCK):
        block = slice(first, first + _BLOCK)
        target = exact[block] + feedback[:first, block].T @ errors[:first]
        for k, row in enumerate(target, first):
            codes[k] = np.rint(row).clip(-127, 127)
            errors[k] = exact[k] - codes[k]
            target[k - first + 1 :] += feedback[k, k + 1 : block.stop, None] * errors[k]
    return np.ascontiguousarray(codes.T), scale


def _feedback(moments: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return A of the module's formula, `[K, K]`."""
    damped = moments.astype(np.float64)
    diagonal = np.einsum("kk->k", damped)
    diagonal += _DAMPING * diagonal.mean() or 1.0  # without any input, nothing is moved
    # M = R R^T with R upper: a Cholesky decomposition from the last column to the first
    upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return np.asarray(upper / np.einsum("kk->k", upper), np.float32)
