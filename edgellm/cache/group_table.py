"""A cache group's KV blocks, and a sequence's block table in the group."""

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
    """The KV blocks of one cache group.

    Attributes:
        number: number of the group.
        group: layers and window of the group.
        blocks: memory of the blocks on the host.
        pool: reference counts of the blocks.
        index: prefix index of the whole cache.
        replica: copy of the blocks in a device's memory; None if the host does all work.
    """

    number: int
    group: CacheGroup
    blocks: KVBlocks
    pool: BlockPool
    index: PrefixIndex
    replica: Replica | None = None

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` tokens of a block, on host or device, wherever they are current."""
        (self.replica or self.blocks).copy_rows(source, target, rows)


class GroupTable:
    """The blocks that a sequence holds in one group.

    Attributes:
        store: the group's blocks.
        ids: block ids, first to last. Ids before `first` are placeholders of blocks that the
            window has passed and the sequence no longer holds.
        first: number of the first block that the sequence holds.
    """

    def __init__(self, store: GroupBlocks, cached: SequenceOf[int | None] = ()) -> None:
        """Hold cached blocks; None stands for each block before the window."""
        self.store = store
        self.ids = [0 if block is None else block for block in cached]
        self.first = sum(block is None for block in cached)
        for block in self.held:
            store.pool.retain(block)

    @property
    def held(self) -> list[int]:
        return self.ids[self.first :]

    def at(self, number: int) -> int | None:
        """Return the id of block `number`; None if the sequence does not hold it."""
        return self.ids[number] if self.first <= number < len(self.ids) else None

    def lacks(self, length: int) -> bool:
        """Whether a sequence of `length` tokens would need blocks that were given back."""
        return self.first > self.store.group.first_block(length)

    def grow(self, end: int, allocate: Callable[[BlockPool], int]) -> None:
        """Allocate blocks for positions up to `end`."""
        while len(self.ids) * BLOCK < end:
            self.ids.append(allocate(self.store.pool))

    def pass_window(self, length: int) -> None:
        """Give back the blocks that no token from position `length` on sees."""
        self.skip(min(self.store.group.first_block(length), len(self.ids)))

    def skip(self, first: int) -> None:
        """Give back, or never hold, the blocks before number `first`."""
        for block in self.ids[self.first : first]:
            self.store.pool.release(block)
        self.ids.extend([0] * (first - len(self.ids)))
        self.first = max(self.first, first)

    def cut(self, length: int) -> None:
        """Give back the blocks that hold only positions from `length` on."""
        keep = -(-length // BLOCK)
        # the last one first: blocks are reused in the order of release, and a block is found only
        # while all before it are there
        for block in reversed(self.ids[max(keep, self.first) :]):
            self.store.pool.release(block)
        del self.ids[keep:]
        self.first = min(self.first, keep)

    def copies_last(self, length: int) -> bool:
        """Whether a sequence of `length` tokens needs a further block to grow: a copy of its last.

        True for an empty sequence, which may begin with a part of another sequence's block.
        """
        if length % BLOCK == 0:
            return length == 0
        return not self._owns_last()

    def _owns_last(self) -> bool:
        last, store = self.ids[-1], self.store
        return store.pool.references(last) == 1 and not store.index.holds(store.number, last)

    def own_last(self, rows: int, allocate: Callable[[BlockPool], int]) -> None:
        """Replace the last block by a copy of its `rows` tokens, unless the sequence alone uses it.

        Another sequence may hold the block, or the prefix index know it.
        """
        if self._owns_last():
            return
        last, store = self.ids[-1], self.store
        copy = allocate(store.pool)
        store.copy_rows(last, copy, rows)
        self.ids[-1] = copy
        store.pool.release(last)

    def use(self, side: Side, length: int) -> None:
        """Bring K and V of `length` tokens to `side`, to attend to them and write after them."""
        if self.store.replica is not None:
            self.store.replica.use(side, self.held, max(0, length - self.first * BLOCK))
