"""Changes of the KV cache, one at a time, and what an interrupt leaves of one.

An exception of a signal handler, such as Ctrl-C's, may be raised between any two steps of Python.
Which blocks are held and known is then counted again, from the tables of all sequences: with one
too many a cache leaks, with one too few two sequences write to the same block.
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
    """A context manager for whoever has the cache's lock, around all that it changes."""

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
        self.close_dropped()  # also what was held by the deferred ones alone

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._whole = kind is None or issubclass(kind, Exception)

    def defer(self, change: Callable[[], None]) -> None:
        """Have a change made by whoever comes next; one that may be made twice."""
        self._deferred.append(change)

    def register(self, sequence: Sequence) -> None:
        """Know of a sequence that may hold blocks."""
        self._sequences[id(sequence)] = sequence

    def drop(self, sequence: Sequence) -> None:
        """Have a sequence closed that nobody can reach any more."""
        self._dropped.append(sequence)

    def close_dropped(self) -> None:
        """Close sequences that nobody can reach any more; also in the middle of a change."""
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
        """Make blocks and sequences agree again; computed prefixes are kept."""
        if self._running is not None:  # interrupted in the middle, or taken from the line and lost
            self._deferred.appendleft(self._running)
            self._running = None
        # in one go: the garbage collector may register one meanwhile
        references = list(self._sequences.valuerefs())
        known = [s for s in (reference() for reference in references) if s is not None]
        sequences = [*known, *self._dropped]
        self._index.recount()
        for group in self._groups:
            tables = (sequence.tables[group.number] for sequence in sequences)
            group.pool.recount(block for table in tables for block in table.held)
        for sequence in sequences:
            sequence.settle()
