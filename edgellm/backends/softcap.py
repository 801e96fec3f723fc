"""Gemma 2's smooth bound on logits (arXiv:2408.00118, section 2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def softcapped(logits: NDArray[np.float32], cap: float | None) -> NDArray[np.float32]:
    """Return `cap * tanh(logits / cap)`; the same array where there is no cap."""
    if cap is None:
        return logits
    bounded: NDArray[np.float32] = np.float32(cap) * np.tanh(logits / np.float32(cap))
    return bounded
