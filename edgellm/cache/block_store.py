"""KV blocks outside a pool, each under the name of its content: on disk, or with another process.

A full block never changes, so its name says all: the hash of the model, the KV format, the
arithmetic and all tokens up to the end of the block (see `prefix_index.py`), and of the group's
number where it is not the first. Whoever has the same name has the same bits.

Where blocks pass through hands that may damage or mistake them, they are sealed:

    16 bytes   magic and version
    32 bytes   SHA-256 of everything behind it
    32 bytes   the block's name, so that what lies under a wrong name is not taken for another block
    the rest   the block's K, V and scales as they lie in memory
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from edgellm.kernels.kv_blocks import BLOCK, KVBlocks

MAGIC = b"edgellm kv 1".ljust(16, b"\0")
_DIGEST = 32
_HEADER = len(MAGIC) + 2 * _DIGEST


class BlockStore(Protocol):
    """Blocks as bytes by name.

    A block that is not pinned may be gone at any time: what is not there is computed again.
    """

    def has(self, name: bytes) -> bool: ...

    def read(self, name: bytes, *, size: int) -> memoryview | None:
        """A block of so many bytes; None if it is not there, damaged or another one's. Then the
        store does not have it any more."""
        ...

    def write(self, name: bytes, data: bytes) -> bool:
        """Take a block in; False if there is no room, which is no error."""
        ...

    def pin(self, names: Iterable[bytes]) -> AbstractContextManager[None]:
        """Within it, none of these blocks is dropped to make room for others."""
        ...


def sealed(name: bytes, data: bytes) -> bytes:
    """A block with what `opened` checks it by."""
    digest = hashlib.sha256(name)
    digest.update(data)
    return b"".join((MAGIC, digest.digest(), name, data))


def opened(name: bytes, data: bytes | memoryview, *, size: int) -> memoryview | None:
    """The block of this name and size that `sealed` made, or None."""
    view = memoryview(data)
    if len(view) != _HEADER + size or view[: len(MAGIC)] != MAGIC:
        return None
    body = view[len(MAGIC) + _DIGEST :]
    if body[:_DIGEST] != name or hashlib.sha256(body).digest() != view[len(MAGIC) :][:_DIGEST]:
        return None
    return body[_DIGEST:]


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


def packed_size(blocks: KVBlocks) -> int:
    """Bytes of one block."""
    return sum(array[0].nbytes for array in blocks.arrays)


def unpack(blocks: KVBlocks, ids: Iterable[int], data: memoryview | bytes) -> bool:
    """The way back; False if the size does not fit, and then nothing was written."""
    ids, view = list(ids), memoryview(data)
    if len(view) != len(ids) * packed_size(blocks):
        return False
    for block in ids:
        for array in blocks.arrays:
            target = array[block]
            target[...] = np.frombuffer(view[: target.nbytes], target.dtype).reshape(target.shape)
            view = view[target.nbytes :]
    return True
