"""Writing files and folders so that they outlast a loss of power.

A rename may reach the disk before the content of the file, which is then empty or cut short after
the next start. So contents are synced first, then the name is changed, then the folder that
has the name is synced.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux
_RENAME_SWAP = 2  # macOS


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    # Windows syncs no file that is open for reading alone
    file = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        _sync(file)
    finally:
        os.close(file)


def sync_folder(path: Path) -> None:
    """Wait until the file names in a folder are on the disk; Windows cannot, so no wait there."""
    if os.name == "nt":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        # some network file systems sync no folders
        with contextlib.suppress(OSError):
            _sync(folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and wait until their names are on the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and all files and folders below it are on the disk."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync_file(Path(parent, name))
        sync_folder(Path(parent))


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False, with nothing done, where the system cannot."""
    if os.name != "posix":
        return False
    library = ctypes.CDLL(None)
    first, second = os.fsencode(one), os.fsencode(other)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        at = _AT_FDCWD
        return int(library.renameat2(at, first, at, second, _RENAME_EXCHANGE)) == 0
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        return int(library.renamex_np(first, second, _RENAME_SWAP)) == 0
    return False


def _sync(descriptor: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        # fsync on macOS leaves the data in the disk's own cache
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)
