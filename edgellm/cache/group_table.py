"""A cache group's blocks, and a sequence's block table in the group.

The tables are the one interface to whatever a sequence has in a layer: they grow, are cut back,
shared by a fork, and say when a sequence cannot go on from where it was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.groups import Blocks, Group, Side
from edgellm.cache.prefix_index import PrefixIndex
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks
from edgellm.kernels.state_blocks import StateBlocks, StateView

if TYPE_CHECKING:
    from edgellm.cache.replica import Replica  # imports torch


@dataclass
class GroupBlocks:
    """The blocks of one cache group.

    Attributes:
        number: number of the group.
        group: layers and window of the group.
        blocks: memory of the blocks on the host.
        pool: reference counts of the blocks.
        index: prefix index of the whole cache.
        replica: copy of the blocks in a device's memory; None if the host does all work.
    """

    number: int
    group: Group
    blocks: Blocks
    pool: BlockPool
    index: PrefixIndex
    replica: Replica | None = None

    @property
    def kv(self) -> KVBlocks:
        """Memory of the blocks of layers that attend.

        Raises:
            TypeError: the layers have states.
        """
        if not isinstance(self.blocks, KVBlocks):
            raise TypeError("layers with states have no K and V")
        return self.blocks

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` tokens of a block, on host or device, wherever they are current."""
        (self.replica or self.blocks).copy_rows(source, target, rows)

    def table(self, cached: SequenceOf[int | None] = (), *, length: int = 0) -> GroupTable:
        """Make the table of a sequence of `length` tokens from cached blocks.

        Args:
            cached: block ids, first to last; None for each block before those that are held.
        """
        if isinstance(self.blocks, StateBlocks):
            return StateTable(self, self.blocks, cached, length=length)
        return GroupTable(self, cached)


class GroupTable:
    """The blocks that a sequence holds in one group.

    Attributes:
        store: the group's blocks.
        ids: block ids, first to last. Ids before `first` are placeholders of blocks that the
            window has passed and the sequence no longer holds.
        first: number of the first block that the sequence holds.
    """

    def __init__(self, store: GroupBlocks, cached: SequenceOf[int | None]) -> None:
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

    def shared(self, length: int) -> GroupTable:
        """Make a table of the same blocks for another sequence of `length` tokens."""
        return self.store.table([self.at(i) for i in range(len(self.ids))], length=length)

    def lacks(self, length: int) -> bool:
        """Whether a sequence cut to `length` tokens would need blocks that were given back."""
        return self.first > self.store.group.first_block(length)

    def grow(self, end: int, allocate: Callable[[BlockPool], int], *, drafted: int = 0) -> None:
        """Allocate blocks for positions up to `end`.

        Args:
            drafted: number of last tokens of which any may be dropped, see `Sequence.reserve`.
        """
        while len(self.ids) * BLOCK < end:
            self.ids.append(allocate(self.store.pool))

    def committed(self, length: int) -> None:
        """Note that all rows up to `length` have been written."""

    def settle(self) -> None:
        """Note that no token of a draft is dropped any longer."""

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

    def lacking(self, start: int, end: int, *, rows: int) -> int:
        """Return the blocks that a sequence of `start` tokens lacks to grow to `end`.

        Args:
            rows: maximum of rows that one step computes.
        """
        first = max(self.first, self.store.group.first_block(end - 1))
        new = max(0, -(-end // BLOCK) - max(first, len(self.ids)))
        # a copy of the last block; an empty sequence may begin with a part of another one's block
        return new + (not self._owns_last() if start % BLOCK else start == 0)

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


class StateTable(GroupTable):
    """The blocks that hold a sequence's states in one group.

    A block has the states after the last token of its place, so a sequence can go on from the ends
    of full blocks and from its own end, and from nowhere in between. No step writes to a block that
    it reads: states after rows that did not become tokens vanish with their blocks. The steps of a
    `Growth` are the exception: it has blocks for its end alone, so that a step which ends within a
    block is followed by one that reads and writes the same block and cannot be repeated. Behind
    tokens of a draft all states are kept until the draft is settled, so that any of them may go.
    """

    def __init__(
        self,
        store: GroupBlocks,
        states: StateBlocks,
        cached: SequenceOf[int | None],
        *,
        length: int,
    ) -> None:
        """Hold cached blocks, the last of which has the states after `length` tokens."""
        super().__init__(store, cached)
        self._states = states
        self._end = length  # tokens after which the last block has the states
        # blocks with the states after so many tokens, in whose places others are written
        self._replaced: dict[int, int] = {}
        self._drafts = length  # tokens before those of a draft

    def view(self, start: int, end: int) -> StateView:
        """Return the blocks that a step with the rows from `start` to `end` reads and writes."""
        drafted = (position for position in self._replaced if start < position < end)
        ends = {*range((start // BLOCK + 1) * BLOCK, end, BLOCK), *drafted, end}
        targets = tuple((position - start, self._after(position)) for position in sorted(ends))
        return StateView(self._states, self._after(start) if start else None, targets)

    def lacks(self, length: int) -> bool:
        return self._end != length or super().lacks(length)

    def grow(self, end: int, allocate: Callable[[BlockPool], int], *, drafted: int = 0) -> None:
        """Allocate blocks for the states after each full block up to `end`, and after `end`.

        Those after each row before the `drafted` last ones, and between them, get a block as well.
        """
        if end <= self._end:
            return
        before, self._drafts = self._end, end - drafted
        if self._end % BLOCK and len(self.ids) > self.first:
            fresh = allocate(self.store.pool)
            self._replaced[self._end] = self.ids[-1]
            self.ids[-1] = fresh
        self._end = end
        super().grow(end, allocate)
        for position in range(max(self._drafts, before + 1), end):
            if position % BLOCK:
                self._replaced[position] = allocate(self.store.pool)

    def committed(self, length: int) -> None:
        for end in [end for end in self._replaced if end < min(length, self._drafts)]:
            self.store.pool.release(self._replaced.pop(end))

    def settle(self) -> None:
        self._drafts = self._end
        self.committed(self._end)

    def cut(self, length: int) -> None:
        """Give back the blocks with states after more than `length` tokens."""
        kept = length if length in (self._end, *self._replaced) else length // BLOCK * BLOCK
        super().cut(kept)
        before = self._replaced.pop(kept, None)
        if before is not None:
            self.store.pool.release(self.ids[-1])
            self.ids[-1] = before
        for end in [end for end in self._replaced if end > kept]:
            self.store.pool.release(self._replaced.pop(end))
        self._end = min(self._end, kept)

    def lacking(self, start: int, end: int, *, rows: int) -> int:
        step = min(end, start + rows)
        first = step // BLOCK - start // BLOCK + (step % BLOCK != 0)
        later = self.store.group.blocks_for(end, rows=rows) - 1  # beside what it holds now
        return first if step == end else max(first, later)

    def own_last(self, rows: int, allocate: Callable[[BlockPool], int]) -> None:
        """Do nothing: `grow` takes another block for what is written."""

    def _after(self, position: int) -> int:
        """Return the block with the states after `position` tokens."""
        replaced = self._replaced.get(position)
        return self.ids[(position - 1) // BLOCK] if replaced is None else replaced
