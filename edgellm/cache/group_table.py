"""A cache group's blocks, and a sequence's block table in the group.

The tables are the one interface to whatever a sequence has in a layer: they grow, are cut back,
shared by a fork, and say when a sequence cannot go on from where it was cut. In a context shift
tokens after a gap move up, block by block; a block whose tokens have moved is given back at once,
so that a full pool has room for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.groups import Blocks, Group, Side, StateGroup
from edgellm.cache.prefix_index import PrefixIndex
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks, SealedBlocks
from edgellm.kernels.kv_shift import move
from edgellm.kernels.sealed_blocks import sealed_end
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

    def on_host(self, ids: Sequence[int]) -> Blocks:
        """Return the memory on the host, where blocks have what was last written to them."""
        if self.replica is not None:
            self.replica.bring("host", ids)
        return self.blocks

    def table(self, cached: Sequence[int | None] = (), *, length: int = 0) -> GroupTable:
        """Make the table of a sequence of `length` tokens from cached blocks.

        Args:
            cached: block ids, first to last; None for each block before those that are held.
        """
        if isinstance(self.blocks, SealedBlocks):
            return SealedTable(self, cached[: sealed_end(length)])
        if isinstance(self.blocks, StateBlocks):
            ends = (min((number + 1) * BLOCK, length) for number in range(len(cached)))
            held = zip(ends, cached, strict=True)
            return StateTable(self, self.blocks, {e: b for e, b in held if b is not None})
        return GroupTable(self, cached)


class GroupTable:
    """The blocks that a sequence holds in one group.

    Attributes:
        store: the group's blocks.
        ids: block ids, first to last. Ids before `first` are placeholders of blocks that the
            window has passed and the sequence no longer holds.
        first: number of the first block that the sequence holds, apart from the group's sinks.
    """

    def __init__(self, store: GroupBlocks, cached: Sequence[int | None]) -> None:
        """Hold cached blocks; None stands for each block before the window."""
        self.store = store
        self.ids = [0 if block is None else block for block in cached]
        self.first = max((i + 1 for i, block in enumerate(cached) if block is None), default=0)
        for block in self.held:
            store.pool.retain(block)

    @property
    def sinks(self) -> int:
        """Number of blocks that the sequence holds before those that the window has passed."""
        return min(self.store.group.sinks, self.first)

    @property
    def held(self) -> list[int]:
        return [*self.ids[: self.sinks], *self.ids[self.first :]]

    @property
    def numbered(self) -> list[tuple[int, int]]:
        """Numbers and ids of the blocks that the sequence holds."""
        return [*enumerate(self.ids[: self.sinks]), *enumerate(self.ids[self.first :], self.first)]

    def at(self, number: int) -> int | None:
        """Return the id of block `number`; None if the sequence does not hold it."""
        there = number < self.sinks or self.first <= number < len(self.ids)
        return self.ids[number] if there else None

    def lasting(self, number: int) -> int | None:
        """Return the id of full block `number` if other sequences may begin with it; else None."""
        return self.at(number)

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

    def late(self, before: int, length: int) -> range:
        """Return the numbers of the blocks that were full after `before` tokens, and are written in
        this group by those up to `length`."""
        return range(0)

    def settle(self) -> None:
        """Note that no token of a draft is dropped any longer."""

    def pass_window(self, length: int) -> None:
        """Give back the blocks that no token from position `length` on sees."""
        self.skip(min(self.store.group.first_block(length), len(self.ids)))

    def open_from(self, first: int, end: int, allocate: Callable[[BlockPool], int]) -> None:
        """Allocate blocks from number `first` on for positions up to `end`; hold none before, apart
        from the sinks."""
        self.grow(min(end, self.store.group.sinks * BLOCK), allocate)
        self.skip(first)
        self.grow(end, allocate)

    def skip(self, first: int) -> None:
        """Give back, or never hold, the blocks before number `first`."""
        sinks = self.store.group.sinks
        for block in self.ids[max(self.first, sinks) : first]:
            # hot blocks of a long prompt would else take the place of the ends of other texts
            self.store.pool.release(block, first=sinks > 0)
        self.ids.extend([0] * (first - len(self.ids)))
        self.first = max(self.first, first)

    def cut(self, length: int) -> None:
        """Give back the blocks that hold only positions from `length` on."""
        keep = -(-length // BLOCK)
        if keep >= len(self.ids):  # behind most steps, for each of their rows
            return
        # the last one first: blocks are reused in the order of release, and a block is found only
        # while all before it are there
        for number, block in reversed(self.numbered):
            if number >= keep:
                self.store.pool.release(block)
        del self.ids[keep:]
        self.first = min(self.first, keep)

    def lacking(self, start: int, end: int, *, rows: int) -> int:
        """Return the blocks that a sequence of `start` tokens lacks to grow to `end`.

        Args:
            rows: maximum of rows that one step computes.
        """
        group = self.store.group
        first = max(self.first, group.first_block(end - 1))
        new = max(0, -(-end // BLOCK) - max(first, len(self.ids)))
        if group.sinks:  # hot blocks are needed until they are sealed
            new = max(new, group.blocks_for(end, rows=min(rows, end - start)) - len(self.held))
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
            passed = (self.first - self.sinks) * BLOCK
            self.store.replica.use(side, self.held, max(0, length - passed))


class SealedTable(GroupTable):
    """The sealed blocks that a sequence holds in one group: written once, and kept.

    A step writes those that its rows are the first to read. Id 0 stands for the first block.
    """

    def lacks(self, length: int) -> bool:
        return max(1, len(self.ids)) < sealed_end(length)

    def grow(self, end: int, allocate: Callable[[BlockPool], int], *, drafted: int = 0) -> None:
        self.skip(1)
        while len(self.ids) < sealed_end(end):
            self.ids.append(allocate(self.store.pool))

    def late(self, before: int, length: int) -> range:
        return range(sealed_end(before), min(sealed_end(length), before // BLOCK))

    def cut(self, length: int) -> None:
        """Give back the blocks that rows up to `length` do not read."""
        keep = sealed_end(length)
        for block in reversed(self.ids[keep:]):
            self.store.pool.release(block)
        del self.ids[keep:]

    def use(self, side: Side, length: int) -> None:
        """Bring the blocks that rows up to `length` read to `side`, to seal later ones there."""
        if self.store.replica is not None:
            self.store.replica.bring(side, self.ids[1 : sealed_end(length)])
            self.store.replica.write(side, self.ids[sealed_end(length) :])

    def lacking(self, start: int, end: int, *, rows: int) -> int:
        return max(0, sealed_end(end) - max(1, len(self.ids)))

    def own_last(self, rows: int, allocate: Callable[[BlockPool], int]) -> None:
        """Do nothing: no row is written to a block that is there."""


class StateTable(GroupTable):
    """The blocks that hold a sequence's states in one group.

    A block has the states after so many tokens: after all of the sequence, and at the places where
    its group takes snapshots. A sequence can go on from these and from nowhere in between. No step
    writes to a block that it reads: states after rows that did not become tokens vanish with their
    blocks. The steps of a `Growth` are the exception: it has blocks for its end and the snapshots
    before it alone, so that a step which ends elsewhere is followed by one that reads and writes
    the same block and cannot be repeated. Behind tokens of a draft all states are kept until the
    draft is settled, so that any of them may go.

    Attributes:
        mark: number of tokens after which a snapshot is taken beside those at regular places.
    """

    def __init__(self, store: GroupBlocks, states: StateBlocks, held: dict[int, int]) -> None:
        """Hold cached blocks.

        Args:
            held: blocks by the number of tokens after which they have the states, in order.
        """
        self._states = states
        self._held = held
        self.mark = 0
        self._drafts = self.end  # tokens before those of a draft
        super().__init__(store, ())

    @property
    def held(self) -> list[int]:
        return list(self._held.values())

    @property
    def numbered(self) -> list[tuple[int, int]]:
        return [((end - 1) // BLOCK, block) for end, block in self._held.items()]

    @property
    def end(self) -> int:
        """Number of tokens after which its last block has the states; 0: it has none."""
        return next(reversed(self._held), 0)

    def at(self, number: int) -> int | None:
        """Return the block with the states after block `number`, or after the part of it there is;
        None if the sequence does not hold it."""
        return self._held.get(min((number + 1) * BLOCK, self.end))

    def lasting(self, number: int) -> int | None:
        return self.at(number) if self._kept((number + 1) * BLOCK) else None

    def view(self, start: int, end: int) -> StateView:
        """Return the blocks that a step with the rows from `start` to `end` reads and writes."""
        ends = [*(place for place in self._held if start < place < end), end]
        targets = tuple((place - start, self._block(place)) for place in ends)
        return StateView(self._states, self._block(start) if start else None, targets)

    def shared(self, length: int) -> GroupTable:
        other = StateTable(self.store, self._states, dict(self._held))
        other.mark = self.mark
        return other

    def lacks(self, length: int) -> bool:
        return self.end != length

    def grow(self, end: int, allocate: Callable[[BlockPool], int], *, drafted: int = 0) -> None:
        """Allocate blocks for the states at each place up to `end`, and after `end`.

        Those after each row before the `drafted` last ones, and between them, get a block as well.
        """
        if end <= self.end:
            return
        before, self._drafts = self.end, end - drafted
        rows = range(max(self._drafts, before + 1), end)
        for place in sorted({*self._places(before, end), *rows}):
            self._held[place] = allocate(self.store.pool)

    def committed(self, length: int) -> None:
        """Give back the blocks that steps ended with where no snapshot is taken."""
        past = min(length, self._drafts)
        self._give_back(place for place in self._held if place < past and not self._kept(place))

    def pass_window(self, length: int) -> None:
        past = min(length, self._drafts)
        self._give_back(place for place in self._held if place < past)

    def open_from(self, first: int, end: int, allocate: Callable[[BlockPool], int]) -> None:
        """Allocate a block for the end of each from number `first` on, and hold none before."""
        self._give_back(place for place in self._held if place <= first * BLOCK)
        for place in [*range((first + 1) * BLOCK, end, BLOCK), *([end] if end else [])]:
            self._held[place] = allocate(self.store.pool)

    def settle(self) -> None:
        self._drafts = self.end
        self.committed(self.end)

    def cut(self, length: int) -> None:
        """Give back the blocks with states after more than `length` tokens."""
        self._give_back(place for place in self._held if place > length)

    def lacking(self, start: int, end: int, *, rows: int) -> int:
        step = min(end, start + rows)
        first = len(self._places(start, step))
        later = self.store.group.blocks_for(end, rows=rows) - 1  # beside what it holds now
        return first if step == end else max(first, later)

    def own_last(self, rows: int, allocate: Callable[[BlockPool], int]) -> None:
        """Do nothing: `grow` takes another block for what is written."""

    def use(self, side: Side, length: int) -> None:
        """Bring the states after `length` tokens to `side`, to write later ones there."""
        replica = self.store.replica
        if replica is None:
            return
        if length:
            replica.bring(side, [self._block(length)])
        replica.write(side, [block for place, block in self._held.items() if place > length])

    def _places(self, start: int, end: int) -> list[int]:
        """Return where a step from `start` to `end` leaves states."""
        if end <= start:
            return []
        inside = range((start // BLOCK + 1) * BLOCK, end, BLOCK)
        return [*(place for place in inside if self._kept(place)), end]

    def _kept(self, place: int) -> bool:
        group = self.store.group
        assert isinstance(group, StateGroup)
        return place == self.mark or place % (group.interval * BLOCK) == 0

    def _give_back(self, places: Iterable[int]) -> None:
        for place in list(places):
            self.store.pool.release(self._held.pop(place))

    def _block(self, position: int) -> int:
        """Return the block with the states after `position` tokens, where later ones may follow."""
        block = self._held.get(position)
        return self._held[min(p for p in self._held if p > position)] if block is None else block


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
        group = table.store.group
        first = group.first_block(length)
        # a group that keeps all has passed blocks where the context is condensed
        return table.first > first and (group.keeps_all or first < -(-keep // BLOCK))

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
            targets=[block],
            row=start - begin,
            distance=self._discard,
            inv_freq=self._inv_freq,
        )
        return block

    def _release(self, first: int, end: int) -> None:
        for block in self._old[first:end]:
            self._table.store.pool.release(block)
