"""Allocation of a cache group's KV blocks. Pure Python."""

from __future__ import annotations

from collections import OrderedDict

from edgellm.cache.prefix_index import PrefixIndex
from edgellm.errors import CacheFullError
from edgellm.kernels.kv_blocks import BLOCK


class BlockPool:
    """Reference counts of one cache group's blocks.

    Of blocks that no sequence holds, those in the prefix index are reused last, in the order of
    `PrefixIndex.expendable`.

    Attributes:
        resident: number of blocks that get memory before a cached block is reused; further blocks
            get memory only while sequences hold all of these.
    """

    def __init__(
        self, blocks: int, index: PrefixIndex, *, group: int = 0, resident: int | None = None
    ) -> None:
        self._index = index
        self._group = group
        self.resident = blocks if resident is None else min(blocks, resident)
        self._references = [0] * blocks
        self._touched = 0
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Number of blocks that sequences hold; cached blocks without a sequence do not count."""
        return self._touched - len(self._free) - len(self._idle)

    @property
    def touched(self) -> int:
        """Number of blocks that have memory."""
        return self._touched

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` can return."""
        return len(self._references) - self.used

    def __contains__(self, block: int) -> bool:
        """Whether a block is cached and no sequence holds it, so that `allocate` may reuse it."""
        return block in self._idle

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int:
        """Reserve a block to write to, with one reference.

        Raises:
            CacheFullError: sequences hold every block.
        """
        block = self._next()
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        self._idle.pop(block, None)
        self._references[block] += 1

    def release(self, block: int, *, first: bool = False) -> None:
        """Give back a reference.

        Args:
            first: whether the block is reused before other cached ones.
        """
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._index.holds(self._group, block):
            self._idle[block] = None
            self._idle.move_to_end(block, last=not first)
        else:
            self._free.append(block)

    def _next(self) -> int:
        if self._free:
            return self._free.pop()
        left = len(self._references) - self._touched
        if left and (self._touched < self.resident or not self._idle):
            self._touched += 1
            return self._touched - 1
        if self._idle:
            block = self._index.expendable(self._group, self._idle)
            del self._idle[block]
            self._index.remove(self._group, block)
            return block
        raise self._full()

    def require(self, count: int) -> None:
        """Check that `allocate` can return `count` blocks.

        Raises:
            CacheFullError: it cannot.
        """
        if self.available < count:
            raise self._full()

    def _full(self) -> CacheFullError:
        return CacheFullError(
            f"all {len(self._references)} blocks of {BLOCK} tokens are held by answers on their "
            "way and sessions that cannot be computed again; run fewer answers at once, close "
            "sessions, or load the model with a larger `cache_size` (tokens of all together)"
        )
