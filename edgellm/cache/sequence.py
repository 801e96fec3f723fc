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
    from edgellm.cache.mirror import Mirror  # imports torch


class Store(Protocol):
    """Where the K and V of sequences are; see `KVCache`.

    Attributes:
        turns: RoPE's frequencies in each layer, in radians per position; None where keys are not as
            RoPE left them.
    """

    ctx_size: int
    blocks: KVBlocks
    mirror: Mirror | None
    turns: list[tuple[float, ...]] | None

    def soon(self, change: Callable[[], None]) -> None: ...

    def collect(self) -> None: ...


class Sequence:
    """One sequence: its tokens and the blocks that hold their K and V.

    One that is dropped without `close` is closed then, or by whoever uses the cache next.

    Attributes:
        exact: so many of the first tokens have the K and V that they alone determine, and may be
            found by others; None is all. What was behind a gap remembers what stood in it.
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
        self.exact: int | None = None

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
        if self._cache.mirror is not None:
            self._cache.mirror.use("host", self.table, len(self))

    def use_device(self) -> None:
        """Bring the sequence to the device, to attend to it and to write behind it there."""
        if self._cache.mirror is not None:
            self._cache.mirror.use("device", self.table, len(self))

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
        for i in range(first, len(self.tokens[: self.exact]) // BLOCK):
            self._index.insert(self.tokens, i, self.table[i])

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        if not 0 <= length <= len(self):
            raise OptionError(
                f"rewind to {length}: the sequence has {len(self)} tokens; "
                f"0 to {len(self)} is allowed"
            )
        del self.tokens[length:]
        if self.exact is not None and length <= self.exact:
            self.exact = None
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
        other.exact = self.exact
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
        self.exact = len(tokens[:keep][: self.exact])
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
            if self._cache.mirror is not None:
                self._cache.mirror.use("host", self.table, first * BLOCK)

    def close(self) -> None:
        """Give the blocks back; what they hold can still be found until it is overwritten."""
        last = len(self) // BLOCK
        rows = len(self) % BLOCK
        if rows and self.exact is None and not self._index.holds(self.table[last]):
            self._index.insert(self.tokens, last, self.table[last])
        self.truncate(0)

    def _own_last_block(self, rows: int) -> None:
        """Copy the last block's `rows` tokens if another sequence or the index knows it."""
        last = self.table[-1]
        if self._pool.references(last) == 1 and not self._index.holds(last):
            return
        copy = self._allocate()
        (self._cache.mirror or self._cache.blocks).copy_rows(last, copy, rows)
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
