"""Changes of Q and K that leave attention scores the same, and let keys lose less in rounding.

RoPE turns a pair of channels as a whole, so it commutes with a factor for each pair: K divided by
the factor and Q multiplied by it give the same scores. A vector that is subtracted from all keys
changes each query's scores by one number, which softmax ignores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Positions that the mean of keys is taken over; later keys are turned further away from it.
_POSITIONS = 4096
# Largest exponent: larger powers of two have no use, and bring weights near the limits of a half.
_LARGEST_EXPONENT = 8


def common_part(
    bias: NDArray[np.floating], inv_freq: Sequence[float], *, magnitude: float = 1.0
) -> NDArray[np.float64]:  # [Hkv, D] -> [Hkv, D]
    """Return the mean over positions of the bias of keys after RoPE.

    Pairs that turn slowly keep their bias, and the mean of fast pairs vanishes.

    Args:
        bias: bias of K, `[Hkv, D]`.
        inv_freq: RoPE's frequencies, in radians per position; channel `c` is turned with channel
            `c + len(inv_freq)`.
        magnitude: factor of RoPE's cosines and sines.
    """
    half = len(inv_freq)
    angles = np.arange(_POSITIONS, dtype=np.float64)[:, None] * np.asarray(inv_freq)
    turn = magnitude * np.exp(1j * angles).mean(axis=0)
    pairs = (bias[:, :half] + 1j * bias[:, half : 2 * half].astype(np.float64)) * turn
    return np.concatenate((pairs.real, pairs.imag, bias[:, 2 * half :]), axis=1)


def pair_exponents(
    key: NDArray[np.floating], query: NDArray[np.floating]
) -> NDArray[np.int8]:  # [Hkv, P], [Hkv, P] -> [Hkv, P]
    """Return exponents of the powers of two by which to divide K and multiply Q, per pair.

    The largest number of a row decides the step for the whole row, so pairs of equal size would be
    best for K. But the cost of a pair's error grows with Q in that pair. The square root of the
    ratio of K to Q balances both.

    Args:
        key, query: root mean square of the numbers in each pair of K and Q, `[Hkv, P]`; a pair with
            a zero is left as it is.
    """
    known = (key > 0) & (query > 0)
    size = np.log2(np.where(known, key, 1)) - np.log2(np.where(known, query, 1))
    size /= 2
    middle = np.array(
        [np.median(row[k]) if k.any() else 0 for row, k in zip(size, known, strict=True)]
    )
    rounded = np.rint(size - middle[:, None])
    rounded = np.clip(rounded, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return np.where(known, rounded, 0).astype(np.int8)
