"""KV blocks on disk: a prefix that was computed once is not computed again after a restart.

A file holds one full block of one cache group, which never changes, and is called by the block's
name: the hash of the model, the KV format and all tokens up to the end of the block (see
`prefix_index.py`), and of the group's number where it is not the first.

    16 bytes   magic and version
    32 bytes   SHA-256 of everything behind it
    32 bytes   the block's name, so that a file under a wrong name is not taken for another block
    the rest   the block's K, V and scales as they lie in memory

Files appear whole, by renaming, and may vanish at any time: processes share a folder without locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from edgellm.errors import OptionError
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks
from edgellm.store.home import delete_abandoned, replacing_file

MAGIC = b"edgellm kv 1".ljust(16, b"\0")
_DIGEST = 32
_SUFFIX = ".kv"

_log = logging.getLogger(__name__)


class DiskCache:
    """Blocks in a folder, at most `budget` bytes of them, the last used are kept.

    Raises:
        OptionError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, budget: int) -> None:
        self._folder = folder
        self._budget = budget
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"`kv_cache_dir` {folder}: {error.strerror}") from None
        delete_abandoned(folder)

    def holds(self, name: bytes) -> bool:
        return os.path.exists(self._path(name))  # Path.exists raises where it may not look

    def load(self, blocks: KVBlocks, name: bytes, block: int) -> bool:
        """Read a block into a pool; False if it is not there, damaged or another one's.

        A damaged file is deleted.
        """
        path = self._path(name)
        try:
            # not mapped: a map of a file that someone else cuts short would kill the process
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return False
        body = memoryview(data)[len(MAGIC) + _DIGEST :]
        whole = data.startswith(MAGIC) and _digest(body) == data[len(MAGIC) :][:_DIGEST]
        if not (whole and body[:_DIGEST] == name and unpack(blocks, [block], body[_DIGEST:])):
            _log.warning("%s is damaged or another model's; deleted", path)
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        return True

    def save(self, blocks: KVBlocks, kept: Iterable[tuple[bytes, int]]) -> None:
        """Write those of some blocks that are not there yet, given as name and number in the pool.

        A full or read-only disk is no error: what could not be written is computed again. A folder
        that was taken away is made again.
        """
        written = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, block in kept:
                if self.holds(name):
                    continue
                body = name + pack(blocks, [block])
                with replacing_file(self._path(name), private=True) as partial:
                    partial.write_bytes(MAGIC + _digest(body) + body)
                written = True
        except OSError as error:
            _log.warning("kv_cache_dir %s: %s; not all was kept", self._folder, error.strerror)
        if written:
            self._make_room()

    def _path(self, name: bytes) -> Path:
        return self._folder / (name.hex() + _SUFFIX)

    def _make_room(self) -> None:
        """Delete the files that were not used for longest, until the budget holds."""
        files = sorted(self._files(), key=lambda file: file[1])
        total = sum(size for _, _, size in files)
        for path, _, size in files:
            if total <= self._budget:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def _files(self) -> Iterator[tuple[Path, float, int]]:
        """Path, time of last use and size."""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                yield path, status.st_mtime, status.st_size


def pack(blocks: KVBlocks, ids: Iterable[int], *, tokens: int | None = None) -> bytes:
    """Blocks as bytes, one after the other.

    Args:
        tokens: only the first so many rows of all; the others, which may be of a sequence that had
            the last block before, are written as zeros.
    """
    parts, left = [], math.inf if tokens is None else tokens
    for block in ids:
        arrays = blocks.first_rows(block, int(left)) if left < BLOCK else blocks.block(block)
        parts += [array.tobytes() for array in arrays]
        left -= BLOCK
    return b"".join(parts)


def unpack(blocks: KVBlocks, ids: Iterable[int], data: memoryview | bytes) -> bool:
    """The way back; False if the size does not fit, and then nothing was written."""
    ids, view = list(ids), memoryview(data)
    if len(view) != sum(array[block].nbytes for block in ids for array in blocks.arrays):
        return False
    for block in ids:
        for array in blocks.arrays:
            target = array[block]
            target[...] = np.frombuffer(view[: target.nbytes], target.dtype).reshape(target.shape)
            view = view[target.nbytes :]
    return True


def _digest(data: memoryview | bytes) -> bytes:
    return hashlib.sha256(data).digest()
