"""Reference of the gated short convolution in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def mix(rows: Floats, filters: NDArray[np.float32], state: Floats | None = None) -> Floats:
    """Compute `C * conv(B * x)` of consecutive rows of a sequence, `[n, channels]`.

    Args:
        rows: B, C and x of each row, `[n, 3 * channels]`.
        filters: `[taps, channels]`; the last tap is that of the row itself.
        state: `B * x` of the `taps - 1` rows before, the oldest first; None: zeros, as before the
            first row of a sequence.
    """
    taps, channels = filters.shape
    b, c, x = np.split(rows, 3, axis=1)
    before = np.zeros((taps - 1, channels)) if state is None else state
    every = np.concatenate([before, b * x])
    summed = sum(filters[k] * every[k : k + len(rows)] for k in range(taps))
    return np.asarray(c * summed)
