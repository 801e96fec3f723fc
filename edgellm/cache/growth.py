"""A sequence that grows while others use the cache: its blocks are there beforehand."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from edgellm.cache.sequence import Sequence
from edgellm.errors import CacheFullError


class Growth(Sequence):
    """A fork of a sequence with room for tokens behind it, for a thread without the cache's lock or
    for tokens that go through the layers in several steps.

    It is made under the lock, and `land` or `close` ends it there. What a back end calls in between
    changes no pool and no index, and the blocks stay its own whatever becomes of the sequence that
    it was forked from.

    Attributes:
        start: its length when it was made.
    """

    def __init__(self, base: Sequence, count: int) -> None:
        """Make room for `count` tokens.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
        """
        self._away = False
        super().__init__(base._cache, base._shared_tables(), list(base.tokens), root=base.root)
        self.shareable = base.shareable
        self.start = len(base)
        try:
            self.reserve(count)
        except CacheFullError:
            self.truncate(0)  # now: the exception keeps it alive
            raise
        self._away = True

    def land(self) -> Sequence:
        """What has been computed, as a sequence that others can begin with."""
        computed = self.tokens[self.start :]
        self._away = False
        del self.tokens[self.start :]
        self.commit(computed)
        self.truncate(len(self))
        sequence = self.fork()
        self.truncate(0)
        return sequence

    def close(self) -> None:
        """See `Sequence.close`."""
        self._away = False
        super().close()

    def reserve(self, count: int, *, windowed: bool = True) -> None:
        """See `Sequence.reserve`; the room is there."""
        if not self._away:
            super().reserve(count, windowed=windowed)

    def open(self, end: int) -> None:
        """See `Sequence.open`; the room is there."""
        if not self._away:
            super().open(end)

    def commit(self, tokens: SequenceOf[int]) -> None:
        """See `Sequence.commit`; others find them when it has landed."""
        if self._away:
            self.tokens.extend(tokens)
        else:
            super().commit(tokens)

    def truncate(self, length: int) -> None:
        """See `Sequence.truncate`; the room stays, and what is written there."""
        if self._away:
            del self.tokens[length:]
        else:
            super().truncate(length)

    def settle(self) -> None:
        """See `Sequence.settle`; a thread that writes here was not interrupted."""
        if not self._away:
            super().settle()
