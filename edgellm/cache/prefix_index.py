"""Which blocks are free, and which hold a prefix that someone may ask for again. Pure Python."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgellm.errors import CacheFullError
from edgellm.kernels.kv_blocks import BLOCK


@dataclass(frozen=True)
class _Entry:
    """A block and the tokens in it, under the hash of everything before it."""

    parent: bytes
    tokens: tuple[int, ...]
    block: int


class PrefixIndex:
    """Blocks by content. A block is named by a hash chain over its tokens and all before it."""

    def __init__(self, fingerprint: bytes) -> None:
        self._root = hashlib.sha256(fingerprint).digest()
        self._children: dict[bytes, list[_Entry]] = {}
        self._entries: dict[int, _Entry] = {}

    def names(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """The names of the full blocks of a sequence, first to last."""
        name = self._root
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            name = _chain(name, tokens[end - BLOCK : end])
            yield name

    def holds(self, block: int) -> bool:
        return block in self._entries

    def match(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Blocks of the longest known prefix of `tokens`, each with how many tokens of it count."""
        found: list[tuple[int, int]] = []
        parent, start = self._root, 0
        while start < len(tokens):
            wanted = tuple(tokens[start : start + BLOCK])
            best, rows = None, 0
            for entry in self._children.get(parent, ()):
                common = _common_prefix(entry.tokens, wanted)
                if common > rows:
                    best, rows = entry, common
            if best is None:
                break
            found.append((best.block, rows))
            if rows < BLOCK:
                break
            parent, start = _chain(parent, best.tokens), start + BLOCK
        return found

    def insert(self, tokens: Sequence[int], position: int, block: int) -> None:
        """Remember block number `position` of a sequence of `tokens`."""
        parent = self._root
        for i in range(position):
            parent = _chain(parent, tokens[i * BLOCK : (i + 1) * BLOCK])
        held = tuple(tokens[position * BLOCK : (position + 1) * BLOCK])
        siblings = self._children.setdefault(parent, [])
        if any(entry.tokens[: len(held)] == held for entry in siblings):
            return
        self.remove(block)
        entry = _Entry(parent, held, block)
        siblings.append(entry)
        self._entries[block] = entry

    def remove(self, block: int) -> None:
        """Forget a block whose memory is about to be used again."""
        entry = self._entries.pop(block, None)
        if entry is None:
            return
        siblings = self._children[entry.parent]
        siblings.remove(entry)
        if not siblings:
            del self._children[entry.parent]


class BlockPool:
    """Reference counts.

    A block that nobody holds but the index knows is reused last, the oldest first.
    """

    def __init__(self, blocks: int, index: PrefixIndex) -> None:
        self._index = index
        self._references = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        return len(self._references) - len(self._free) - len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._idle)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int:
        """A block to write to, held once.

        Raises:
            CacheFullError: sequences hold every block.
        """
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._index.remove(block)
        else:
            raise CacheFullError(
                f"all {len(self._references)} blocks of {BLOCK} tokens are held by open sessions "
                "and running answers; close sessions that are done, run fewer answers at once, or "
                "load the model with a larger `cache_size` (tokens of all sessions together)"
            )
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        self._idle.pop(block, None)
        self._references[block] += 1

    def release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._index.holds(block):
            self._idle[block] = None
        else:
            self._free.append(block)


def _chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
