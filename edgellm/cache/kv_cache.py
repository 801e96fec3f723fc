"""The KV cache: pools of blocks that all sequences of a model share, one per cache group.

A prefix that any earlier sequence computed is found again, in memory or on disk. The prefix may end
at any token if all layers see all positions, else only where the blocks of its windows still exist,
and with layers that have states only where a snapshot was taken or the earlier sequence ended.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.block_store import BlockStore, pack, packed_size, unpack
from edgellm.cache.eviction import EvictionPolicy
from edgellm.cache.group_table import GroupBlocks, StateTable
from edgellm.cache.groups import (
    Blocks,
    CacheGroup,
    Group,
    StateGroup,
    places,
    resident_blocks,
    rows_at_once,
    stored_groups,
)
from edgellm.cache.head_table import HeadTable
from edgellm.cache.prefix_index import Match, PrefixIndex, Root
from edgellm.cache.sequence import Sequence
from edgellm.cache.spilled_pool import spilled_pool
from edgellm.errors import CacheFullError
from edgellm.kernels.kv_blocks import (
    BLOCK,
    KVFormats,
    SealedBlocks,
    allocate,
    seals,
)
from edgellm.kernels.sealed_blocks import allocate_sealed
from edgellm.kernels.state_blocks import allocate_states

if TYPE_CHECKING:
    from edgellm.kernels.gpu.kv_blocks import DevicePool  # imports torch

# Snapshots of states of a sequence that are written to a store: of the end of the last full block
# that has one, and of one before it, where a prompt that differs in its last tokens goes on.
_WRITTEN_STATES = 2


class Holder(Protocol):
    """A holder of blocks that may do without them for a while."""

    @property
    def recomputable(self) -> bool:
        """Whether it holds blocks, and they would come out the same if computed again."""

    def give_back(self) -> None:
        """Release the blocks."""


@dataclass(frozen=True)
class PackedBlocks:
    """K and V of a sequence outside the cache.

    Attributes:
        tokens, shareable: see `Sequence`.
        firsts: number of the first whole block in each group.
        heads: of a condensed context, the number of blocks of each KV head in each group, None
            where it is whole.
        data: the blocks, group by group.
    """

    tokens: list[int]
    shareable: int | None
    firsts: list[int]
    heads: list[list[int] | None]
    data: bytes | memoryview


class KVCache:
    """The KV cache of one loaded model: pools of blocks and prefix index.

    One thread uses it. Any thread may make empty sequences, and drop sequences.

    Args:
        groups: cache groups of the model, see `cache_groups`.
        format: storage format of K and V, or those of layers.
        ctx_size: maximum of tokens of one sequence.
        blocks: number of blocks in each pool, at least as many as one full sequence needs. In
            groups that do not keep all, only the blocks that full sequences of as many tokens need
            get memory, unless many short sequences are open at once; so snapshots of states go
            before the K and V of their tokens.
        policy: eviction policy of layers that see all positions; None: they keep all blocks.
        drafts: further blocks of states, for rows of drafts of all sequences of a step; see
            `DRAFT_STATES`.
        fingerprint: bytes that identify model and format in the hashes that name blocks.
        key_offsets: common part of each layer's keys, see `kernels/kv_blocks.py`.
        rope_frequencies: see `rope_frequencies`; None if keys cannot be moved to other positions.
        defer: runs a function between two changes, in the thread that uses the cache; None: runs it
            at once.
        spill: folder of a file for the pools of sealed blocks, see `spilled_pool`; None: memory.

    Attributes:
        groups: cache groups, layers that share blocks, with their blocks.
        index: prefix index of all cached blocks.
        rows_at_once: maximum of tokens that one step should add to a sequence.
        places: group number of each layer, and its place among the group's layers.
        rope_frequencies: RoPE frequencies of each layer, in radians per position; None if keys are
            changed after RoPE, or blocks are sealed or evicted or layers have states, which cannot
            forget tokens.
        policy: see above.
        has_states: whether layers have states, so that a sequence that drops its last tokens goes
            back to a snapshot, unless they are a draft.
        disk: store for full blocks that outlive the process, or None.
    """

    def __init__(
        self,
        groups: SequenceOf[Group],
        *,
        format: KVFormats,
        ctx_size: int,
        blocks: int,
        fingerprint: bytes,
        drafts: int = 0,
        policy: EvictionPolicy | None = None,
        key_offsets: SequenceOf[NDArray[np.float32]] | None = None,
        rope_frequencies: list[tuple[float, ...]] | None = None,
        defer: Callable[[Callable[[], None]], object] | None = None,
        spill: Path | None = None,
    ) -> None:
        groups = stored_groups(groups, format, policy)
        self.ctx_size = ctx_size
        self.format = format
        self.places = places(groups)
        self.index = PrefixIndex(fingerprint, groups)
        self.rows_at_once = rows_at_once(groups, ctx_size)
        resident = resident_blocks(groups, ctx_size=ctx_size, blocks=blocks, drafts=drafts)
        counts = [blocks + drafts * isinstance(group, StateGroup) for group in groups]
        pools = _allocate(groups, counts, key_offsets=key_offsets, spill=spill)
        self.groups = [
            GroupBlocks(
                number=number,
                group=group,
                blocks=pools[number],
                pool=BlockPool(counts[number], self.index, group=number, resident=resident[number]),
                index=self.index,
            )
            for number, group in enumerate(groups)
        ]
        self._drafts = drafts
        self.has_states = any(isinstance(group, StateGroup) for group in groups)
        evicting = any(isinstance(group, CacheGroup) and group.policy for group in groups)
        self.policy = policy if evicting else None
        fixed = self.has_states or seals(format) or self.policy is not None
        self.rope_frequencies = None if fixed else rope_frequencies
        self.disk: BlockStore | None = None
        self._defer = defer
        self._dropped: deque[Sequence] = deque()
        self._resting: WeakKeyDictionary[Holder, None] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the pools when every block is in use."""
        return sum(group.blocks.nbytes for group in self.groups)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states after one token."""
        groups = (g for g in self.groups if isinstance(g.group, StateGroup))
        return sum(g.blocks.nbytes // g.blocks.count for g in groups)

    @property
    def used_blocks(self) -> int:
        """Number of blocks that sequences hold; cached blocks without a sequence do not count."""
        return sum(group.pool.used for group in self.groups)

    def drop(self, sequence: Sequence) -> None:
        """Close a sequence that is not reachable, between two changes; safe from `__del__`."""
        self._dropped.append(sequence)
        if self._defer is None:
            self.close_dropped()
        else:
            self._defer(self.close_dropped)

    def close_dropped(self) -> None:
        """Close all dropped sequences; may be called in the middle of a change."""
        while self._dropped:
            self._dropped.popleft().close()

    def rest(self, holder: Holder) -> None:
        """Let others have a holder's blocks until `wake`, after those that rest already."""
        self.wake(holder)
        self._resting[holder] = None

    def wake(self, holder: Holder) -> None:
        """Leave a holder its blocks from now on."""
        self._resting.pop(holder, None)

    def reclaim(self) -> bool:
        """Free blocks: of unreachable sequences, or else of the holder that has rested longest.

        Returns:
            False if there are none to free.
        """
        if self._dropped:
            self.close_dropped()
            return True
        for holder in list(self._resting):
            if holder.recomputable:
                holder.give_back()
                return True
        return False

    def use_device(self, device: str) -> list[DevicePool]:
        """Keep a replica of all blocks in a device's memory as well, from the first call on.

        Returns:
            The blocks on the device, of each group.
        """
        from edgellm.cache.replica import Replica  # imports torch

        pools = []
        for group in self.groups:
            group.replica = group.replica or Replica(group.blocks, device)
            pools.append(group.replica.device)
        return pools

    def sequence(self, tokens: SequenceOf[int] = (), *, root: Root | None = None) -> Sequence:
        """Open a sequence that starts with the longest cached prefix of `tokens`.

        Args:
            root: root of the names of the sequence's blocks; see `PrefixIndex.salted_root`.
        """
        if self.disk is not None:
            longer = self._read_on(tokens, self.disk, root)
            if longer is not None:
                return longer
        match = self.index.match(tokens, root=root)
        return self._holding(match, tokens, match.length, root)

    def cached_prefix(self, tokens: SequenceOf[int], *, root: Root | None = None) -> int:
        """Return the number of tokens that `sequence(tokens)` would find cached."""
        match = self.index.match(tokens, root=root)
        if self.disk is None:
            return match.length
        return max(match.length, BLOCK * self._blocks_in(self.disk, match, tokens, root))

    @property
    def free_blocks(self) -> list[int]:
        """Number of blocks of each group that no sequence holds."""
        return [group.pool.available for group in self.groups]

    def draft_room(self, sequences: int) -> int | None:
        """Return the draft rows that each of some sequences may have in a step.

        None: any number, as no layer has states. Blocks of others are not taken for drafts.
        """
        free = [g.pool.available for g in self.groups if isinstance(g.group, StateGroup)]
        return max(0, min(self._drafts, min(free) - sequences) // sequences) if free else None

    def needed(self, sequence: Sequence, length: int) -> list[int]:
        """Return the blocks of each group that a sequence lacks for `length` tokens and another."""
        start, rows = len(sequence), self.rows_at_once
        return [table.lacking(start, length + 1, rows=rows) for table in sequence.tables]

    def keep(self, sequence: Sequence) -> None:
        """Write a sequence's full blocks to disk, if the cache has a disk store."""
        if self.disk is not None:
            self.write(sequence, self.disk)

    def write(self, sequence: Sequence, store: BlockStore) -> None:
        """Write a sequence's full blocks that a store lacks to it, as long as it has room."""
        if len(sequence) < BLOCK:
            return
        shared = sequence.tokens[: sequence.shareable]
        names = list(self.index.names(shared, root=sequence.root))
        for table in sequence.tables:
            if isinstance(table, StateTable):
                known = sequence.snapshots(table, _WRITTEN_STATES)
            else:
                known = [(i, block) for i, block in sequence.known(table) if i < len(names)]
            named = [(group_name(names[i], table.store), block) for i, block in known]
            with store.pin(name for name, _ in named):
                lacking = [(name, block) for name, block in named if not store.has(name)]
                blocks = table.store.on_host([block for _, block in lacking])
                if not all(store.write(name, pack(blocks, [block])) for name, block in lacking):
                    return

    def read(self, tokens: SequenceOf[int], store: BlockStore, *, root: Root | None = None) -> int:
        """Read blocks of a prefix that the pools lack from a store, for later sequences.

        Returns:
            The number of leading tokens that `sequence` now finds in memory.
        """
        sequence = self._read_on(tokens, store, root)
        if sequence is not None:
            sequence.close()
        return self.index.match(tokens, root=root).length

    def pack(self, sequence: Sequence) -> PackedBlocks:
        """Pack the K and V of a sequence as bytes, without most blocks that windows have passed."""
        firsts, parts = [], []
        for table in sequence.tables:
            known = sequence.known(table)
            ids, numbers = [block for _, block in known], [number for number, _ in known]
            # sinks may lie apart from the run of the others
            gaps = (i for i in range(1, len(known)) if numbers[i] != numbers[i - 1] + 1)
            run = max(gaps, default=0)
            firsts.append(numbers[run] if known else table.first)
            if isinstance(table, HeadTable):
                ids, run = [*table.of_heads, *ids], len(table.of_heads)
            rows = max(0, len(sequence) - (firsts[-1] - run) * BLOCK)
            parts.append(pack(table.store.on_host(ids), ids, tokens=rows))
        heads = [None if each is None else np.diff(each.starts).tolist() for each in sequence.heads]
        data = b"".join(parts)
        return PackedBlocks(list(sequence.tokens), sequence.shareable, firsts, heads, data)

    def can_begin(self, packed: PackedBlocks) -> bool:
        """Whether a sequence can go on with blocks that were packed, whatever data they have."""
        firsts, heads, length = packed.firsts, packed.heads, len(packed.tokens)
        if len(firsts) != len(self.groups) or len(heads) not in (0, len(self.groups)):
            return False
        limits = [group.group.first_block(length) for group in self.groups]
        for number, counts in enumerate(heads):
            store = self.groups[number]
            if counts is None:
                continue
            if not store.group.condensable or len(counts) != store.kv.layers * store.kv.kv_heads:
                return False
            if not all(1 <= count <= firsts[number] for count in counts):
                return False
            limits[number] = length // BLOCK
        return all(first <= limit for first, limit in zip(firsts, limits, strict=True))

    def unpack(self, sequence: Sequence, packed: PackedBlocks) -> bool:
        """Fill an empty sequence with the result of `pack`; False if the data's size differs.

        Raises:
            CacheFullError: no block is free.
        """
        data = memoryview(packed.data)
        sequence.open_heads(packed.firsts, packed.heads)
        with sequence.reserved(len(packed.tokens), windowed=False):
            sequence.open_seen(len(packed.tokens), packed.firsts)
            sequence.use_host()
            for table in sequence.tables:
                blocks = table.store.blocks
                size = len(table.held) * (blocks.nbytes // blocks.count)
                if not unpack(blocks, table.held, data[:size]):
                    return False
                data = data[size:]
            if len(data):
                return False
            sequence.shareable = packed.shareable
            sequence.commit(packed.tokens)
        return True

    def _holding(
        self, match: Match, tokens: SequenceOf[int], length: int, root: Root | None
    ) -> Sequence:
        """Open a sequence of the first `length` tokens of a match."""
        count = -(-length // BLOCK)
        tables = [
            group.table(blocks[:count], length=length)
            for group, blocks in zip(self.groups, match.tables, strict=True)
        ]
        return Sequence(self, tables, list(tokens[:length]), root=root)

    def _read_on(
        self, tokens: SequenceOf[int], store: BlockStore, root: Root | None
    ) -> Sequence | None:
        """Open a sequence of the full blocks of a match and further ones from a store.

        None if the store has no blocks that make the prefix longer.
        """
        while True:
            match = self.index.match(tokens, root=root)
            end = self._blocks_in(store, match, tokens, root)
            if end * BLOCK <= match.length:
                return None
            sequence = self._holding(match, tokens, match.length // BLOCK * BLOCK, root)
            if self._fill(sequence, tokens[: end * BLOCK], store):
                return sequence
            # blocks reserved and given back may have been cached blocks of the match
            sequence.close()
            tokens = tokens[: (end - 1) * BLOCK]

    def _fill(self, sequence: Sequence, tokens: SequenceOf[int], store: BlockStore) -> bool:
        """Read the blocks of `tokens` that a sequence lacks from a store.

        False if a block is missing or damaged, or a pool is full.
        """
        begin = len(sequence) // BLOCK
        names = list(self.index.names(tokens, root=sequence.root))
        there = [set(table.numbered) for table in sequence.tables]
        try:
            with sequence.reserved(len(tokens) - len(sequence), windowed=False):
                sequence.open_seen(len(tokens))
                sequence.use_host()
                for table, held in zip(sequence.tables, there, strict=True):
                    blocks = table.store.blocks
                    for i, block in table.numbered:
                        if (i, block) in held:
                            continue
                        name = group_name(names[i], table.store)
                        data = store.read(name, size=packed_size(blocks))
                        if data is None or not unpack(blocks, [block], data):
                            return False
                sequence.commit(tokens[begin * BLOCK :])
        except CacheFullError:
            return False
        return True

    def _blocks_in(
        self, store: BlockStore, match: Match, tokens: SequenceOf[int], root: Root | None
    ) -> int:
        """Count the leading full blocks of `tokens` in memory and, after those, in a store.

        Blocks of the store count only as far as the pools have room for them.
        """
        names = list(self.index.names(tokens, root=root))
        begin = match.length // BLOCK
        there = []  # for each group, whether each block is there
        for group, blocks in zip(self.groups, match.tables, strict=True):
            in_memory = [block is not None for block in blocks[:begin]]
            in_memory += [False] * (len(names) - begin)
            there.append(
                [
                    known or store.has(group_name(name, group))
                    for known, name in zip(in_memory, names, strict=True)
                ]
            )
        limit = begin + min(
            group.pool.available - sum(block in group.pool for block in blocks if block is not None)
            for group, blocks in zip(self.groups, match.tables, strict=True)
        )
        for end in range(min(len(names), limit), begin, -1):
            seen = [group.group.seen(end * BLOCK) for group in self.groups]
            if all(all(t[i] for i in of) for t, of in zip(there, seen, strict=True)):
                return end
        return begin


def group_name(name: bytes, group: GroupBlocks) -> bytes:
    """Return the name of a group's part of a block."""
    return name if group.number == 0 else hashlib.sha256(name + bytes([group.number])).digest()


def _allocate(
    groups: SequenceOf[Group],
    counts: SequenceOf[int],
    *,
    key_offsets: SequenceOf[NDArray[np.float32]] | None,
    spill: Path | None,
) -> list[Blocks]:
    """Allocate the pools of groups, each of so many blocks."""
    pools: list[Blocks] = []
    sealed: dict[tuple[int, ...], SealedBlocks] = {}
    for group, blocks in reversed(list(zip(groups, counts, strict=True))):
        layers = group.layers
        if isinstance(group, StateGroup):
            states = allocate_states(blocks=blocks, layers=len(layers), elements=group.elements)
            pools.append(states)
            continue
        sizes = {"blocks": blocks, "layers": len(layers)}
        sizes |= {"kv_heads": group.kv_heads, "head_dim": group.head_dim}
        if group.part == "sealed":
            if spill is None:
                sealed[layers] = allocate_sealed(format=group.format, **sizes)
            else:
                one = allocate_sealed(format=group.format, **{**sizes, "blocks": 1})
                sealed[layers] = spilled_pool(one, blocks=blocks, folder=spill)
            pools.append(sealed[layers])
            continue
        offset = None if key_offsets is None else np.stack([key_offsets[layer] for layer in layers])
        pools.append(
            allocate(
                format=group.format,
                latent=group.latent,
                key_offset=offset,
                sealed=sealed.get(layers),
                recent=0 if group.policy is None else group.policy.recent,
                **sizes,
            )
        )
    return pools[::-1]
