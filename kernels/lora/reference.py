"""Reference of an adapter's change of a linear layer, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.lora.weights import LowRank, rounded

Floats = NDArray[np.float64]


def change(x: Floats, by: LowRank, head: int = 0) -> Floats:
    """Return what is added to a linear layer's outputs `[C, N]` for inputs `[C, K]`.

    Where its heads have matrices of their own it is what is added to those of one, see `head`.

    The inputs are not rounded; the matrices are, to int8.
    """
    one = (each if each.ndim == 2 else each[head] for each in (by.a, by.b))
    (a, of_a), (b, of_b) = (rounded(x, axis=axis) for x, axis in zip(one, (-1, -2), strict=True))
    return np.asarray((x @ a.T.astype(np.float64)) * (of_a * of_b) @ b.T.astype(np.float64))
