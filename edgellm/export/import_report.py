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

    def took(self, name: str, storage: str, kind: str, *, error: float | None = None) -> None:
        """Note a tensor that was written.

        Args:
            storage: how the file held it.
            kind: how it was written.
            error: relative, if it was rounded.
        """
        if error is None:
            self.exact += 1
        else:
            self.requantized[name] = error

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
