"""What of this machine can run models, and why the rest cannot."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.backends.int8_support import int8_products_are_exact
from edgellm.backends.providers import ProviderStatus, statuses
from edgellm.kernels.gpu import device
from edgellm.kernels.native import isa


@dataclass(frozen=True)
class Devices:
    """Everything that a model could run on.

    Attributes:
        providers: ONNX Runtime's execution providers, usable or not.
        gpu: the device of the Triton kernels; empty without one, and then `gpu_reason` says why.
        native: the instruction set of the C++ kernels; None if they were not built.
        exact_int8: whether the CPU multiplies int8 in graphs without saturating; where it does not,
            `prefill` cpu is float32.
    """

    providers: tuple[ProviderStatus, ...]
    gpu: str
    gpu_reason: str
    native: str | None
    exact_int8: bool


def native_isa() -> str | None:
    """The instruction set of the C++ kernels, or None if they were not built."""
    return isa()


def devices() -> Devices:
    """Try all of them: each provider that is installed runs a small graph (a second or two)."""
    providers, reason = tuple(statuses()), device.why_not()
    return Devices(
        providers=providers,
        gpu=device.device_name() if reason is None else "",
        gpu_reason=reason or "",
        native=isa(),
        exact_int8=int8_products_are_exact(),
    )
