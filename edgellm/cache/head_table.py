"""The blocks of a condensed context that a sequence holds in one group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.group_table import GroupBlocks, GroupTable
from edgellm.kernels.head_blocks import HeadBlocks, blocks_for, head_blocks
from edgellm.kernels.kv_blocks import BLOCK

Allocate = Callable[[BlockPool], int]


class HeadTable(GroupTable):
    """Blocks of KV heads in place of the first ones, and whole blocks behind them.

    A sequence that is cut back into what they stand for cannot go on from there.

    Attributes:
        heads: layout of the blocks of heads.
    """

    def __init__(
        self, store: GroupBlocks, heads: HeadBlocks, shared: Sequence[int], whole: Sequence[int]
    ) -> None:
        """Hold blocks.

        Args:
            shared: blocks of the pool that have those of heads.
            whole: ids of the blocks behind them.
        """
        self.heads = heads
        self._shared = list(shared)
        super().__init__(store, [*[None] * heads.first, *whole])

    @classmethod
    def of(
        cls,
        store: GroupBlocks,
        counts: Sequence[int],
        first: int,
        allocate: Allocate,
        whole: Sequence[int] = (),
    ) -> HeadTable:
        """Allocate blocks of heads.

        Args:
            counts: number of blocks of each layer's heads.
            first: number of the first whole block.
            whole: ids of the whole blocks, as far as they are there.

        Raises:
            CacheFullError: no block is free.
        """
        ids: list[int] = []
        try:
            for _ in range(blocks_for(store.kv, counts)):
                ids.append(allocate(store.pool))
            return cls(store, head_blocks(store.kv, counts, ids, first=first), ids, whole)
        finally:
            for block in ids:  # which the table holds, if there is one
                store.pool.release(block)

    @property
    def of_heads(self) -> list[int]:
        """Blocks of the pool that have those of heads."""
        return list(self._shared)

    @property
    def held(self) -> list[int]:
        return [*self._shared, *super().held]

    def shared(self, length: int) -> GroupTable:
        return HeadTable(self.store, self.heads, self._shared, self.ids[self.heads.first :])

    def lacks(self, length: int) -> bool:
        return length < self.heads.first * BLOCK

    def cut(self, length: int) -> None:
        super().cut(length)
        if self.lacks(length):
            for block in self._shared:
                self.store.pool.release(block)
            self._shared = []
