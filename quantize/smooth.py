"""SmoothQuant: outliers of activations are moved into weights (Xiao et al., arXiv:2211.10438)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def smoothing(activations: Floats, weights: Floats, *, alpha: float = 0.5) -> Floats:
    """Return factors `[K]`: a layer's inputs are divided, and its weights are multiplied by them.

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), equation 4; the division is folded into the norm
    before the layer.

    Args:
        activations: max|X_j| of each input in a calibration run, `[K]`.
        weights: max|W_j| of the same inputs over all outputs, `[K]`.
        alpha: share of the outliers that is moved; 1 moves all.
    """
    sizes = np.maximum(activations, np.float32(1e-5)), np.maximum(weights, np.float32(1e-5))
    return (sizes[0] ** alpha / sizes[1] ** (1 - alpha)).astype(np.float32)
