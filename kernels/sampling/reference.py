"""Sampling's passes over the vocabulary, written out."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def log_sum_exp(scores: NDArray[np.floating]) -> float:
    """log(sum(exp(scores))), in float64."""
    largest = max(float(score) for score in scores)
    return largest + math.log(math.fsum(math.exp(float(score) - largest) for score in scores))


def top_k(scores: NDArray[np.floating], k: int) -> list[int]:
    """Ids of the `k` highest scores, highest first, equal ones by id."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
