"""Which models a flavour can be exported for; the runtime asks as well, which has no exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from edgellm.errors import UnsupportedModelError
from edgellm.graphs.config import ModelConfig

# Those around a rotated residual stream (see `export/rotated.py`).
ROTATED = ("w8a8", "w8a16-qdq", "w8a8-qdq")
# Names, or what gives those that suit a model.
Flavours = Iterable[str] | Callable[[ModelConfig], Iterable[str]]


def names_of(flavours: Flavours, config: ModelConfig) -> list[str]:
    """Those for a model, each once, in the order of the alphabet."""
    return sorted(set(flavours(config) if callable(flavours) else flavours))


def why_not(flavour: str, config: ModelConfig) -> str | None:
    """What of a model a flavour cannot compute; None where it can compute all."""
    if flavour not in ROTATED:
        return None
    if config.norm == "layer":
        return "its layer norms take a mean from the residual, which does not commute with rotating"
    if any(layer.norms != "pre" for layer in config.layers):
        return (
            "it normalizes what attention and MLP add to the residual, with weights that do not "
            "commute with rotating"
        )
    return None


def require(flavour: str, config: ModelConfig, *, among: Sequence[str]) -> None:
    """Refuse a flavour that cannot compute a model.

    Args:
        among: what else there is; the error names those that can.

    Raises:
        UnsupportedModelError: it cannot.
    """
    if why_not(flavour, config) is not None:
        raise _refusal(flavour, config, among)


def first_supported(flavours: Sequence[str], config: ModelConfig) -> str:
    """The first one that can compute a model.

    Raises:
        UnsupportedModelError: none can.
    """
    usable = (flavour for flavour in flavours if why_not(flavour, config) is None)
    flavour = next(usable, None)
    if flavour is None:
        raise _refusal(flavours[0], config, flavours)
    return flavour


def _refusal(flavour: str, config: ModelConfig, among: Sequence[str]) -> UnsupportedModelError:
    others = [other for other in among if why_not(other, config) is None]
    advice = " or ".join(others) or "another `prefill`: native, cpu, openvino"
    return UnsupportedModelError(
        f"flavour {flavour} rotates the residual, which {config.model_type} does not bear: "
        f"{why_not(flavour, config)}; take {advice}"
    )
