"""A sequence of tokens: a block table over the pool that all sequences share.

Full blocks are immutable and shared; only a sequence's last block is written to, and it is copied
first if anyone else can see it. So fork and rewind copy at most one block.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from edgellm.cache.prefix_index import BlockPool, PrefixIndex
from edgellm.errors import (
    CacheFullError,
    ContextOverflowError,
    OptionError,
    UnsupportedModelError,
)
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks
from edgellm.kernels.kv_shift import move

if TYPE_CHECKING:
    from edgellm.cache.replica import Replica  # imports torch


class Store(Protocol):
    """Where the K and V of sequences are; see `KVCache`.

    Attributes:
        turns: RoPE's frequencies in each layer, in radians per position; None where keys are not as
            RoPE left them.
    """

    ctx_size: int
    blocks: KVBlocks
    replica: Replica | None
    turns: list[tuple[float, ...]] | None

    def soon(self, change: Callable[[], None]) -> None: ...

    def collect(self) -> None: ...


class Sequence:
    """One sequence: its tokens and the blocks that hold their K and V.

    One that is dropped without `close` is closed then, or by whoever uses the cache next.

    Attributes:
        shareable: number of leading tokens whose K and V are position-exact: other sequences
            may begin with them. None: all. Tokens that moved up over a gap still remember what
            stood in it.
    """

    def __init__(
        self,
        cache: Store,
        pool: BlockPool,
        index: PrefixIndex,
        table: list[int],
        tokens: list[int],
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._index = index
        self.table = table
        self.tokens = tokens
        self.shareable: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __del__(self) -> None:
        # not simply closed: the garbage collector may run in the middle of a change to the pool
        if self.table:
            self._cache.soon(self.close)

    @property
    def blocks(self) -> KVBlocks:
        """The blocks on the host, to attend to this sequence and to write behind it."""
        self.use_host()
        return self._cache.blocks

    def use_host(self) -> None:
        """Bring the sequence to the host, to attend to it and to write behind it there."""
        if self._cache.replica is not None:
            self._cache.replica.use("host", self.table, len(self))

    def use_device(self) -> None:
        """Bring the sequence to the device, to attend to it and to write behind it there."""
        if self._cache.replica is not None:
            self._cache.replica.use("device", self.table, len(self))

    def reserve(self, count: int) -> None:
        """Make the next `count` positions writable.

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
        if rows:
            self._own_last_block(rows)
        while len(self.table) * BLOCK < end:
            self.table.append(self._allocate())

    @contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        """As `reserve`; what has not been committed at the end is given back."""
        try:
            self.reserve(count)
            yield
        finally:
            self.truncate(len(self))

    def commit(self, tokens: SequenceOf[int]) -> None:
        """Count tokens whose K and V have been written in every layer."""
        first = len(self) // BLOCK
        self.tokens.extend(tokens)
        for i in range(first, len(self.tokens[: self.shareable]) // BLOCK):
            self._index.insert(self.tokens, i, self.table[i])

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        if not 0 <= length <= len(self):
            raise OptionError(
                f"rewind to {length}: the sequence has {len(self)} tokens; "
                f"0 to {len(self)} is allowed"
            )
        del self.tokens[length:]
        if self.shareable is not None and length <= self.shareable:
            self.shareable = None
        keep = -(-length // BLOCK)
        # the last one first: blocks are reused in the order of release, and a block is found only
        # while all before it are there
        for block in reversed(self.table[keep:]):
            self._pool.release(block)
        del self.table[keep:]

    def fork(self) -> Sequence:
        """Another sequence with the same tokens, sharing every block."""
        for block in self.table:
            self._pool.retain(block)
        other = Sequence(self._cache, self._pool, self._index, list(self.table), list(self.tokens))
        other.shareable = self.shareable
        return other

    def shift(self, *, keep: int, discard: int) -> None:
        """Forget the `discard` tokens after the first `keep`; those behind them move up.

        Their keys are turned back by as many positions (see `kernels/kv_shift`).

        Raises:
            UnsupportedModelError: the model's keys cannot be turned.
            CacheFullError: no block is free to move to; what has moved by then stays.
        """
        turns = required_turns(self._cache.turns)
        blocks = self.blocks
        old, tokens = self.table, self.tokens[:keep] + self.tokens[keep + discard :]
        first = released = keep // BLOCK
        self.table, self.tokens = old[:first], tokens[: first * BLOCK]
        self.shareable = len(tokens[:keep][: self.shareable])
        try:
            for begin in range(first * BLOCK, len(tokens), BLOCK):
                block = self._pool.allocate()
                start, end = max(begin, keep), min(begin + BLOCK, len(tokens))
                blocks.copy_rows(old[first], block, start - begin)
                move(
                    blocks,
                    old,
                    start + discard,
                    end - start,
                    target=block,
                    row=start - begin,
                    distance=discard,
                    inv_freq=turns,
                )
                self.table.append(block)
                self.tokens.extend(tokens[begin:end])
                moved = (end + discard) // BLOCK
                for used in old[released:moved]:
                    self._pool.release(used)
                released = moved
        finally:
            for used in old[released:]:
                self._pool.release(used)
            self.truncate(len(self))
            if self._cache.replica is not None:
                self._cache.replica.use("host", self.table, first * BLOCK)

    def close(self) -> None:
        """Give the blocks back; what they hold can still be found until it is overwritten."""
        last = len(self) // BLOCK
        rows = len(self) % BLOCK
        if rows and self.shareable is None and not self._index.holds(self.table[last]):
            self._index.insert(self.tokens, last, self.table[last])
        self.truncate(0)

    def _own_last_block(self, rows: int) -> None:
        """Copy the last block's `rows` tokens if another sequence or the index knows it."""
        last = self.table[-1]
        if self._pool.references(last) == 1 and not self._index.holds(last):
            return
        copy = self._allocate()
        (self._cache.replica or self._cache.blocks).copy_rows(last, copy, rows)
        self.table[-1] = copy
        self._pool.release(last)

    def _allocate(self) -> int:
        """A block to write to, if need be one of a sequence that nobody can reach any more."""
        try:
            return self._pool.allocate()
        except CacheFullError:
            gc.collect()
            self._cache.collect()
            return self._pool.allocate()


def required_turns(turns: list[tuple[float, ...]] | None) -> list[tuple[float, ...]]:
    """What turns keys to other positions; see `Store.turns`.

    Raises:
        UnsupportedModelError: nothing does.
    """
    if turns is None:
        raise UnsupportedModelError(
            "a full context cannot forget its older tokens: this model scales keys after RoPE, "
            "so they cannot be turned to other positions; take `context_policy` error, or a "
            "larger `ctx_size`"
        )
    return turns
