"""Changes of the KV cache, one at a time, and repair after an interrupt in the middle of one.

An exception of a signal handler, such as Ctrl-C's, may be raised between any two steps of Python.
References to blocks, and the prefix index, are then counted again from the tables of all sequences:
with a reference too many the cache leaks, with one too few two sequences write to the same block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from weakref import WeakValueDictionary

from edgellm.cache.group_table import GroupBlocks
from edgellm.cache.prefix_index import PrefixIndex
from edgellm.cache.sequence import Sequence


class Changes:
    """A context manager around each change of the cache, for the holder of the cache's lock."""

    def __init__(self, groups: Iterable[GroupBlocks], index: PrefixIndex) -> None:
        self._sequences: WeakValueDictionary[int, Sequence] = WeakValueDictionary()
        self._groups = groups
        self._index = index
        self._dropped: deque[Sequence] = deque()
        self._deferred: deque[Callable[[], None]] = deque()
        self._running: Callable[[], None] | None = None
        self._whole = True

    def __enter__(self) -> None:
        if not self._whole:
            self._recount()
        self._whole = False
        self._make_deferred()
        self.close_dropped()  # also sequences that only deferred changes referred to

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._whole = kind is None or issubclass(kind, Exception)

    def defer(self, change: Callable[[], None]) -> None:
        """Put off a change to the beginning of the next one; it may be made twice."""
        self._deferred.append(change)

    def register(self, sequence: Sequence) -> None:
        """Register a sequence that may hold blocks, for a recount."""
        self._sequences[id(sequence)] = sequence

    def drop(self, sequence: Sequence) -> None:
        """Put off the closing of a sequence that is no longer reachable."""
        self._dropped.append(sequence)

    def close_dropped(self) -> None:
        """Close dropped sequences; may be called in the middle of a change."""
        while self._dropped:
            self._dropped[0].close()
            self._dropped.popleft()

    def _make_deferred(self) -> None:
        while self._deferred:
            self._running = self._deferred[0]
            self._deferred.popleft()
            try:
                self._running()
            except Exception:
                self._running = None
                raise
            self._running = None

    def _recount(self) -> None:
        """Make block counts, index and sequences agree again; cached prefixes are kept."""
        if self._running is not None:  # a deferred change interrupted, or taken and not begun
            self._deferred.appendleft(self._running)
            self._running = None
        # copied in one go: the garbage collector may register a sequence meanwhile
        references = list(self._sequences.valuerefs())
        known = [s for s in (reference() for reference in references) if s is not None]
        sequences = [*known, *self._dropped]
        self._index.recount()
        for group in self._groups:
            tables = (sequence.tables[group.number] for sequence in sequences)
            group.pool.recount(block for table in tables for block in table.held)
        for sequence in sequences:
            sequence.settle()
