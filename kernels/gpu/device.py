"""The device for Triton kernels, or the reason why there is none. Imports torch and triton late."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ProviderError

if TYPE_CHECKING:
    import torch

# Oldest compute capability (Ampere) that kernels are compiled and checked for. Tensor cores take
# halves from Turing on.
OLDEST = (8, 0)


def interpreted() -> bool:
    """Whether Triton interprets kernels in numpy on the CPU, for tests (its own switch)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not() -> str | None:
    """Return the reason why Triton kernels cannot run here, or None. Does not import torch."""
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed; pip install {' '.join(missing)}"
    if interpreted():
        return None
    if not _torch_has_cuda():
        return "this torch was built without CUDA; install one with it"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1 does not load)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no device"
    capability = _capability(driver)
    if capability < OLDEST:
        return (
            f"the device has compute capability {capability[0]}.{capability[1]}; "
            f"{OLDEST[0]}.{OLDEST[1]} or newer is needed"
        )
    return _no_compiler()


def require() -> str:
    """Return the torch device for Triton kernels.

    Raises:
        ProviderError: there is no device; the message says why.
    """
    reason = why_not()
    if reason is not None:
        raise ProviderError(f"triton: {reason}")
    if interpreted():
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise ProviderError(
            "triton: torch finds no device; it was built without CUDA or for another driver"
        )
    return "cuda"


def device_name() -> str:
    """Return the name of the device that kernels run on."""
    if interpreted():
        return "this CPU, interpreted: for tests, not for speed"
    import torch

    return str(torch.cuda.get_device_name())


def free_bytes(device: str) -> int | None:
    """Return the free memory of the device; None for the interpreter, which uses the host's."""
    if device == "cpu":
        return None
    import torch

    return int(torch.cuda.mem_get_info()[0])


def too_large(device: str, needed: Mapping[str, int]) -> str | None:
    """Return why parts do not fit on the device, with the numbers; None: they do.

    Args:
        needed: bytes of each part, by its name.
    """
    free = free_bytes(device)
    if free is None or sum(needed.values()) <= free:
        return None
    parts = " and ".join(f"{name} {count >> 20} MiB" for name, count in needed.items())
    return f"the device has {free >> 20} MiB free; {parts} are needed"


def on_device(array: NDArray[Any], device: str) -> torch.Tensor:
    """Copy an array to device memory."""
    import torch

    return torch.from_numpy(np.array(array)).to(device)


def aligned(count: int) -> int:
    """Round a number up to a power of two, as the sides of tiles are."""
    return 1 << (count - 1).bit_length()


def _torch_has_cuda() -> bool:
    """Whether torch names a CUDA version in its `version.py`; importing it would take seconds."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    if version is None or not version.exists():
        return True
    return not re.search(r"^cuda\b.*= None$", version.read_text(), re.MULTILINE)


def _no_compiler() -> str | None:
    """Return what Triton lacks to build its launchers in C, as it does at the first launch."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        return "Triton needs a C compiler at run time; install gcc or clang, or set CC to one"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    if not (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").exists():
        return "Triton needs Python.h at run time; install the headers of this Python"
    return None


def _capability(driver: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, 0)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0)
    return major.value, minor.value
