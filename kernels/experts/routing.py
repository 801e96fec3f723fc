"""Rules by which a router chooses experts."""

from __future__ import annotations

from dataclasses import dataclass, fields

# Fields that the Triton kernels know.
_ON_GPU = ("experts", "used", "normalized", "scale")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Choice of experts for a row from the router's logits (Shazeer et al., arXiv:1701.06538).

    Attributes:
        experts: number of experts.
        used: number of experts that a row goes through: those with the best scores, which are the
            softmax of the logits.
        normalized: whether the scores of a row's chosen experts are divided by their sum.
        scale: factor of the sum of the experts' outputs.
    """

    experts: int
    used: int
    normalized: bool = True
    scale: float = 1.0


def not_on_gpu(routing: Routing) -> list[str]:
    """Return the names of the settings that the Triton kernels do not know, if they have effect."""
    others = (field for field in fields(routing) if field.name not in _ON_GPU)
    return [each.name for each in others if getattr(routing, each.name) != each.default]
