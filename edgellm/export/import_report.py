"""Report on the weights of a precision, exact or rounded again, made while it is exported."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


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
