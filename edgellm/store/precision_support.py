"""Support of models by precisions; the runtime, which has no exporter, asks here as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from edgellm.errors import UnsupportedModelError
from edgellm.graphs.config import ModelConfig

# Precisions around a rotated residual stream (see `export/rotated.py`).
ROTATED = ("w8a8", "w8a16-qdq", "w8a8-qdq")
# Precisions with static scales, calibrated without a sequence's first tokens: the host has those.
STATIC = ("w8a16-qdq", "w8a8-qdq")
# Precision names, or a function that returns the names suiting a model's config.
Precisions = Iterable[str] | Callable[[ModelConfig], Iterable[str]]


def names_of(precisions: Precisions, config: ModelConfig) -> list[str]:
    """Return the names of the precisions for a model, each once, in alphabetical order."""
    return sorted(set(precisions(config) if callable(precisions) else precisions))


def why_not(precision: str, config: ModelConfig) -> str | None:
    """Return why a precision cannot compute a model, as text for an error; None if it can."""
    if precision not in ROTATED:
        return None
    if config.norm == "layer":
        return "its layer norms take a mean from the residual, which does not commute with rotating"
    if any(layer.norms != "pre" for layer in config.layers):
        return (
            "it normalizes what attention and MLP add to the residual, with weights that do not "
            "commute with rotating"
        )
    return None


def require(precision: str, config: ModelConfig, *, among: Sequence[str]) -> None:
    """Refuse a precision that cannot compute a model.

    Args:
        among: all available precisions; the error names those that can compute the model.

    Raises:
        UnsupportedModelError: the precision cannot compute the model.
    """
    if why_not(precision, config) is not None:
        raise _refusal(precision, config, among)


def first_supported(precisions: Sequence[str], config: ModelConfig) -> str:
    """Return the first precision that can compute a model.

    Raises:
        UnsupportedModelError: no precision can.
    """
    usable = (precision for precision in precisions if why_not(precision, config) is None)
    precision = next(usable, None)
    if precision is None:
        raise _refusal(precisions[0], config, precisions)
    return precision


def _refusal(precision: str, config: ModelConfig, among: Sequence[str]) -> UnsupportedModelError:
    others = [other for other in among if why_not(other, config) is None]
    advice = " or ".join(others) or "another `prefill`: native, cpu, openvino"
    return UnsupportedModelError(
        f"precision {precision} rotates the residual, which {config.model_type} does not bear: "
        f"{why_not(precision, config)}; take {advice}"
    )
