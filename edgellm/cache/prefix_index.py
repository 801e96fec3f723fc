"""Index of cached KV blocks by content, to find prefixes of new requests. Pure Python."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Literal

from edgellm.cache.groups import Group, StateGroup
from edgellm.kernels.kv_blocks import BLOCK

# Reason why the cached prefix of a prompt goes no further; see `Stats.cache_end`.
CacheEnd = Literal["whole", "new", "differs", "reused", "scored"]
# Names that are kept of blocks whose memory was reused: half a million tokens, 0.5 MB.
_REMEMBERED = 4096
# Bits of a token's id in a name, below those of a mark.
_TOKEN_BITS = 30


@dataclass
class _Entry:
    """A cached block: its tokens under the name of all tokens before them.

    Attributes:
        parent: name of all tokens before the block.
        tokens: token ids in the block.
        blocks: block id in each group; None if the group has reused the memory or never had it.
        line: names of all tokens before each block up to this one; with states only.
    """

    parent: bytes
    tokens: tuple[int, ...]
    blocks: list[int | None]
    line: tuple[bytes, ...] = ()

    @property
    def end(self) -> int:
        """Number of tokens up to its end."""
        return (len(self.line) - 1) * BLOCK + len(self.tokens)

    @cached_property
    def name(self) -> bytes:
        """Name of all tokens up to its end, if it is full."""
        return chain(self.parent, self.tokens)


@dataclass(frozen=True)
class Root:
    """Beginning of the names of a sequence's blocks.

    Attributes:
        name: name of the empty prefix.
        start: position from which on tokens have a mark in names, as an adapter changes their K
            and V.
        mark: the mark, of the bits that no token id has.
    """

    name: bytes
    start: int = sys.maxsize
    mark: int = 0

    def named(self, tokens: Sequence[int], begin: int = 0) -> Sequence[int]:
        """Return tokens from position `begin` on as they stand in names."""
        plain = max(0, self.start - begin)
        if plain >= len(tokens):
            return tokens
        return [*tokens[:plain], *(token | self.mark for token in tokens[plain:])]

    def shifted(self, *, keep: int, discard: int) -> Root:
        """Return the root of a sequence that forgets `discard` tokens behind the first `keep`."""
        if not keep < self.start < sys.maxsize:
            return self
        return replace(self, start=max(keep, self.start - discard))


@dataclass(frozen=True)
class Match:
    """A cached prefix of a token sequence.

    Attributes:
        length: number of tokens in the prefix.
        tables: block ids of each group, first to last; None for blocks that a window has passed.
    """

    length: int
    tables: list[list[int | None]]


class PrefixIndex:
    """An index of blocks by content: a hash chain over a block's and all earlier tokens.

    Attributes:
        version: number of changes so far.
    """

    def __init__(self, fingerprint: bytes, groups: Sequence[Group]) -> None:
        self._groups = groups
        # states are of all tokens of a block, so its first tokens alone are no prefix
        self._whole_only = any(_has_states(group) for group in groups)
        self._root = hashlib.sha256(fingerprint).digest()
        self.version = 0
        self._children: dict[bytes, list[_Entry]] = {}
        self._entries: list[dict[int, _Entry]] = [{} for _ in groups]
        self._reused: OrderedDict[bytes, None] = OrderedDict()

    @property
    def root(self) -> bytes:
        """Name of the empty prefix, from the model's fingerprint, without a salt."""
        return self._root

    def salted_root(self, salt: str, *, start: int = sys.maxsize, changed_by: str = "") -> Root:
        """Return a root for requests that share blocks only under the same salt.

        The salt "" gives the name `root`.

        Args:
            start: position from which on K and V are for those alone who have the same
                `changed_by`, the digest of an adapter.
        """
        name = hashlib.sha256(self._root + salt.encode()).digest() if salt else self._root
        if not changed_by:
            return Root(name)
        mark = int.from_bytes(hashlib.sha256(changed_by.encode()).digest()[:4], "big") + 1
        return Root(name, start, mark << _TOKEN_BITS)

    def names(self, tokens: Sequence[int], *, root: Root | None = None) -> Iterator[bytes]:
        """Yield the names of a sequence's full blocks, first to last.

        Args:
            root: see `salted_root`; None: `root`.
        """
        root = root or Root(self._root)
        name, tokens = root.name, root.named(tokens)
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            name = chain(name, tokens[end - BLOCK : end])
            yield name

    def holds(self, group: int, block: int) -> bool:
        return block in self._entries[group]

    def match(self, tokens: Sequence[int], *, root: Root | None = None) -> Match:
        """Find the longest prefix of `tokens` for which every group has all blocks that it needs.

        Args:
            root: root of the blocks' names; see `salted_root`.
        """
        root = root or Root(self._root)
        tokens = root.named(tokens)
        full, parents = self._full_blocks(tokens, root.name)
        for count in range(len(full), -1, -1):
            parent = parents[count]
            wanted = tuple(tokens[count * BLOCK : (count + 1) * BLOCK])
            tails = [(common_prefix(e.tokens, wanted), e) for e in self._children.get(parent, ())]
            for rows, tail in sorted(tails, key=lambda tail: -tail[0]):
                if rows == 0 or (rows == BLOCK and count < len(full)):
                    continue  # as long as the prefix tried before
                if self._whole_only and rows < len(tail.tokens):
                    continue
                match = self._tables([*full[:count], tail], count * BLOCK + rows)
                if match is not None:
                    return match
            match = self._tables(full[:count], count * BLOCK)
            if match is not None:
                return match
        return Match(0, [[] for _ in self._groups])

    def end_of(self, parent: bytes, tokens: Sequence[int], rows: int) -> CacheEnd:
        """Return the reason why a cached prefix goes no further.

        Args:
            parent: name of all tokens before the block in which it ends.
            tokens: tokens of the prompt from that block on.
            rows: number of these tokens that are in the prefix.
        """
        if rows >= len(tokens):
            return "whole"
        held = tuple(tokens[:BLOCK])
        if len(held) == BLOCK:
            name = chain(parent, held)
            if name in self._reused:
                return "reused"
            if any(e.tokens == held and self._unmarked(e) for e in self._children.get(parent, ())):
                return self.end_of(name, tokens[BLOCK:], 0)
        known = [e.tokens for e in self._children.get(parent, ())]
        common = [(common_prefix(other, held), len(other)) for other in known]
        if any(count > rows and (count == size or not self._whole_only) for count, size in common):
            return "reused"  # in one group of several
        return "differs" if any(rows <= count < size for count, size in common) else "new"

    def find(self, parent: bytes, tokens: Sequence[int], group: int) -> int | None:
        """Find a group's full block with `tokens` after the prefix `parent`; None if not cached.

        Args:
            parent: name of all tokens before the block.
            group: number of the group.
        """
        held = tuple(tokens)
        entries = (e for e in self._children.get(parent, ()) if e.tokens == held)
        return next((e.blocks[group] for e in entries), None)

    def insert(
        self,
        parent: bytes,
        tokens: Sequence[int],
        blocks: Sequence[int | None],
        *,
        line: Sequence[bytes] = (),
    ) -> None:
        """Enter a block into the index.

        Args:
            parent: name of all tokens before the block.
            tokens: token ids in the block.
            blocks: block id in each group; None for a group without the block.
            line: names of all tokens before each block up to this one, `parent` the last; needed
                where groups have states.
        """
        self.version += 1
        held = tuple(tokens)
        siblings = self._children.setdefault(parent, [])
        longer = [e for e in siblings if e.tokens[: len(held)] == held]
        # a longer entry serves as well, if all groups have it and can go on from its middle
        entry = next((e for e in longer if e.tokens == held or self._serves_parts(e)), None)
        if entry is None:
            entry = _Entry(parent, held, [None] * len(self._groups), tuple(line))
            siblings.append(entry)
        elif len(entry.tokens) > len(held):
            return
        for group, block in enumerate(blocks):
            if block is None or self.holds(group, block):
                continue
            if entry.blocks[group] is None:
                entry.blocks[group] = block
                self._entries[group][block] = entry
        if all(block is None for block in entry.blocks):
            self._forget(entry)

    def remove(self, group: int, block: int) -> None:
        """Remove a group's block whose memory is about to be reused."""
        entry = self._entries[group].pop(block, None)
        if entry is None:
            return
        self.version += 1
        entry.blocks[group] = None
        if len(entry.tokens) == BLOCK:
            self._reused[chain(entry.parent, entry.tokens)] = None
            if len(self._reused) > _REMEMBERED:
                self._reused.popitem(last=False)
        if all(block is None for block in entry.blocks):
            self._forget(entry)

    def expendable(self, group: int, idle: Collection[int]) -> int:
        """Choose the block of a group whose memory is reused next.

        It is the one not used for longest. If that is a snapshot of states and later ones of the
        same text are there, it is the one of them with the nearest neighbours, among the half of
        all that was not used for longest: so those left lie far apart, the farther the older.

        Args:
            idle: ids of cached blocks that no sequence holds, the one not used for longest first.
        """
        oldest, entries = next(iter(idle)), self._entries[group]
        if not _has_states(self._groups[group]):
            return oldest
        later = [e for e in entries.values() if self._precedes(entries[oldest], e)]
        if not later:
            return oldest
        last = max(later, key=lambda entry: entry.end)
        line = {e.end: block for block, e in entries.items() if self._precedes(e, last)}
        ends, old = [0, *sorted(line), last.end], set(islice(idle, (len(idle) + 1) // 2))
        gaps = {line[end]: ends[i + 2] - ends[i] for i, end in enumerate(ends[1:-1])}
        return min((block for block in gaps if block in old), key=gaps.__getitem__)

    def _precedes(self, entry: _Entry, other: _Entry) -> bool:
        """Whether a text that ends with the tokens of `other` begins with those of `entry`."""
        number = len(entry.line) - 1
        if entry.end >= other.end or other.line[number] != entry.parent:
            return False
        if number == len(other.line) - 1:
            return other.tokens[: len(entry.tokens)] == entry.tokens
        name, size = other.line[number + 1], len(entry.tokens)
        if size == BLOCK:
            return entry.name == name
        full = (e for e in self._children[entry.parent] if len(e.tokens) == BLOCK)
        return any(e.name == name and e.tokens[:size] == entry.tokens for e in full)

    def _unmarked(self, entry: _Entry) -> bool:
        """Whether no snapshot of states was taken at the end of a full block."""
        states = [b for b, g in zip(entry.blocks, self._groups, strict=True) if _has_states(g)]
        return bool(states) and not any(block is not None for block in states)

    def _serves_parts(self, entry: _Entry) -> bool:
        return not self._whole_only and None not in entry.blocks

    def _forget(self, entry: _Entry) -> None:
        siblings = self._children[entry.parent]
        siblings.remove(entry)
        if not siblings:
            del self._children[entry.parent]

    def _full_blocks(
        self, tokens: Sequence[int], root: bytes
    ) -> tuple[list[_Entry | None], list[bytes]]:
        """Find the entries of leading full blocks, and the names before each and after the last.

        They end at the first block that a group which keeps all lacks.
        """
        full: list[_Entry | None] = []
        parents = [root]
        everywhere = [g for g, group in enumerate(self._groups) if group.keeps_all]
        for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
            held = tuple(tokens[begin : begin + BLOCK])
            siblings = self._children.get(parents[-1], ())
            entry = next((e for e in siblings if e.tokens == held), None)
            if everywhere and (entry is None or any(entry.blocks[g] is None for g in everywhere)):
                break
            full.append(entry)
            parents.append(chain(parents[-1], held))
        return full, parents

    def _tables(self, entries: Sequence[_Entry | None], length: int) -> Match | None:
        """Make the match of a prefix of `length` tokens; None if a group lacks a needed block."""
        tables: list[list[int | None]] = []
        for g, group in enumerate(self._groups):
            blocks: list[int | None] = [None] * len(entries)
            for number in group.seen(length):
                entry = entries[number]
                if entry is None or entry.blocks[g] is None:
                    return None
                blocks[number] = entry.blocks[g]
            tables.append(blocks)
        return Match(length, tables)


def _has_states(group: Group) -> bool:
    return isinstance(group, StateGroup)


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the name of a full block from the name of the block before it."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the first tokens that two sequences have in common."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
