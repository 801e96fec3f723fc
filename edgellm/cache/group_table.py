"""A cache group's blocks, and a sequence's table of them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.groups import CacheGroup, Side
from edgellm.cache.prefix_index import PrefixIndex
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks

if TYPE_CHECKING:
    from edgellm.cache.replica import Replica  # imports torch


@dataclass
class GroupBlocks:
    """One group's part of the cache.

    Attributes:
        number: of the group.
        index: of the whole cache.
        replica: the same blocks in a device's memory, if some of the work is done there.
    """

    number: int
    group: CacheGroup
    blocks: KVBlocks
    pool: BlockPool
    index: PrefixIndex
    replica: Replica | None = None

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` tokens of a block, where they are up to date."""
        (self.replica or self.blocks).copy_rows(source, target, rows)


class GroupTable:
    """The blocks that a sequence holds in one group.

    Attributes:
        ids: block ids, first to last. Those before `first` lie before the window, are not held any
            more, and may be any block's.
    """

    def __init__(self, store: GroupBlocks, cached: SequenceOf[int | None] = ()) -> None:
        """Hold cached blocks; None stands for those before the window."""
        self.store = store
        self.ids = [0 if block is None else block for block in cached]
        self.first = sum(block is None for block in cached)
        for block in self.held:
            store.pool.retain(block)

    @property
    def held(self) -> list[int]:
        return self.ids[self.first :]

    def at(self, number: int) -> int | None:
        """The block of that number, if it is held."""
        return self.ids[number] if self.first <= number < len(self.ids) else None

    def lacks(self, length: int) -> bool:
        """Whether a sequence of `length` tokens needs blocks that were given back."""
        return self.first > self.store.group.first_block(length)

    def grow(self, end: int, allocate: Callable[[BlockPool], int]) -> None:
        """Hold blocks for positions up to `end`."""
        while len(self.ids) * BLOCK < end:
            self.ids.append(allocate(self.store.pool))

    def pass_window(self, length: int) -> None:
        """Give back what no token from position `length` on sees."""
        self.skip(min(self.store.group.first_block(length), len(self.ids)))

    def skip(self, first: int) -> None:
        """Do without the blocks before number `first`."""
        for block in self.ids[self.first : first]:
            self.store.pool.release(block)
        self.ids.extend([0] * (first - len(self.ids)))
        self.first = max(self.first, first)

    def cut(self, length: int) -> None:
        """Give back what is only for positions from `length` on."""
        keep = -(-length // BLOCK)
        # the last one first: blocks are reused in the order of release, and a block is found only
        # while all before it are there
        for block in reversed(self.ids[max(keep, self.first) :]):
            self.store.pool.release(block)
        del self.ids[keep:]
        self.first = min(self.first, keep)

    def copies_last(self, length: int) -> bool:
        """Whether a sequence of `length` tokens takes a block more to grow: a copy of its last one.

        One that has not begun may begin with a part of somebody else's block.
        """
        if length % BLOCK == 0:
            return length == 0
        return not self._owns_last()

    def _owns_last(self) -> bool:
        last, store = self.ids[-1], self.store
        return store.pool.references(last) == 1 and not store.index.holds(store.number, last)

    def own_last(self, rows: int, allocate: Callable[[BlockPool], int]) -> None:
        """Copy the last block's `rows` tokens if another sequence or the index knows it."""
        if self._owns_last():
            return
        last, store = self.ids[-1], self.store
        copy = allocate(store.pool)
        store.copy_rows(last, copy, rows)
        self.ids[-1] = copy
        store.pool.release(last)

    def use(self, side: Side, length: int) -> None:
        """Bring the sequence to `side`, to attend to it and to write behind it there."""
        if self.store.replica is not None:
            self.store.replica.use(side, self.held, max(0, length - self.first * BLOCK))
