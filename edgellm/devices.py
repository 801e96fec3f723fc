"""Devices of this machine that can run models, and reasons why the others cannot."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgellm.backends.int8_support import int8_products_are_exact
from edgellm.backends.providers import ProviderStatus, statuses
from edgellm.kernels.gpu import device
from edgellm.kernels.native import isa

# Line of Qualcomm's library for x86 whenever it is loaded; it says that nothing was configured.
_NOISE = b"LIBNATIVE: No alternate configuration present"


@dataclass(frozen=True)
class Devices:
    """Execution providers and kernels that a model could run on.

    Attributes:
        providers: ONNX Runtime's execution providers, usable or not.
        gpu: name of the Triton kernels' device; empty without a device.
        gpu_reason: reason why the Triton kernels have no device; empty with one.
        native: instruction set of the C++ kernels; None if they were not built.
        exact_int8: whether the CPU multiplies int8 in graphs without saturating; where it does not,
            `prefill` cpu is float32.
    """

    providers: tuple[ProviderStatus, ...]
    gpu: str
    gpu_reason: str
    native: str | None
    exact_int8: bool


def native_isa() -> str | None:
    """Return the instruction set of the C++ kernels, or None if they were not built."""
    return isa()


def devices() -> Devices:
    """Try all devices: each provider that is installed runs a small graph (a second or two)."""
    with _without_noise():
        providers = tuple(statuses())
    reason = device.why_not()
    return Devices(
        providers=providers,
        gpu=device.device_name() if reason is None else "",
        gpu_reason=reason or "",
        native=isa(),
        exact_int8=int8_products_are_exact(),
    )


@contextmanager
def _without_noise() -> Iterator[None]:
    """Hold back what libraries print to stderr, and print it at the end without `_NOISE`."""
    try:
        saved = os.dup(2)
    except OSError:  # a process without a stderr
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            os.write(2, b"".join(line for line in held if _NOISE not in line))
