"""Reference of an adapter's change of a linear layer, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.lora.weights import LowRank, rounded

Floats = NDArray[np.float64]


def change(x: Floats, by: LowRank, head: int = 0) -> Floats:
    """Return what is added to a linear layer's outputs `[C, N]` for inputs `[C, K]`.

    Where its heads have matrices of their own it is what is added to those of one, see `head`.

    The inputs are not rounded; the matrices are, to bfloat16.
    """
    one = (each if each.ndim == 2 else each[head] for each in (by.a, by.b))
    a, b = (rounded(matrix).astype(np.float64) for matrix in one)
    return np.asarray(x @ a.T @ b.T)
