"""KV blocks outside a pool, on disk or in another process, named by their content.

A full block never changes, so its name identifies it: a hash of the model, the KV format, the
arithmetic and all tokens up to the end of the block (see `prefix_index.py`), and of the cache
group's number except for the first group. Blocks of the same name have the same bits.

Blocks that may be damaged or mixed up on their way are enclosed:

    16 bytes   magic and version
    32 bytes   SHA-256 of all bytes after it
    32 bytes   the block's name, so that a block under a wrong name is refused
    the rest   the block's K, V and scales as in memory
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from edgellm.cache.groups import Blocks
from edgellm.kernels.kv_blocks import BLOCK

MAGIC = b"edgellm kv 1".ljust(16, b"\0")
_DIGEST = 32
_HEADER = len(MAGIC) + 2 * _DIGEST


class BlockStore(Protocol):
    """A store of KV blocks as bytes by name.

    A block that is not pinned may vanish at any time; a missing block is computed again.
    """

    def has(self, name: bytes) -> bool: ...

    def read(self, name: bytes, *, size: int) -> memoryview | None:
        """Read a block of `size` bytes; None if it is missing, damaged or another one.

        The store drops a block that is damaged or another one.
        """
        ...

    def write(self, name: bytes, data: bytes) -> bool:
        """Store a block; False if there is no room, which is no error."""
        ...

    def pin(self, names: Iterable[bytes]) -> AbstractContextManager[None]:
        """Keep these blocks, within the context, from being dropped to make room for others."""
        ...


def enclosed(name: bytes, data: bytes) -> bytes:
    """Enclose a block: put before it the magic, digest and name that `opened` checks."""
    digest = hashlib.sha256(name)
    digest.update(data)
    return b"".join((MAGIC, digest.digest(), name, data))


def opened(name: bytes, data: bytes | memoryview, *, size: int) -> memoryview | None:
    """Return the K, V and scales of an enclosed block; None if name, size or digest differ."""
    view = memoryview(data)
    if len(view) != _HEADER + size or view[: len(MAGIC)] != MAGIC:
        return None
    body = view[len(MAGIC) + _DIGEST :]
    if body[:_DIGEST] != name or hashlib.sha256(body).digest() != view[len(MAGIC) :][:_DIGEST]:
        return None
    return body[_DIGEST:]


def pack(blocks: Blocks, ids: Iterable[int], *, tokens: int | None = None) -> bytes:
    """Pack blocks as bytes, one after the other.

    Args:
        ids: ids of the blocks.
        tokens: number of rows of all blocks together to pack; later rows, which may be of a
            sequence that had the last block before, are written as zeros. None: all rows.
    """
    parts, left = [], math.inf if tokens is None else tokens
    for block in ids:
        arrays = blocks.first_rows(block, int(left)) if left < BLOCK else blocks.block(block)
        parts += [array.tobytes() for array in arrays]
        left -= BLOCK
    return b"".join(parts)


def packed_size(blocks: Blocks) -> int:
    """Return the size in bytes of one packed block."""
    return sum(array[0].nbytes for array in blocks.arrays)


def unpack(blocks: Blocks, ids: Iterable[int], data: memoryview | bytes) -> bool:
    """Write packed bytes into blocks; False, with nothing written, if the size does not fit."""
    ids, view = list(ids), memoryview(data)
    if len(view) != len(ids) * packed_size(blocks):
        return False
    for block in ids:
        for array in blocks.arrays:
            target = array[block]
            target[...] = np.frombuffer(view[: target.nbytes], target.dtype).reshape(target.shape)
            view = view[target.nbytes :]
    return True
