"""How far a quantized weight is from the float weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def relative_error(exact: NDArray[np.float32], approximate: NDArray[np.float32]) -> float:
    """Root-mean-square error over the root-mean-square weight; 0 for an all-zero weight."""
    norm = float(np.linalg.norm(exact))
    return float(np.linalg.norm(approximate - exact)) / norm if norm else 0.0
