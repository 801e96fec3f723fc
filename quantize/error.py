"""Errors of quantized weights, or of results computed with them, against float."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def relative_error(exact: NDArray[np.float32], approximate: NDArray[np.float32]) -> float:
    """Return the root-mean-square error over the root-mean-square weight; 0 for an all-zero one."""
    norm = float(np.linalg.norm(exact))
    return float(np.linalg.norm(approximate - exact)) / norm if norm else 0.0


def worst_row_error(exact: NDArray[np.float32], approximate: NDArray[np.float32]) -> float:
    """Return the largest error of a row, over the size of that row or of an average row.

    The larger one of both sizes is taken. The result is infinite if a value is not a number. A few
    wrong rows of many hardly show in the error of the whole array.
    """
    worst = float(_row_errors(exact, approximate).max(initial=0.0))
    return worst if np.isfinite(worst) else float("inf")


def median_row_error(exact: NDArray[np.float32], approximate: NDArray[np.float32]) -> float:
    """Return the error of the median row, as `worst_row_error` has it of the worst one."""
    errors = _row_errors(exact, approximate)
    return float(np.median(errors)) if np.isfinite(errors).all() else float("inf")


def _row_errors(
    exact: NDArray[np.float32], approximate: NDArray[np.float32]
) -> NDArray[np.float64]:
    sizes = np.linalg.norm(exact.astype(np.float64), axis=-1)
    errors = np.linalg.norm(approximate.astype(np.float64) - exact, axis=-1)
    least = np.sqrt(np.square(sizes).mean()) or 1.0
    return np.asarray(errors / np.maximum(sizes, least))


def worst_line_error(exact: NDArray[np.float32], approximate: NDArray[np.float32]) -> float:
    """Return the larger one of the errors of the worst row and the worst column."""
    return max(worst_row_error(exact, approximate), worst_row_error(exact.T, approximate.T))
