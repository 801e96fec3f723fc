"""A sequence of tokens: in each cache group a block table over the pool that all sequences share.

Full blocks are immutable and shared; only a sequence's last block is written to, and it is copied
first if anyone else can see it. So fork and rewind copy at most one block of each group. Blocks
before a group's window are given back; the index knows them until their memory is needed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Protocol

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.context_shift import ShiftingTable
from edgellm.cache.group_table import GroupTable
from edgellm.cache.prefix_index import Match, PrefixIndex, chain
from edgellm.errors import CacheFullError, ContextOverflowError, OptionError
from edgellm.kernels.kv_blocks import BLOCK, KVView


class Store(Protocol):
    """Where the K and V of sequences are; see `KVCache`.

    Attributes:
        rows_at_once: tokens that one step should add to a sequence at most.
        places: for each layer its group, and which of the group's layers it is.
        rope_frequencies: in each layer, in radians per position; None where keys are not as RoPE
            left them.
    """

    ctx_size: int
    rows_at_once: int
    places: list[tuple[int, int]]
    rope_frequencies: list[tuple[float, ...]] | None
    index: PrefixIndex

    def register(self, sequence: Sequence) -> None: ...

    def drop(self, sequence: Sequence) -> None: ...

    def close_dropped(self) -> None: ...


class Sequence:
    """One sequence: its tokens and the blocks that hold their K and V.

    One that is dropped without `close` is closed then, or by whoever uses the cache next.

    Attributes:
        tables: the blocks, one table per cache group.
        shareable: number of leading tokens whose K and V are position-exact: other sequences
            may begin with them. None: all. Tokens that moved up over a gap still remember what
            stood in it.
    """

    def __init__(
        self,
        cache: Store,
        tables: list[GroupTable],
        tokens: list[int],
        *,
        root: bytes | None = None,
    ) -> None:
        self.tables = tables
        self._cache = cache
        self._index = cache.index
        self._names = [root or cache.index.root]  # of what is before each block
        self.tokens = tokens
        self.shareable: int | None = None
        cache.register(self)

    @property
    def root(self) -> bytes:
        """The name of what is before it; see `PrefixIndex.salted_root`."""
        return self._names[0]

    def __len__(self) -> int:
        return len(self.tokens)

    def __del__(self) -> None:
        # not simply closed: the garbage collector may run in the middle of a change to the pool
        if any(table.held for table in self.tables):
            self._cache.drop(self)

    @property
    def rows_at_once(self) -> int:
        """Tokens that one step should add at most, so that windows stay small."""
        return self._cache.rows_at_once

    @property
    def block_tables(self) -> list[list[int]]:
        """The sequence's block ids in each group."""
        return [table.ids for table in self.tables]

    def view(self, layer: int) -> tuple[KVView, int]:
        """Where a layer's K and V are: blocks and table, and which layer of these blocks."""
        group, slot = self._cache.places[layer]
        table = self.tables[group]
        return KVView(table.store.blocks, table.ids), slot

    def use_host(self) -> None:
        """Bring the sequence to the host, to attend to it and to write behind it there."""
        for table in self.tables:
            table.use("host", len(self))

    def use_device(self) -> None:
        """Bring the sequence to the device, to attend to it and to write behind it there."""
        for table in self.tables:
            table.use("device", len(self))

    def reserve(self, count: int, *, windowed: bool = True) -> None:
        """Make the next `count` positions writable, and give back what windows have passed.

        Args:
            windowed: in groups with a window, too; else see `open`.

        Raises:
            ContextOverflowError: they do not fit into the context.
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
        growing = [t for t in self.tables if windowed or t.store.group.window is None]
        for table in growing:
            table.grow(end, self._allocate)

    def open(self, end: int) -> None:
        """Make positions up to `end` writable in all groups, after a `reserve` without windows.

        Raises:
            CacheFullError: no block is free.
        """
        for table in self.tables:
            table.pass_window(len(self))
            table.grow(end, self._allocate)

    def open_seen(self, end: int, firsts: SequenceOf[int] | None = None) -> None:
        """As `open`, but only blocks that tokens from position `end` on see: nothing is computed.

        Args:
            firsts: the first block of each group, instead of those.
        """
        for group, table in enumerate(self.tables):
            seen = table.store.group.first_block(end)
            table.skip(seen if firsts is None else firsts[group])
            table.grow(end, self._allocate)

    @contextmanager
    def reserved(self, count: int, *, windowed: bool = True) -> Iterator[None]:
        """As `reserve`; what has not been committed at the end is given back."""
        try:
            self.reserve(count, windowed=windowed)
            yield
        finally:
            self.truncate(len(self))

    def commit(self, tokens: SequenceOf[int]) -> None:
        """Count tokens whose K and V have been written in every layer."""
        first = len(self) // BLOCK
        self.tokens.extend(tokens)
        for number in range(first, self._shareable // BLOCK):
            self._insert(number)

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on.

        What a window had passed comes back if its memory was not needed since; else the sequence
        becomes the longest prefix that every group still has.
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
            self._become(self._index.match(self.tokens, root=self.root))

    def fork(self) -> Sequence:
        """Another sequence with the same tokens, sharing every block."""
        other = Sequence(self._cache, self._shared_tables(), list(self.tokens), root=self.root)
        other.shareable = self.shareable
        return other

    def shift(self, *, keep: int, discard: int) -> None:
        """Forget the `discard` tokens after the first `keep`; those behind them move up.

        Their keys are turned back by as many positions (see `kernels/kv_shift`). Where that cannot
        be, or kept tokens that a window has passed would be seen again, the sequence keeps at most
        its first `keep` tokens, and what follows is to be computed again.

        Raises:
            CacheFullError: no block is free to move to; of what has moved by then, as much stays as
                every group has.
        """
        inv_freq = self._cache.rope_frequencies
        tokens = self.tokens[:keep] + self.tokens[keep + discard :]
        lacking = (ShiftingTable.lacks_kept(t, keep=keep, length=len(tokens)) for t in self.tables)
        if inv_freq is None or any(lacking):
            return self.truncate(keep)
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
        self.shareable = min(keep, self._shareable)
        self.tokens = tokens[: first * BLOCK]
        del self._names[first + 1 :]
        try:
            for begin in range(first * BLOCK, len(tokens), BLOCK):
                end = min(begin + BLOCK, len(tokens))
                for table in shifting:
                    table.move(begin, end, self._allocate)
                self.tokens.extend(tokens[begin:end])
        finally:
            for table in shifting:
                table.finish()
            self.truncate(len(self))

    def close(self) -> None:
        """Give the blocks back; what they hold can still be found until it is overwritten."""
        last = len(self) // BLOCK
        if len(self) % BLOCK and self.shareable is None:
            self._insert(last)
        self.truncate(0)

    def settle(self) -> None:
        """Have tables and tokens agree again, after an interrupt in the middle of a change."""
        there = min(len(table.ids) * BLOCK for table in self.tables)
        self.truncate(min(len(self), there))

    def _shared_tables(self) -> list[GroupTable]:
        """Tables of the same blocks, for another sequence."""
        return [
            GroupTable(table.store, [table.at(i) for i in range(len(table.ids))])
            for table in self.tables
        ]

    @property
    def _shareable(self) -> int:
        return len(self) if self.shareable is None else min(len(self), self.shareable)

    def known(self, table: GroupTable) -> list[tuple[int, int]]:
        """Numbers and ids of the blocks that the next token sees, and of the one before them.

        Who goes back by some tokens needs that one. If the window has passed it, it is there only
        as long as its memory is not needed.
        """
        oldest = max(0, table.store.group.first_block(len(self)) - 1)
        numbers = range(max(oldest, table.first), len(table.ids))
        held = [(number, table.ids[number]) for number in numbers]
        last = table.first - 1
        if last < oldest or (last + 1) * BLOCK > self._shareable:
            return held
        passed = self.tokens[last * BLOCK : (last + 1) * BLOCK]
        block = self._index.find(self._name(last), passed, table.store.number)
        return held if block is None else [(last, block), *held]

    def _name(self, number: int) -> bytes:
        """Of what is before a block."""
        while len(self._names) <= number:
            begin = (len(self._names) - 1) * BLOCK
            self._names.append(chain(self._names[-1], self.tokens[begin : begin + BLOCK]))
        return self._names[number]

    def _insert(self, number: int) -> None:
        """Let others find a block, in the groups that hold it."""
        blocks = [table.at(number) for table in self.tables]
        held = self.tokens[number * BLOCK : (number + 1) * BLOCK]
        self._index.insert(self._name(number), held, blocks)

    def _become(self, match: Match) -> None:
        """Hold a cached prefix in place of what is held."""
        tables = [
            GroupTable(table.store, blocks)
            for table, blocks in zip(self.tables, match.tables, strict=True)
        ]
        # first what says that there are more: an interrupt may come in between
        del self.tokens[match.length :]
        del self._names[match.length // BLOCK + 1 :]
        for table in self.tables:
            table.cut(0)
        self.tables = tables
        self.shareable = None

    def _allocate(self, pool: BlockPool) -> int:
        """A block to write to, if need be one of a sequence that nobody can reach any more."""
        try:
            return pool.allocate()
        except CacheFullError:
            gc.collect()
            # and nothing else that was deferred: it may concern a sequence of the same step
            self._cache.close_dropped()
            return pool.allocate()
