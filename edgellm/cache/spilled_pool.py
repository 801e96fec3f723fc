"""Pools of sealed blocks in a file that is mapped, in place of memory.

A sealed block is written once and then only read. So where memory is short the system writes its
pages to the file, and reads them back where attention comes to them. The file has no name: it ends
with the process, and no other one can open it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import OptionError
from edgellm.kernels.kv_blocks import SealedBlocks

_IN_MEMORY = ("tmpfs", "ramfs")


def spilled_pool(one: SealedBlocks, *, blocks: int, folder: Path) -> SealedBlocks:
    """Allocate a pool in a file of a folder, which takes its room on the disk at once.

    Args:
        one: pool of the same kind, of one block.

    Raises:
        OptionError: the folder cannot be written, is in memory or lacks the room, or the system
            reserves none for files.
    """
    memory, begin = _mapped_file(folder, blocks * one.nbytes), 0
    arrays: list[NDArray[Any]] = []
    for like in one.arrays:
        end = begin + blocks * like.nbytes
        arrays.append(memory[begin:end].view(like.dtype).reshape(blocks, *like.shape[1:]))
        begin = end
    return SealedBlocks(*arrays)


def _mapped_file(folder: Path, size: int) -> NDArray[np.uint8]:
    """Map a new file without a name.

    Raises:
        OptionError: see `spilled_pool`.
    """
    if not hasattr(os, "posix_fallocate"):
        raise OptionError(
            f"`kv_spill` is {str(folder)!r}, and Python reserves no room for files on "
            f"{sys.platform}; leave it out"
        )
    advice = f"name a folder that can be written, on a disk with {size} bytes free"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if _in_memory(os.fstat(file.fileno()).st_dev):
                raise OptionError(f"`kv_spill` {folder} is in memory itself; {advice}")
            free = shutil.disk_usage(folder).free
            if size > free:  # a disk that others use is not filled to find out
                raise OptionError(
                    f"`kv_spill` {folder}: {size} bytes are needed, and {free} are free; {advice}, "
                    "or choose a smaller `ctx_size` or `cache_size`"
                )
            os.posix_fallocate(file.fileno(), 0, size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    except OSError as error:
        raise OptionError(f"`kv_spill` {folder}: {error.strerror}; {advice}") from None


def _in_memory(device: int) -> bool:
    """Whether a file system keeps its files in memory, as far as the system tells (Linux)."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.split()[0] in _IN_MEMORY
    return False
