"""The KV cache: sequences as block tables over one shared pool.

Full blocks are immutable and shared; only a sequence's last block is written to, and it is copied
first if anyone else can see it. So fork and rewind copy at most one block, and a prefix that any
earlier sequence computed is found again at any token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edgellm.disk_cache import DiskCache
from edgellm.errors import ContextOverflowError, OptionError
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.kv_blocks import (
    BLOCK,
    KV_FORMATS,
    KVBlocks,
    KVFormat,
    allocate,
    block_bytes,
)
from edgellm.prefix_index import BlockPool, PrefixIndex

if TYPE_CHECKING:
    from edgellm.mirror import Mirror  # imports torch


class KVCache:
    """The pool of one loaded model.

    Args:
        format: how K and V are stored.
        ctx_size: tokens that one sequence may hold.
        blocks: blocks in the pool, at least what one full sequence needs.
        fingerprint: names the model and format in block hashes.

    Attributes:
        mirror: the same blocks in a device's memory, if some of the work is done there.
        disk: full blocks that outlive the process, if they are kept.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        format: KVFormat,
        ctx_size: int,
        blocks: int,
        fingerprint: bytes,
    ) -> None:
        check_format(format)
        if format == "int4" and config.head_dim % 8:
            raise OptionError(
                f"kv_format 'int4': this model's head_dim is {config.head_dim}, and int4 takes "
                "multiples of 8; int8 takes any"
            )
        self.ctx_size = ctx_size
        self.blocks: KVBlocks = allocate(
            format=format,
            blocks=blocks,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        )
        self.mirror: Mirror | None = None
        self.disk: DiskCache | None = None
        self._index = PrefixIndex(fingerprint)
        self._pool = BlockPool(blocks, self._index)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold; cached prefixes that nobody holds do not count."""
        return self._pool.used

    def sequence(self, tokens: SequenceOf[int] = ()) -> Sequence:
        """A sequence that starts with the longest cached prefix of `tokens`."""
        table, length = [], 0
        for block, rows in self._index.match(tokens):
            self._pool.retain(block)
            table.append(block)
            length += rows
        found = Sequence(self, self._pool, self._index, table, list(tokens[:length]))
        if self.disk is not None:
            self._read_on(found, tokens, self.disk)
        return found

    def cached_prefix(self, tokens: SequenceOf[int]) -> int:
        """Tokens that `sequence(tokens)` would find."""
        found = sum(rows for _, rows in self._index.match(tokens))
        if self.disk is not None:
            for name in itertools.islice(self._index.names(tokens), found // BLOCK, None):
                if not self.disk.holds(name):
                    break
                found = (found // BLOCK + 1) * BLOCK
        return found

    def keep(self, sequence: Sequence) -> None:
        """Write a sequence's full blocks to disk, if blocks are kept there."""
        if self.disk is not None and len(sequence) >= BLOCK:
            sequence.use_host()
            names = self._index.names(sequence.tokens)
            self.disk.save(zip(names, sequence.table, strict=False))

    def _read_on(self, sequence: Sequence, tokens: SequenceOf[int], disk: DiskCache) -> None:
        """Extend a sequence by the blocks of `tokens` that are on disk."""
        first = len(sequence) // BLOCK
        for index, name in enumerate(
            itertools.islice(self._index.names(tokens), first, None), first
        ):
            if not disk.holds(name) or self._pool.available == 0:
                return
            sequence.truncate(index * BLOCK)
            with sequence.reserved(BLOCK):
                sequence.use_host()
                if not disk.load(name, sequence.table[index]):
                    return
                sequence.commit(tokens[index * BLOCK : (index + 1) * BLOCK])


class Sequence:
    """One sequence: its tokens and the blocks that hold their K and V."""

    def __init__(
        self,
        cache: KVCache,
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

    def __len__(self) -> int:
        return len(self.tokens)

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
                "shorten the prompt or raise the context size (--ctx-size)"
            )
        rows = len(self) % BLOCK
        if rows:
            self._own_last_block(rows)
        while len(self.table) * BLOCK < end:
            self.table.append(self._pool.allocate())

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
        for i in range(first, len(self) // BLOCK):
            self._index.insert(self.tokens, i, self.table[i])

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        if not 0 <= length <= len(self):
            raise OptionError(
                f"rewind to {length}: the sequence has {len(self)} tokens; "
                f"0 to {len(self)} is allowed"
            )
        del self.tokens[length:]
        keep = -(-length // BLOCK)
        for block in self.table[keep:]:
            self._pool.release(block)
        del self.table[keep:]

    def fork(self) -> Sequence:
        """Another sequence with the same tokens, sharing every block."""
        for block in self.table:
            self._pool.retain(block)
        return Sequence(self._cache, self._pool, self._index, list(self.table), list(self.tokens))

    def close(self) -> None:
        """Give the blocks back; what they hold can still be found until it is overwritten."""
        last = len(self) // BLOCK
        if len(self) % BLOCK and not self._index.holds(self.table[last]):
            self._index.insert(self.tokens, last, self.table[last])
        self.truncate(0)

    def _own_last_block(self, rows: int) -> None:
        """Copy the last block's `rows` tokens if another sequence or the index knows it."""
        last = self.table[-1]
        if self._pool.references(last) == 1 and not self._index.holds(last):
            return
        copy = self._pool.allocate()
        (self._cache.mirror or self._cache.blocks).copy_rows(last, copy, rows)
        self.table[-1] = copy
        self._pool.release(last)


def check_format(format: str) -> None:
    if format not in KV_FORMATS:
        raise OptionError(f"kv_format {format!r}: allowed are {', '.join(KV_FORMATS)}")


def cache_bytes(config: ModelConfig, *, format: KVFormat, blocks: int) -> int:
    """Memory of a pool when every block is in use."""
    return blocks * block_bytes(
        format=format, layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim
    )


def blocks_for(ctx_size: int) -> int:
    """Blocks of a pool for one full sequence and the copy that a rewound tail needs."""
    return -(-ctx_size // BLOCK) + 1
