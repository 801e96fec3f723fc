"""Reader of a checkpoint's weights for a precision: as they are, or rounded and reported."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.tensor import Tensor
from edgellm.kernels.quantized import KINDS, QuantizedWeight, dequantize, row_slices
from edgellm.quantize.error import relative_error
from edgellm.quantize.weights import quantize_groups, quantize_int4, quantize_levels


@dataclass
class ImportReport:
    """The fate of each matrix of the file; norms and biases, always exact, are left out.

    Attributes:
        exact: number of matrices taken over with every value as it is.
        requantized: relative error of every matrix that was rounded again, by its name.
        file_bytes, decode_bytes: bytes of matrices that a decode step of one token reads, in the
            file and in packed weights; 0 if not known.
        taken: number of matrices by the file's type and the kind written: `[type, kind]`.
    """

    exact: int = 0
    requantized: dict[str, float] = field(default_factory=dict)
    file_bytes: int = 0
    decode_bytes: int = 0
    taken: Counter[tuple[str, str]] = field(default_factory=Counter)

    def took(self, name: str, storage: str, kind: str, error: float | None = None) -> None:
        """Note a matrix that was written.

        Args:
            storage: type of the matrix in the file, e.g. `Q4_1`.
            kind: kind in which it is written, e.g. `int4`.
            error: relative error of rounding; None or 0 if every value is as in the file.
        """
        self.taken[storage, kind] += 1
        if error:
            self.requantized[name] = error
        else:
            self.exact += 1

    def to_json(self) -> dict[str, Any]:
        """Return the report as the JSON values that `ImportSummary` reads."""
        errors = self.requantized
        worst = max(errors, key=errors.__getitem__) if errors else None
        taken: dict[str, dict[str, int]] = {}
        for (storage, kind), count in sorted(self.taken.items()):
            taken.setdefault(storage, {})[kind] = count
        return {
            "exact_tensors": self.exact,
            "requantized_tensors": len(errors),
            "mean_relative_error": sum(errors.values()) / len(errors) if errors else 0.0,
            "worst_tensor": worst,
            "worst_relative_error": errors[worst] if worst else 0.0,
            "file_bytes": self.file_bytes,
            "decode_bytes": self.decode_bytes,
            "taken": taken,
        }


# Roundings of float weights. `auto` is int8, which costs 0.5 % of a weight; int4 costs 8 %.
FLOAT_WEIGHTS = ("auto", "int8", "int4")
# Codebook types whose groups of 32 are a scale times a few integers (ggml-common.h of llama.cpp).
_LEVELS = {
    "IQ1_S": (1, 7, 9),
    "IQ2_XXS": (8, 25, 43),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}
_FLOAT_STORAGE = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class WeightReader:
    """Reader of tensors as quantized weights, which notes each in the import report.

    Attributes:
        weights: rounding of float weights of linear layers, one of FLOAT_WEIGHTS. Quantized tensors
            that no kind holds become int8.
        report: exact and rounded matrices so far.
    """

    checkpoint: Checkpoint
    weights: str = "auto"
    report: ImportReport = field(default_factory=ImportReport)

    def linear(self, name: str) -> QuantizedWeight:
        """Read a linear layer's weight, in any quantized kind."""
        tensor = self.checkpoint.tensor(name)
        if tensor.quantized is not None:
            return self._taken(name, tensor, tensor.quantized())
        if self.weights == "int4" and tensor.storage in _FLOAT_STORAGE:
            exact = tensor.float32()
            return self._rounded(name, tensor, exact, quantize_int4(exact))
        return self._int8(name, tensor)

    def table(self, name: str) -> QuantizedWeight:
        """Read the embedding or the LM head, in any kind; float ones become int8."""
        tensor = self.checkpoint.tensor(name)
        if tensor.quantized is not None:
            return self._taken(name, tensor, tensor.quantized())
        return self._int8(name, tensor)

    def symmetric_table(self, name: str) -> QuantizedWeight:
        """Read the embedding or the LM head, in a kind without offsets."""
        tensor = self.checkpoint.tensor(name)
        weight = None if tensor.quantized is None else tensor.quantized()
        if weight is not None and not weight.kind.affine:
            return self._taken(name, tensor, weight)
        return self._int8(name, tensor)

    def int4(self, name: str) -> QuantizedWeight:
        """Read a linear layer's weight in int4 groups of 32, whatever the file's type."""
        tensor = self.checkpoint.tensor(name)
        weight = None if tensor.quantized is None else tensor.quantized()
        if weight is not None and weight.kind.name in ("int4_symmetric", "int4_affine"):
            return self._taken(name, tensor, weight)
        exact = tensor.float32()
        if weight is not None and weight.kind.name == "int4_k":
            return self._rounded(name, tensor, exact, as_int4_affine(weight))
        return self._rounded(name, tensor, exact, quantize_int4(exact))

    def _int8(self, name: str, tensor: Tensor) -> QuantizedWeight:
        exact, levels = tensor.float32(), _LEVELS.get(tensor.storage)
        weight = quantize_groups(exact) if levels is None else quantize_levels(exact, levels)
        return self._rounded(name, tensor, exact, weight)

    def _taken(self, name: str, tensor: Tensor, weight: QuantizedWeight) -> QuantizedWeight:
        self.report.took(name, tensor.storage, weight.kind.name)
        return weight

    def _rounded(
        self, name: str, tensor: Tensor, exact: NDArray[np.float32], weight: QuantizedWeight
    ) -> QuantizedWeight:
        error = _relative_error(exact, weight)
        self.report.took(name, tensor.storage, weight.kind.name, error)
        return weight


def _relative_error(exact: NDArray[np.float32], weight: QuantizedWeight) -> float:
    """Return the error of a whole weight; some rows at a time are in memory once more."""
    squares, total = 0.0, 0.0
    for rows in row_slices(*weight.shape):
        norm = float(np.linalg.norm(exact[rows]))
        squares += (relative_error(exact[rows], dequantize(weight.rows(rows))) * norm) ** 2
        total += norm**2
    return math.sqrt(squares / total) if total else 0.0


def as_int4_affine(weight: QuantizedWeight) -> QuantizedWeight:
    """Convert a 4-bit weight to int4_affine: the same codes, float16 scales and offsets.

    Scales and offsets of a blocked weight are rounded, by at most 2^-11 of their value.
    """
    scale = weight.scales()
    offset = weight.offsets() - np.float32(weight.kind.zero) * scale
    halves = scale.astype(np.float16), offset.astype(np.float16)
    return QuantizedWeight(KINDS["int4_affine"], weight.codes, *halves)
