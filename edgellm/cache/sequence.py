"""Sequences of tokens in the KV cache, each with a block table per cache group.

Full blocks are immutable and shared. Only a sequence's last block of K and V is written to, and it
is copied first if another sequence or the prefix index can see it. So fork and rewind copy at most
one block of each group. States go to blocks of their own in each step, some of which stay as
snapshots. Blocks before a group's window are given back, and found until their memory is needed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.group_table import GroupTable, ShiftingTable, StateTable
from edgellm.cache.head_table import HeadTable
from edgellm.cache.prefix_index import CacheEnd, Match, PrefixIndex, Root, chain
from edgellm.errors import CacheFullError, ContextOverflowError, OptionError
from edgellm.kernels.head_blocks import HeadBlocks, copy_rows
from edgellm.kernels.kv_blocks import BLOCK, KVView
from edgellm.kernels.state_blocks import StateRows, StateView

T = TypeVar("T")


class Store(Protocol):
    """The cache that holds the K and V of sequences, see `KVCache`."""

    ctx_size: int
    rows_at_once: int
    places: list[tuple[int, int]]
    rope_frequencies: list[tuple[float, ...]] | None
    index: PrefixIndex

    def drop(self, sequence: Sequence) -> None: ...

    def close_dropped(self) -> None: ...

    def reclaim(self) -> bool: ...


class Sequence:
    """A sequence of tokens and the blocks that hold their K and V.

    A sequence that is dropped without `close` is closed between two changes of the cache.

    Attributes:
        tables: block tables, one per cache group.
        tokens: ids of the tokens whose K and V are in the blocks.
        root: root of the blocks' names, which `rename` changes; see `PrefixIndex.salted_root`.
        shareable: number of leading tokens whose K and V are position-exact, so that other
            sequences may begin with them. None: all. Tokens that moved up in a context shift have
            attended to the dropped tokens, and those of an answer to a part (`kv_read`).
    """

    def __init__(
        self,
        cache: Store,
        tables: list[GroupTable],
        tokens: list[int],
        *,
        root: Root | None = None,
    ) -> None:
        self.tables = tables
        self._cache = cache
        self._index = cache.index
        self.root = root or Root(cache.index.root)
        self._names = [self.root.name]  # names of all tokens before each block
        self.tokens = tokens
        self.shareable: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __del__(self) -> None:
        # not simply closed: the garbage collector may run in the middle of a change to the pool
        if any(table.held for table in self.tables):
            self._cache.drop(self)

    @property
    def rows_at_once(self) -> int:
        """Maximum of tokens that one step should add, so that windows need few blocks."""
        return self._cache.rows_at_once

    @property
    def block_tables(self) -> list[list[int]]:
        """Block ids of the sequence in each group."""
        return [table.ids for table in self.tables]

    def view(self, layer: int) -> tuple[KVView, int]:
        """Return a view of the blocks with a layer's K and V, and the layer's place in them."""
        group, slot = self._cache.places[layer]
        table = self.tables[group]
        return KVView(table.store.kv, table.ids), slot

    def states_of(self, layer: int, start: int, end: int) -> StateRows:
        """Return the states of a layer that rows from `start` to `end` read and write.

        Raises:
            TypeError: the layer has no state.
        """
        for table in self.tables:
            members = table.store.group.layers
            if isinstance(table, StateTable) and layer in members:
                return table.view(start, end).of_layer(members.index(layer))
        raise TypeError(f"layer {layer} has no state")

    def states(self, start: int, end: int) -> list[StateView | None]:
        """Return views of the blocks with states of each group; None where it has K and V.

        Args:
            start, end: positions of the first row of a reserved step, and after its last.
        """
        return [
            table.view(start, end) if isinstance(table, StateTable) else None
            for table in self.tables
        ]

    def use_host(self) -> None:
        """Bring the sequence's K and V to the host, to attend to them and write after them."""
        for table in self.tables:
            table.use("host", len(self))

    def use_device(self) -> None:
        """Bring the sequence's K and V to the device, to attend to them and write after them."""
        for table in self.tables:
            table.use("device", len(self))

    def reserve(self, count: int, *, windowed: bool = True, drafted: int = 0) -> None:
        """Make the next `count` positions writable, and give back blocks that windows have passed.

        Args:
            windowed: whether to allocate blocks in groups that do not keep all, too; else `open`
                does it.
            drafted: number of last tokens, some of which may be there already, that are a draft:
                until `settle` any number of them can be dropped, with states as well.

        Raises:
            ContextOverflowError: the positions do not fit into the context.
            CacheFullError: no block is free.
        """
        end = len(self) + count
        if end > self._cache.ctx_size:
            raise ContextOverflowError(
                f"{end} tokens do not fit into a context of {self._cache.ctx_size}; "
                "shorten the prompt or raise `ctx_size`"
            )
        rows = len(self) % BLOCK
        for table in self.tables:
            table.pass_window(len(self))
            if rows:
                table.own_last(rows, self._allocate)
        growing = [t for t in self.tables if windowed or t.store.group.keeps_all]
        for table in growing:
            table.grow(end, self._allocate, drafted=drafted)

    def settle(self) -> None:
        """Give back what was kept to drop tokens of a draft, see `reserve`."""
        for table in self.tables:
            table.settle()

    def open(self, end: int) -> None:
        """Make positions up to `end` writable in all groups, after a `reserve` without windows.

        Raises:
            CacheFullError: no block is free.
        """
        for table in self.tables:
            table.pass_window(len(self))
            table.grow(end, self._allocate)

    def open_heads(
        self, firsts: SequenceOf[int], heads: SequenceOf[SequenceOf[int] | None]
    ) -> None:
        """Make room for the blocks of heads of a condensed context, in an empty sequence.

        Args:
            firsts, heads: see `PackedBlocks`.

        Raises:
            CacheFullError: no block is free.
        """
        for group, counts in enumerate(heads):
            if counts is not None:
                store = self.tables[group].store
                self.tables[group] = HeadTable.of(store, counts, firsts[group], self._allocate)

    def open_seen(self, end: int, firsts: SequenceOf[int] | None = None) -> None:
        """Make positions up to `end` writable, but only in blocks that later tokens see.

        For K and V that are read instead of computed.

        Args:
            firsts: number of the first block in each group; None: the first that tokens from
                position `end` on see.
        """
        for group, table in enumerate(self.tables):
            seen = table.store.group.first_block(end)
            table.open_from(seen if firsts is None else firsts[group], end, self._allocate)

    @contextmanager
    def reserved(self, count: int, *, windowed: bool = True, drafted: int = 0) -> Iterator[None]:
        """Reserve positions for a block of code; those not committed by its end are given back."""
        try:
            self.reserve(count, windowed=windowed, drafted=drafted)
            yield
        finally:
            self.truncate(len(self))

    def commit(self, tokens: SequenceOf[int]) -> None:
        """Append tokens whose K and V have been written in every layer.

        Full blocks of shareable tokens enter the prefix index.
        """
        before = len(self)
        numbers: set[int] = set()
        self.tokens.extend(tokens)
        for table in self.tables:
            table.committed(len(self))
            numbers.update(table.late(before, self._shareable))
        for number in (*sorted(numbers), *range(before // BLOCK, self._shareable // BLOCK)):
            self._insert(number, [table.lasting(number) for table in self.tables])

    def truncate(self, length: int) -> None:
        """Drop all tokens from position `length` on.

        Blocks that a window had passed, and snapshots of states, come back if their memory was not
        needed since. Otherwise the sequence becomes the longest prefix that every
        group still has.

        Raises:
            OptionError: `length` is negative or greater than the number of tokens.
        """
        if not 0 <= length <= len(self):
            raise OptionError(
                f"rewind to {length}: the sequence has {len(self)} tokens; "
                f"0 to {len(self)} is allowed"
            )
        del self.tokens[length:]
        del self._names[length // BLOCK + 1 :]
        if self.shareable is not None and length <= self.shareable:
            self.shareable = None
        for table in self.tables:
            table.cut(length)
        if any(table.lacks(length) for table in self.tables):
            match = self._index.match(self.tokens, root=self.root)
            own = min((table.end for table in self._states), default=0)
            if match.length < own < length:
                self.truncate(own)  # states that the sequence itself has may be all there are
            else:
                self._become(match)

    def fork(self) -> Sequence:
        """Make another sequence with the same tokens, which shares every block."""
        tables = [table.shared(len(self)) for table in self.tables]
        other = Sequence(self._cache, tables, list(self.tokens), root=self.root)
        other.shareable = self.shareable
        return other

    @property
    def heads(self) -> list[HeadBlocks | None]:
        """Blocks of a condensed context in each group, None where it is whole; empty: it is in all
        groups."""
        heads = [table.heads if isinstance(table, HeadTable) else None for table in self.tables]
        return heads if any(heads) else []

    def condense(self, rows: SequenceOf[SequenceOf[NDArray[np.int64]] | None], blocks: int) -> None:
        """Drop rows of K and V of the first blocks; the tokens stay, and no other sequence begins
        with any of them.

        Args:
            rows: rows that each KV head of the layers of each group keeps, whole blocks of them;
                None: all.
            blocks: number of blocks of which the others are dropped.

        Raises:
            CacheFullError: no block is free; nothing has changed.
        """
        made: dict[int, HeadTable] = {}
        try:
            for group, kept in enumerate(rows):
                if kept is not None:
                    table, counts = self.tables[group], [len(of) // BLOCK for of in kept]
                    made[group] = HeadTable.of(
                        table.store, counts, blocks, self._allocate, table.ids[blocks:]
                    )
        except CacheFullError:
            for each in made.values():
                each.cut(0)
            raise
        for group, each in made.items():
            table, self.tables[group] = self.tables[group], each
            copy_rows(each.store.kv, table.ids[:blocks], rows[group] or (), each.heads)
            table.cut(0)
        self.shareable = 0

    def rename(self, root: Root) -> None:
        """Go on under another root, without the tokens whose K and V are not the same there."""
        same = min(root.start, self.root.start) if root.name == self.root.name else 0
        if root == self.root:
            return
        if same < len(self):
            self.enter_end()
            self.truncate(same)
        self.root = root
        self._names[0] = root.name

    def shift(self, *, keep: int, discard: int) -> None:
        """Drop the `discard` tokens after the first `keep`; the tokens after them move up.

        Keys of the moved tokens are rotated back by `discard` positions (see `kernels/kv_shift`).
        If that is impossible, or a window would see kept tokens that it has passed, the sequence
        keeps at most its first `keep` tokens, and the rest is to be computed again.

        Raises:
            CacheFullError: there is no room to move them; nothing has changed.
        """
        inv_freq = self._cache.rope_frequencies
        tokens = self.tokens[:keep] + self.tokens[keep + discard :]
        lacking = (ShiftingTable.lacks_kept(t, keep=keep, length=len(tokens)) for t in self.tables)
        if inv_freq is None or any(lacking):
            return self.truncate(keep)

        def check_room() -> None:
            for table in self.tables:
                needed = ShiftingTable.needs(table, keep=keep, discard=discard, length=len(tokens))
                table.store.pool.require(needed)

        self._with_room(check_room)
        self.use_host()
        shifting = [
            ShiftingTable(
                table,
                keep=keep,
                discard=discard,
                length=len(tokens),
                inv_freq=[inv_freq[layer] for layer in table.store.group.layers],
            )
            for table in self.tables
        ]
        first = keep // BLOCK
        self.root = self.root.shifted(keep=keep, discard=discard)
        self.shareable = min(keep, self._shareable)
        self.tokens = tokens[: first * BLOCK]
        del self._names[first + 1 :]
        try:
            for begin in range(first * BLOCK, len(tokens), BLOCK):
                end = min(begin + BLOCK, len(tokens))
                for each in shifting:
                    each.move(begin, end, self._allocate)
                self.tokens.extend(tokens[begin:end])
        finally:
            for each in shifting:
                each.finish()
            self.truncate(len(self))

    def close(self) -> None:
        """Give the blocks back; the prefix index finds them until they are overwritten."""
        self.enter_end()
        self.truncate(0)

    def enter_end(self) -> None:
        """Enter the last block into the prefix index, full or not, with the states after it."""
        if len(self) and self.shareable is None:
            number = (len(self) - 1) // BLOCK
            self._insert(number, [table.at(number) for table in self.tables])

    def expect(self, length: int) -> None:
        """Have a snapshot of states taken at the end of the last full block before the last token
        of a prompt of `length` tokens."""
        for table in self._states:
            table.mark = (length - 1) // BLOCK * BLOCK

    @property
    def _states(self) -> list[StateTable]:
        return [table for table in self.tables if isinstance(table, StateTable)]

    @property
    def _shareable(self) -> int:
        return len(self) if self.shareable is None else min(len(self), self.shareable)

    def known(self, table: GroupTable) -> list[tuple[int, int]]:
        """Return numbers and ids of the blocks that the next token sees, and of one block before.

        A rewind by some tokens needs the block before. If the window has passed that block, it is
        included only as long as its memory is not reused.
        """
        oldest = max(0, table.store.group.first_block(len(self)) - 1)
        sinks = table.numbered[: min(table.store.group.sinks, oldest)]
        held = [(number, block) for number, block in table.numbered if number >= oldest]
        last = (held[0][0] if held else table.first) - 1
        if last >= oldest and (last + 1) * BLOCK <= self._shareable:
            block = self._index.find(self._name(last), self._held(last), table.store.number)
            sinks += [] if block is None else [(last, block)]
        return sinks + held

    def snapshots(self, table: StateTable, count: int) -> list[tuple[int, int]]:
        """Return numbers and ids of its last `count` full blocks with states in memory."""
        held, full = dict(table.numbered), []
        for number in reversed(range(self._shareable // BLOCK)):
            tokens = self._held(number)
            block = self._index.find(self._name(number), tokens, table.store.number)
            if block is not None or number in held:
                full.append((number, held[number] if block is None else block))
            if len(full) == count:
                break
        return full[::-1]

    def end_in(self, tokens: SequenceOf[int]) -> CacheEnd:
        """Return the reason why it holds no more of `tokens`, of which it is a prefix."""
        number, rows = divmod(len(self), BLOCK)
        behind = self.root.named(tokens[number * BLOCK :], number * BLOCK)
        end = self._index.end_of(self._name(number), behind, rows)
        # prompts that differ in their first token have nothing to do with each other
        return "new" if end == "differs" and not len(self) else end

    def _name(self, number: int) -> bytes:
        """Return the name (hash) of all tokens before block `number`."""
        while len(self._names) <= number:
            self._names.append(chain(self._names[-1], self._held(len(self._names) - 1)))
        return self._names[number]

    def _held(self, number: int) -> SequenceOf[int]:
        """Return the tokens of block `number` as its name has them."""
        begin = number * BLOCK
        return self.root.named(self.tokens[begin : begin + BLOCK], begin)

    def _insert(self, number: int, blocks: SequenceOf[int | None]) -> None:
        """Enter a block into the prefix index, for the groups in which it is not None."""
        parent = self._name(number)
        line = self._names[: number + 1] if self._states else ()
        self._index.insert(parent, self._held(number), blocks, line=line)

    def _become(self, match: Match) -> None:
        """Hold the blocks of a cached prefix instead of the present ones."""
        tables = [
            table.store.table(blocks, length=match.length)
            for table, blocks in zip(self.tables, match.tables, strict=True)
        ]
        del self.tokens[match.length :]
        del self._names[match.length // BLOCK + 1 :]
        for table in self.tables:
            table.cut(0)
        self.tables = tables
        self.shareable = None

    def _allocate(self, pool: BlockPool) -> int:
        """Allocate a block to write to.

        Raises:
            CacheFullError: no block is free.
        """
        return self._with_room(pool.allocate)

    def _with_room(self, reserve: Callable[[], T]) -> T:
        """Call `reserve` again if a pool is full, after resting holders gave their blocks back and
        unreachable sequences were closed."""
        more = True
        while more:
            try:
                return reserve()
            except CacheFullError:
                more = self._cache.reclaim()
        gc.collect()
        self._cache.close_dropped()
        return reserve()
