"""Folders for `kv_spill`, and memory that the system has taken back."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from edgellm import OptionError
from edgellm.cache.spilled_pool import spilled_pool
from edgellm.kernels.kv_blocks import SealedBlocks
from edgellm.kernels.sealed_blocks import allocate_sealed

needs_spill = pytest.mark.skipif(sys.platform != "linux", reason="kv_spill is tested on Linux")


def on_disk(folder: Path) -> Path:
    """The folder; skips the test where it is in memory."""
    one = allocate_sealed(format="k8v4", blocks=1, layers=1, kv_heads=1, head_dim=8)
    try:
        spilled_pool(one, blocks=1, folder=folder)
    except OptionError as error:
        pytest.skip(str(error))
    return folder


def mapping(pool: SealedBlocks) -> mmap.mmap:
    """The map that the arrays of a pool lie in."""
    base: object = pool.k
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, memoryview)
    assert isinstance(base.obj, mmap.mmap)
    return base.obj


def resident(pool: SealedBlocks) -> int:
    """Pages of a pool's file that are in memory, of this process or as the system's copy."""
    size = len(mapping(pool))
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    address = ctypes.c_void_p(pool.k.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages)


def take_back(pool: SealedBlocks) -> None:
    """Write all of a pool to its file, and leave nothing of it in memory."""
    mapped = mapping(pool)
    mapped.flush()
    mapped.madvise(mmap.MADV_DONTNEED)
    for name in os.listdir("/proc/self/fd"):
        if is_of(int(name), len(mapped)):
            os.posix_fadvise(int(name), 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident(pool) == 0


def is_of(number: int, size: int) -> bool:
    """Whether a descriptor is of a file without a name that has this size."""
    try:
        file = os.fstat(number)
    except OSError:
        return False
    return file.st_nlink == 0 and file.st_size == size
