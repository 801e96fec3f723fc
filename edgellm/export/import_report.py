"""How the tensors of a flavour were obtained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ImportReport:
    """Filled while a flavour is exported.

    Attributes:
        exact: tensors taken over bit by bit.
        requantized: relative error of every tensor that was quantized again, by its name.
    """

    exact: int = 0
    requantized: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        errors = self.requantized
        worst = max(errors, key=errors.__getitem__) if errors else None
        return {
            "exact_tensors": self.exact,
            "requantized_tensors": len(errors),
            "mean_relative_error": sum(errors.values()) / len(errors) if errors else 0.0,
            "worst_tensor": worst,
            "worst_relative_error": errors[worst] if worst else 0.0,
        }
