"""Context shift of one cache group: tokens after a gap move up, block by block.

Blocks whose tokens have moved are given back at once, so that a full pool has room for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.group_table import GroupTable
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.kv_shift import move

Frequencies = Sequence[tuple[float, ...]]


class ShiftingTable:
    """A block table during a context shift.

    Args:
        table: the table of a sequence in the group.
        keep: number of first tokens that stay in place.
        discard: number of tokens after them that are dropped; the tokens after these move up.
        length: number of tokens left after the shift.
        inv_freq: RoPE's frequencies in each layer of the group, in radians per position.
    """

    def __init__(
        self, table: GroupTable, *, keep: int, discard: int, length: int, inv_freq: Frequencies
    ) -> None:
        self._table = table
        self._keep = keep
        self._discard = discard
        self._inv_freq = inv_freq
        self._old = table.ids
        self._oldest = table.first * BLOCK
        self._first = table.store.group.first_block(length)
        kept = self._kept = keep // BLOCK
        self._done = max(kept, table.first)  # old blocks before it are kept or given back
        self._release(table.first, min(kept, self._first))
        table.ids = self._old[:kept]
        table.first = min(kept, max(table.first, self._first))

    @staticmethod
    def lacks_kept(table: GroupTable, *, keep: int, length: int) -> bool:
        """Whether the shift would make a window see kept tokens whose blocks were given back."""
        first = table.store.group.first_block(length)
        return first < -(-keep // BLOCK) and table.first > first

    @staticmethod
    def needs(table: GroupTable, *, keep: int, discard: int, length: int) -> int:
        """Return the number of blocks that must be free for the shift to reach its end.

        Old blocks that no other sequence holds are given back on the way, and used again.
        """
        pool, ids = table.store.pool, table.ids
        first, kept = table.store.group.first_block(length), keep // BLOCK

        def freed(begin: int, end: int) -> int:
            return sum(pool.references(block) == 1 for block in ids[begin:end])

        free = freed(table.first, min(kept, first))
        needed, done = 0, max(kept, table.first)
        for begin in range(kept * BLOCK, length, BLOCK):
            if begin // BLOCK >= first:
                free -= 1
                needed = max(needed, -free)
            moved = (min(begin + BLOCK, length) + discard) // BLOCK
            free += freed(done, moved)
            done = max(done, moved)
        return needed

    def move(self, begin: int, end: int, allocate: Callable[[BlockPool], int]) -> None:
        """Fill the block of the new positions `begin` to `end` (excluded); see `needs`."""
        table = self._table
        if begin // BLOCK < self._first:
            table.ids.append(self._old[0])
            table.first = len(table.ids)
        else:
            table.ids.append(self._filled(begin, end, allocate(table.store.pool)))
        moved = (end + self._discard) // BLOCK
        self._release(self._done, moved)
        self._done = max(self._done, moved)

    def finish(self) -> None:
        """Give back the old blocks that the table still holds."""
        self._release(self._done, len(self._old))
        self._done = len(self._old)
        table = self._table
        if table.store.replica is not None:
            table.store.replica.use("host", table.held, max(0, self._kept - table.first) * BLOCK)

    def _filled(self, begin: int, end: int, block: int) -> int:
        blocks, start = self._table.store.kv, max(begin, self._keep)
        oldest = min(end, self._oldest - self._discard)
        if oldest > start:  # the window has passed the rows before it
            blocks.clear([block])
            start = oldest
        elif start > begin:
            blocks.copy_rows(self._old[begin // BLOCK], block, start - begin)
        move(
            blocks,
            self._old,
            start + self._discard,
            end - start,
            target=block,
            row=start - begin,
            distance=self._discard,
            inv_freq=self._inv_freq,
        )
        return block

    def _release(self, first: int, end: int) -> None:
        for block in self._old[first:end]:
            self._table.store.pool.release(block)
