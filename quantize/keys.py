"""Keys that lose less when they are rounded, and scores that stay as they are.

RoPE turns a pair of channels as a whole, so it commutes with a factor for each pair: K divided by
it and Q multiplied by it give the same scores. And a vector that is taken from all keys changes
each query's scores by one number, which softmax does not see.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Positions whose keys the offset is for; later ones are turned further away from it.
_POSITIONS = 4096
# Powers of two beyond these are of no use, and would bring weights nearer to the ends of a half.
_LARGEST_EXPONENT = 8


def common_part(
    bias: NDArray[np.floating], inv_freq: Sequence[float], *, magnitude: float = 1.0
) -> NDArray[np.float64]:  # [Hkv, D] -> [Hkv, D]
    """The mean over positions of what a bias adds to keys, after RoPE.

    Pairs that turn slowly keep theirs, fast ones have none.

    Args:
        inv_freq: RoPE's frequencies, in radians per position; channel `c` is turned with `c` plus
            as many.
        magnitude: what RoPE's cosines and sines are multiplied by.
    """
    half = len(inv_freq)
    angles = np.arange(_POSITIONS, dtype=np.float64)[:, None] * np.asarray(inv_freq)
    turn = magnitude * np.exp(1j * angles).mean(axis=0)
    pairs = (bias[:, :half] + 1j * bias[:, half : 2 * half].astype(np.float64)) * turn
    return np.concatenate((pairs.real, pairs.imag, bias[:, 2 * half :]), axis=1)


def pair_exponents(
    key: NDArray[np.floating], query: NDArray[np.floating]
) -> NDArray[np.int8]:  # [Hkv, P], [Hkv, P] -> [Hkv, P]
    """Powers of two by which to divide K and multiply Q.

    A row's largest number decides how coarse all of it is, so numbers of one size would be best
    for K; but the error of a pair costs as much as Q is large there. With the square root of their
    ratio both are alike.

    Args:
        key, query: how large the numbers of a pair are, root mean square; a pair with a zero is
            left as it is.
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
