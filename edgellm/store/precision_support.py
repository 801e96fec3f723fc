"""Which models a precision can be exported for; the runtime asks as well, which has no exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from edgellm.errors import UnsupportedModelError
from edgellm.graphs.config import ModelConfig

# Those around a rotated residual stream (see `export/rotated.py`).
ROTATED = ("w8a8", "w8a16-qdq", "w8a8-qdq")
# Those with static scales, found without a sequence's first tokens, which are the host's.
STATIC = ("w8a16-qdq", "w8a8-qdq")
# Names, or a function of a config that returns those that suit it.
Precisions = Iterable[str] | Callable[[ModelConfig], Iterable[str]]


def names_of(precisions: Precisions, config: ModelConfig) -> list[str]:
    """The precisions for a model, each once, in the order of the alphabet."""
    return sorted(set(precisions(config) if callable(precisions) else precisions))


def why_not(precision: str, config: ModelConfig) -> str | None:
    """What of a model a precision cannot compute; None where it can compute all."""
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
        among: what else there is; the error names those that can.

    Raises:
        UnsupportedModelError: it cannot.
    """
    if why_not(precision, config) is not None:
        raise _refusal(precision, config, among)


def first_supported(precisions: Sequence[str], config: ModelConfig) -> str:
    """The first precision that can compute a model.

    Raises:
        UnsupportedModelError: none can.
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
