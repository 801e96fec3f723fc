"""KV blocks on disk, so that a cached prefix need not be computed again after a restart.

A file holds one full block of one cache group, sealed (see `block_store.py`), and has the block's
name. Files appear whole, by renaming, and may vanish at any time: processes share a folder
without locks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from edgellm.cache.block_store import opened, sealed
from edgellm.errors import OptionError
from edgellm.store.home import delete_abandoned, replacing_file

_SUFFIX = ".kv"
# The folder is listed again when the budget divided by this has been written, as other processes
# may have written as well.
_UNSEEN = 16

_log = logging.getLogger(__name__)


class DiskCache:
    """A block store in a folder, which keeps the last used blocks.

    Args:
        folder: the folder, made if it is missing.
        budget: maximum of bytes of all files in it.

    Raises:
        OptionError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, budget: int) -> None:
        self._folder = folder
        self._budget = budget
        self._pinned: Counter[bytes] = Counter()
        self._room = -1  # bytes that may be written before the folder is listed
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"`kv_cache_dir` {folder}: {error.strerror}") from None
        delete_abandoned(folder)

    def has(self, name: bytes) -> bool:
        return os.path.exists(self._path(name))  # Path.exists raises without permission

    def read(self, name: bytes, *, size: int) -> memoryview | None:
        """Read a block, see `BlockStore`; a damaged file is deleted."""
        path = self._path(name)
        try:
            # not mapped: a map of a file that another process cuts short would kill this one
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        block = opened(name, data, size=size)
        if block is None:
            _log.warning("%s is damaged or another model's; deleted", path)
            with contextlib.suppress(OSError):
                path.unlink()
        return block

    def write(self, name: bytes, data: bytes) -> bool:
        """Write a block, see `BlockStore`; False if the disk is full or read-only.

        A folder that was deleted is made again.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            block = sealed(name, data)
            # not lasting: a block that a loss of power cuts short is found damaged when read
            with replacing_file(self._path(name), private=True, lasting=False) as partial:
                partial.write_bytes(block)
        except OSError as error:
            _log.warning("kv_cache_dir %s: %s; not all was kept", self._folder, error.strerror)
            return False
        self._room -= len(block)
        if not self._pinned:
            self._make_room()
        return True

    @contextlib.contextmanager
    def pin(self, names: Iterable[bytes]) -> Iterator[None]:
        """Pin blocks, see `BlockStore`; other processes may delete them all the same.

        Blocks written within the context may exceed the budget until its end.
        """
        pinned = Counter(names)
        self._pinned += pinned
        try:
            yield
        finally:
            self._pinned -= pinned
            self._make_room()

    def _path(self, name: bytes) -> Path:
        return self._folder / (name.hex() + _SUFFIX)

    def _make_room(self) -> None:
        """Delete the least recently used files until the budget holds; pinned blocks stay."""
        if self._room >= 0:
            return
        files = sorted(self._files(), key=lambda file: file[1])
        total = sum(size for _, _, size in files)
        pinned = {self._path(name) for name in self._pinned}
        for path, _, size in files:
            if total <= self._budget:
                break
            if path in pinned:
                continue
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
        self._room = min(self._budget - total, self._budget // _UNSEEN)

    def _files(self) -> Iterator[tuple[Path, float, int]]:
        """Yield path, time of last use and size in bytes of each block's file."""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                yield path, status.st_mtime, status.st_size
