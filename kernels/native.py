"""The compiled kernels, where they were built: one shared library, called through ctypes."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgellm.errors import OptionError
from edgellm.kernels.kv_blocks import KVFormat

ISAS = ("avx512", "avx2", "base")
_NAME = "edgellm_cpu"


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where the package was installed without a compiler.

    Raises:
        OptionError: EDGELLM_CPU_ISA names an instruction set that is unknown or not there.
    """
    name = f"{_NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    path = Path(str(files("edgellm.kernels").joinpath(name)))
    if not path.exists():
        return None
    found = ctypes.CDLL(str(path))
    found.edgellm_isa.restype = ctypes.c_char_p
    found.edgellm_set_isa.argtypes = [ctypes.c_char_p]
    found.edgellm_attend.restype = None
    found.edgellm_append.restype = None
    wanted = os.environ.get("EDGELLM_CPU_ISA")
    if wanted and not found.edgellm_set_isa(wanted.encode()):
        raise OptionError(
            f"EDGELLM_CPU_ISA is {wanted!r}; known are {', '.join(ISAS)}, and the processor must "
            "have it"
        )
    return found


def isa() -> str | None:
    """The instruction set in use, or None without compiled kernels."""
    found = library()
    return None if found is None else str(found.edgellm_isa().decode())


def library_for(format: KVFormat) -> ctypes.CDLL | None:
    """The library, if it is there and its kernels know this format of the KV cache."""
    return library() if format in ("int8", "f32") else None


def fields(pointers: str, integers: str) -> list[tuple[str, type[Any]]]:
    """Fields of a call's structure: addresses first, then 32-bit integers."""
    return [
        *((name, ctypes.c_void_p) for name in pointers.split()),
        *((name, ctypes.c_int32) for name in integers.split()),
    ]


def address(array: NDArray[Any] | None) -> int | None:
    """Where an array's data lies; None is a null pointer."""
    return None if array is None else array.ctypes.data
