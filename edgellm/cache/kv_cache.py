"""The KV cache: pools of blocks that all sequences of a model share, one per cache group.

A prefix that any earlier sequence computed is found again, in memory or on disk: at any token where
all layers see all positions, else as far as the blocks of a window are still there.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.block_store import BlockStore, pack, packed_size, unpack
from edgellm.cache.change import Changes
from edgellm.cache.group_table import GroupBlocks, GroupTable
from edgellm.cache.groups import cache_groups, places, resident_blocks, rows_at_once
from edgellm.cache.prefix_index import Match, PrefixIndex
from edgellm.cache.sequence import Sequence
from edgellm.checks import check_choice
from edgellm.errors import CacheFullError, OptionError
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.kv_blocks import BLOCK, KV_FORMATS, KVFormat, allocate


class KVCache:
    """The pools of one loaded model.

    Args:
        format: how K and V are stored.
        ctx_size: tokens that one sequence may hold.
        blocks: blocks in each pool, at least what one full sequence needs. Of groups with a window
            only what so many tokens in full sequences need has memory, unless many short sequences
            are open at once.
        fingerprint: names the model and format in block hashes.
        key_offset: of the model's keys, see `kernels/kv_blocks.py`.

    Attributes:
        groups: the layers that share blocks, with their blocks.
        rows_at_once: tokens that one step should add to a sequence at most.
        places: for each layer its group, and which of the group's layers it is.
        rope_frequencies: in each layer, in radians per position; None where keys are not as RoPE
            left them.
        disk: where full blocks are kept that outlive the process, if they are.
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
        self.format = format
        groups = cache_groups(config)
        self.places = places(groups)
        self.index = PrefixIndex(fingerprint, groups)
        self.rows_at_once = rows_at_once(groups, ctx_size)
        resident = resident_blocks(groups, ctx_size=ctx_size, blocks=blocks)
        self.groups = [
            GroupBlocks(
                number=number,
                group=group,
                blocks=allocate(
                    format=format,
                    blocks=blocks,
                    layers=len(group.layers),
                    kv_heads=config.kv_heads,
                    head_dim=config.head_dim,
                    key_offset=None if key_offset is None else key_offset[list(group.layers)],
                ),
                pool=BlockPool(blocks, self.index, group=number, resident=resident[number]),
                index=self.index,
            )
            for number, group in enumerate(groups)
        ]
        self.rope_frequencies = _rope_frequencies(config)
        self.disk: BlockStore | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._changes = Changes(self.groups, self.index)

    @property
    def lock(self) -> threading.Lock:
        """For whoever uses the cache.

        Raises:
            OptionError: the process was forked while another thread had it.
        """
        # no context manager of Python's own stands around it: an interrupt in one would leave it
        # taken
        if self._process != os.getpid():
            if self._lock.locked():
                raise OptionError(
                    "this process was forked while another thread used the model, and has half of "
                    "a change; load the model in the new process, or fork while nothing is answered"
                )
            self._process = os.getpid()
        return self._lock

    @property
    def nbytes(self) -> int:
        """Memory of the pools when every block is in use."""
        return sum(group.blocks.nbytes for group in self.groups)

    @property
    def touched_bytes(self) -> int:
        """Memory of the blocks that have been used."""
        each = ((g.blocks.nbytes // g.blocks.count, g.pool.touched) for g in self.groups)
        return sum(size * count for size, count in each)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold; cached prefixes that nobody holds do not count."""
        return sum(group.pool.used for group in self.groups)

    def change(self) -> Changes:
        """A context manager around changes, for whoever has the lock; those deferred come first."""
        return self._changes

    def soon(self, change: Callable[[], None]) -> None:
        """Change the cache under the lock: now if it is free, else when its next holder begins.

        For whatever the garbage collector may call, in a thread that has the lock already. The
        change may be made twice, if an interrupt comes.
        """
        self._changes.defer(change)
        self._change_now()

    def drop(self, sequence: Sequence) -> None:
        """Close a sequence that nobody can reach any more, likewise; if need be sooner."""
        self._changes.drop(sequence)
        self._change_now()

    def close_dropped(self) -> None:
        """Close those, in the middle of a change."""
        self._changes.close_dropped()

    def register(self, sequence: Sequence) -> None:
        """Know of a sequence that may hold blocks."""
        self._changes.register(sequence)

    def _change_now(self) -> None:
        """Make what was deferred, unless somebody has the lock."""
        # An interrupt comes after a call, and would leave what `acquire` has taken locked. `for`
        # has it in a variable without one.
        for taken in map(self._lock.acquire, (False,)):
            if taken:
                try:
                    with self._changes:
                        pass
                finally:
                    self._lock.release()

    def use_device(self, device: str) -> None:
        """Have the same blocks in a device's memory as well, from the first call on."""
        from edgellm.cache.replica import Replica  # imports torch

        for group in self.groups:
            group.replica = group.replica or Replica(group.blocks, device)

    def sequence(self, tokens: SequenceOf[int] = (), *, root: bytes | None = None) -> Sequence:
        """A sequence that starts with the longest cached prefix of `tokens`.

        Args:
            root: what is before them; see `PrefixIndex.salted_root`.
        """
        if self.disk is not None:
            longer = self._read_on(tokens, self.disk, root)
            if longer is not None:
                return longer
        match = self.index.match(tokens, root=root)
        return self._holding(match, tokens, match.length, root)

    def cached_prefix(self, tokens: SequenceOf[int], *, root: bytes | None = None) -> int:
        """Tokens that `sequence(tokens)` would find."""
        match = self.index.match(tokens, root=root)
        if self.disk is None:
            return match.length
        return max(match.length, BLOCK * self._blocks_in(self.disk, match, tokens, root))

    def has_room(self, growing: Iterable[tuple[Sequence, int]]) -> bool:
        """Whether sequences can all grow to so many tokens, and one more, at the same time."""
        needed = [0] * len(self.groups)
        for sequence, length in growing:
            end = length // BLOCK + 1
            for number, table in enumerate(sequence.tables):
                first = max(table.first, table.store.group.first_block(length))
                needed[number] += max(0, end - max(first, len(table.ids)))
                needed[number] += table.copies_last(len(sequence))
        return all(
            count <= group.pool.available for count, group in zip(needed, self.groups, strict=True)
        )

    def keep(self, sequence: Sequence) -> None:
        """Write a sequence's full blocks to disk, if blocks are kept there."""
        if self.disk is not None:
            self.write(sequence, self.disk)

    def write(self, sequence: Sequence, store: BlockStore) -> None:
        """Write those of a sequence's full blocks to a store that it has not, while it has room."""
        if len(sequence) < BLOCK:
            return
        sequence.use_host()
        shared = sequence.tokens[: sequence.shareable]
        names = list(self.index.names(shared, root=sequence.root))
        for table in sequence.tables:
            known = [(i, block) for i, block in sequence.known(table) if i < len(names)]
            named = [(group_name(names[i], table.store), block) for i, block in known]
            with store.pin(name for name, _ in named):
                for name, block in named:
                    if store.has(name) or store.write(name, pack(table.store.blocks, [block])):
                        continue
                    return

    def read(self, tokens: SequenceOf[int], store: BlockStore, *, root: bytes | None = None) -> int:
        """Read what a store has of a prefix and the pools have not, for sequences to come.

        Returns:
            How many of the tokens `sequence` finds in memory now.
        """
        sequence = self._read_on(tokens, store, root)
        if sequence is not None:
            sequence.close()
        return self.index.match(tokens, root=root).length

    def pack(self, sequence: Sequence) -> tuple[list[int], bytes]:
        """The K and V of a sequence as bytes, without most of what windows have passed.

        Returns:
            The number of the first block of each group, and the blocks, group by group.
        """
        sequence.use_host()
        firsts, parts = [], []
        for table in sequence.tables:
            known = sequence.known(table)
            firsts.append(known[0][0] if known else table.first)
            rows = max(0, len(sequence) - firsts[-1] * BLOCK)
            ids = [block for _, block in known]
            parts.append(pack(table.store.blocks, ids, tokens=rows))
        return firsts, b"".join(parts)

    def can_begin(self, firsts: SequenceOf[int], length: int) -> bool:
        """Whether `length` tokens can go on without the blocks before these of each group."""
        limits = [group.group.first_block(length) for group in self.groups]
        if len(firsts) != len(limits):
            return False
        return all(first <= limit for first, limit in zip(firsts, limits, strict=True))

    def unpack(self, sequence: Sequence, data: memoryview) -> bool:
        """Fill the blocks that `Sequence.open_seen` reserved; False if the size differs."""
        sequence.use_host()
        for table in sequence.tables:
            blocks = table.store.blocks
            size = len(table.held) * (blocks.nbytes // blocks.count)
            if not unpack(blocks, table.held, data[:size]):
                return False
            data = data[size:]
        return len(data) == 0

    def _holding(
        self, match: Match, tokens: SequenceOf[int], length: int, root: bytes | None
    ) -> Sequence:
        """A sequence of the first `length` tokens of a match."""
        count = -(-length // BLOCK)
        tables = [
            GroupTable(group, blocks[:count])
            for group, blocks in zip(self.groups, match.tables, strict=True)
        ]
        return Sequence(self, tables, list(tokens[:length]), root=root)

    def _read_on(
        self, tokens: SequenceOf[int], store: BlockStore, root: bytes | None
    ) -> Sequence | None:
        """A sequence of the full blocks of a match and those in a store, if it is a longer one."""
        while True:
            match = self.index.match(tokens, root=root)
            end = self._blocks_in(store, match, tokens, root)
            if end * BLOCK <= match.length:
                return None
            sequence = self._holding(match, tokens, match.length // BLOCK * BLOCK, root)
            if self._fill(sequence, tokens[: end * BLOCK], store):
                return sequence
            # what was reserved and given back may have taken blocks of the match
            sequence.close()
            tokens = tokens[: (end - 1) * BLOCK]

    def _fill(self, sequence: Sequence, tokens: SequenceOf[int], store: BlockStore) -> bool:
        """Read the blocks of `tokens` that a sequence lacks; False if one is damaged, or the pool
        full."""
        begin, end = len(sequence) // BLOCK, len(tokens) // BLOCK
        names = list(self.index.names(tokens, root=sequence.root))
        try:
            with sequence.reserved(len(tokens) - len(sequence), windowed=False):
                sequence.open_seen(len(tokens))
                sequence.use_host()
                for table in sequence.tables:
                    blocks = table.store.blocks
                    for i in range(max(begin, table.first), end):
                        name = group_name(names[i], table.store)
                        data = store.read(name, size=packed_size(blocks))
                        if data is None or not unpack(blocks, [table.ids[i]], data):
                            return False
                sequence.commit(tokens[begin * BLOCK :])
        except CacheFullError:
            return False
        return True

    def _blocks_in(
        self, store: BlockStore, match: Match, tokens: SequenceOf[int], root: bytes | None
    ) -> int:
        """How many full blocks of `tokens` are there, in memory and behind those in a store."""
        names = list(self.index.names(tokens, root=root))
        begin = match.length // BLOCK
        there = []  # for each group, which blocks
        for group, blocks in zip(self.groups, match.tables, strict=True):
            in_memory = [block is not None for block in blocks[:begin]]
            there.append(
                [*in_memory, *(store.has(group_name(name, group)) for name in names[begin:])]
            )
        limit = begin + min(
            group.pool.available - sum(block in group.pool for block in blocks if block is not None)
            for group, blocks in zip(self.groups, match.tables, strict=True)
        )
        for end in range(min(len(names), limit), begin, -1):
            firsts = [group.group.first_block(end * BLOCK) for group in self.groups]
            if all(all(t[first:end]) for t, first in zip(there, firsts, strict=True)):
                return end
        return begin


def group_name(name: bytes, group: GroupBlocks) -> bytes:
    """The name of a group's part of a block."""
    return name if group.number == 0 else hashlib.sha256(name + bytes([group.number])).digest()


def _rope_frequencies(config: ModelConfig) -> list[tuple[float, ...]] | None:
    """See `KVCache.rope_frequencies`."""
    if config.attention.qk_norm == "head_after_rope":
        return None
    return [config.rope_of(layer).inv_freq for layer in range(config.layer_count)]
