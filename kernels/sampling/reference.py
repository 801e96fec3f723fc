"""Reference of sampling's passes over the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def log_sum_exp(scores: NDArray[np.floating]) -> float:
    """Return log(sum(exp(scores))), in float64."""
    largest = max(float(score) for score in scores)
    return largest + math.log(math.fsum(math.exp(float(score) - largest) for score in scores))


def top_k(scores: NDArray[np.floating], k: int) -> list[int]:
    """Return the ids of the `k` highest scores, highest first, equal scores by id."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def candidates(
    logits: NDArray[np.floating], wanted: Sequence[int]
) -> list[tuple[float, list[int]]]:
    """Return the log-sum-exp of each row, and the ids of its `wanted` best scores, ascending.

    A row with a score of NaN or infinity, or with all scores -infinity, has no ids.
    """
    results = []
    for row, k in zip(logits, wanted, strict=True):
        if all(score < math.inf for score in row) and max(row) > -math.inf:
            results.append((log_sum_exp(row), sorted(top_k(row, k))))
        else:
            results.append((math.nan, []))
    return results
