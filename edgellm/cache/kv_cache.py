"""The KV cache: one pool of blocks that all sequences of a model share.

A prefix that any earlier sequence computed is found again at any token, in memory or on disk.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.disk_cache import DiskCache
from edgellm.cache.prefix_index import BlockPool, PrefixIndex
from edgellm.cache.sequence import Sequence
from edgellm.checks import check_choice
from edgellm.errors import OptionError
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.kv_blocks import (
    BLOCK,
    KV_FORMATS,
    KVBlocks,
    KVFormat,
    allocate,
    block_bytes,
)

if TYPE_CHECKING:
    from edgellm.cache.replica import Replica  # imports torch


class KVCache:
    """The pool of one loaded model.

    Args:
        format: how K and V are stored.
        ctx_size: tokens that one sequence may hold.
        blocks: blocks in the pool, at least what one full sequence needs.
        fingerprint: names the model and format in block hashes.
        key_offset: of the model's keys, see `kernels/kv_blocks.py`.

    Attributes:
        replica: the same blocks in a device's memory, if some of the work is done there.
        lock: for whoever uses the cache. No context manager of Python's own stands around it: an
            interrupt in one would leave it taken.
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
        key_offset: NDArray[np.float32] | None = None,
    ) -> None:
        check_choice("kv_format", format, KV_FORMATS)
        if format == "int4" and config.head_dim % 8:
            raise OptionError(
                f"`kv_format` is 'int4': this model's head_dim is {config.head_dim}, and int4 "
                "takes multiples of 8; int8 takes any"
            )
        self.ctx_size = ctx_size
        self.blocks: KVBlocks = allocate(
            format=format,
            blocks=blocks,
            layers=config.layer_count,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            key_offset=key_offset,
        )
        self.replica: Replica | None = None
        self.disk: DiskCache | None = None
        self.lock = threading.Lock()
        self._deferred: deque[Callable[[], None]] = deque()
        self.turns: list[tuple[float, ...]] | None = _turns(config)
        self._index = PrefixIndex(fingerprint)
        self._pool = BlockPool(blocks, self._index)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold; cached prefixes that nobody holds do not count."""
        return self._pool.used

    def soon(self, change: Callable[[], None]) -> None:
        """Change the cache under the lock: now if it is free, else when its next holder collects.

        For whatever the garbage collector may call, in a thread that has the lock already.
        """
        self._deferred.append(change)
        if self.lock.acquire(blocking=False):
            try:
                self.collect()
            finally:
                self.lock.release()

    def collect(self) -> None:
        """Make the changes that were deferred; for whoever has the lock, before anything else."""
        while self._deferred:
            self._deferred.popleft()()

    def on_device(self, device: str) -> Replica:
        """The same blocks in a device's memory, made on the first call."""
        if self.replica is None:
            from edgellm.cache.replica import Replica

            self.replica = Replica(self.blocks, device)
        return self.replica

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
            names = self._index.names(sequence.tokens[: sequence.shareable])
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


def _turns(config: ModelConfig) -> list[tuple[float, ...]] | None:
    """See `Store.turns`."""
    if config.attention.qk_norm == "head_after_rope":
        return None
    return [config.rope_of(layer).inv_freq for layer in range(config.layer_count)]


def cache_bytes(config: ModelConfig, *, format: KVFormat, blocks: int) -> int:
    """Memory of a pool when every block is in use."""
    return blocks * block_bytes(
        format=format, layers=config.layer_count, kv_heads=config.kv_heads, head_dim=config.head_dim
    )


def blocks_for(ctx_size: int) -> int:
    """Blocks of a pool for one full sequence and the copy that a rewound tail needs."""
    return -(-ctx_size // BLOCK) + 1
