"""Reference of an adapter's change of a linear layer, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.lora.weights import LowRank, rounded

Floats = NDArray[np.float64]


def change(x: Floats, by: LowRank) -> Floats:
    """Return what is added to a linear layer's outputs `[C, N]` for inputs `[C, K]`.

    The inputs are not rounded; the matrices are, to bfloat16.
    """
    a, b = (rounded(matrix).astype(np.float64) for matrix in (by.a, by.b))
    return np.asarray(x @ a.T @ b.T)
