"""Forks of sequences with reserved room, for work that the cache does not see."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from edgellm.cache.sequence import Sequence
from edgellm.errors import CacheFullError


class Growth(Sequence):
    """A fork of a sequence with room reserved for more tokens.

    It serves a thread beside the engine's, or tokens that go through the layers in several steps.
    The engine's thread makes it, and ends it with `land` or `close`. Calls of a back end in between
    change no pool and no index, and the blocks stay its own whatever happens to the sequence that
    it was forked from.

    Attributes:
        start: length of the sequence when the fork was made.
    """

    def __init__(self, base: Sequence, count: int) -> None:
        """Fork `base`, and reserve room for `count` tokens.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
        """
        self._away = False
        tables = [table.shared(len(base)) for table in base.tables]
        super().__init__(base._cache, tables, list(base.tokens), root=base.root)
        self.shareable = base.shareable
        self.start = len(base)
        try:
            self.reserve(count)
        except CacheFullError:
            self.truncate(0)  # at once: the exception keeps this object alive
            raise
        self._away = True

    def land(self) -> Sequence:
        """End the growth, and return its tokens as a sequence that other sequences can share.

        Layers with states have those at snapshots and at the end of the whole growth alone, so
        one that was not computed to its end becomes shorter.
        """
        computed = self.tokens[self.start :]
        self._away = False
        del self.tokens[self.start :]
        self.commit(computed)
        self.truncate(len(self))
        sequence = self.fork()
        self.truncate(0)
        return sequence

    def close(self) -> None:
        """End the growth and give its blocks back, see `Sequence.close`."""
        if self._away:
            self.land().close()
        else:
            super().close()

    def reserve(self, count: int, *, windowed: bool = True, drafted: int = 0) -> None:
        """Reserve positions, see `Sequence.reserve`; no effect on room that is reserved already."""
        if not self._away:
            super().reserve(count, windowed=windowed, drafted=drafted)

    def open(self, end: int) -> None:
        """Make positions writable, see `Sequence.open`; no effect on room reserved already."""
        if not self._away:
            super().open(end)

    def commit(self, tokens: SequenceOf[int]) -> None:
        """Count tokens, see `Sequence.commit`; other sequences find them after `land`."""
        if self._away:
            self.tokens.extend(tokens)
        else:
            super().commit(tokens)

    def truncate(self, length: int) -> None:
        """Drop tokens, see `Sequence.truncate`; their room and its content stay."""
        if self._away:
            del self.tokens[length:]
        else:
            super().truncate(length)
