"""Streams: pieces of an answer, from the engine's thread to their reader."""

from __future__ import annotations

from collections import deque

from edgellm.engine.context import Context
from edgellm.errors import OptionError
from edgellm.progress import Progress
from edgellm.results import Piece

# Number of unread pieces from which on an answer waits for its reader.
_MOST_UNREAD = 64


class Stream:
    """The reader's end of an answer to the tokens of a context.

    Attributes:
        pieces: pieces that the reader has not taken yet.
        error: exception to raise after the last piece; None: none.
        report: progress of the prompt, until the reader takes it, if it wants reports.
        finished: whether the last piece is there, or an error.
        withdrawn: whether the reader is gone.
        whole: whether the reader wants the whole answer, so that it need not hear of each piece: to
            wake a reader costs the next step 70 µs.
    """

    def __init__(self, context: Context, *, whole: bool) -> None:
        self.context = context
        self.pieces: deque[Piece] = deque()
        self.report: Progress | None = None
        self.finished = self.withdrawn = False
        self.whole = whole
        self.error: BaseException | None = None
        self._given = self._taken = 0  # tokens; the reader changes the second, while it is there
        self._changes = context.changes
        self._claims = False

    @property
    def unread(self) -> int:
        """Number of sampled tokens that the reader has not taken."""
        return self._given - self._taken

    @property
    def paused(self) -> bool:
        """Whether the answer waits for its reader."""
        return len(self.pieces) >= _MOST_UNREAD

    @property
    def has_news(self) -> bool:
        """Whether there is something for the reader to take."""
        enough = _MOST_UNREAD // 2 if self.whole else 1  # so that the answer need not wait
        return len(self.pieces) >= enough or self.finished or self.report is not None

    # for the reader

    def check_free(self) -> None:
        """Raise OptionError where the session answers already."""
        if self.context.answering is not None:
            raise _answering()

    def claim(self) -> None:
        """Take the context for this answer."""
        self._claims = True
        self.context.answering = self

    def next_piece(self) -> Piece:
        """Take the next piece, which must be there."""
        piece = self.pieces.popleft()
        self._taken += piece.token is not None
        if piece.finish_reason is not None:
            self._disclaim()
        return piece

    def raise_error(self) -> None:
        """Raise the exception with which the answer ended, if any, and forget it."""
        error, self.error = self.error, None  # its traceback refers to this object
        try:
            if error is not None:
                raise error
        finally:
            del error

    def withdraw(self) -> None:
        """Note that the reader is gone, if something is left for the engine to do."""
        self._disclaim()
        if not self.finished or self.unread:  # in this order: `finished` is the last to change
            self.withdrawn, self.context.unsettled = True, self

    def check_unchanged(self) -> None:
        """Raise OptionError where the session has changed, or is answering another request."""
        if self.context.changes != self._changes:
            raise OptionError("the session was changed while it answered")
        if self._claims and self.context.answering is not self:
            raise _answering()

    # for the engine

    def extend(self, token: int) -> None:
        """Append a sampled token to the context; its piece follows."""
        self.context.extend(token)
        self._given += 1

    def put(self, piece: Piece) -> None:
        """Add a piece; one with a finish reason is the last."""
        self.pieces.append(piece)
        self.finished = piece.finish_reason is not None

    def fail(self, error: BaseException) -> None:
        """End with an exception, which the reader gets after the last piece."""
        self.error, self.finished = error, True

    def cut(self) -> None:
        """Remove tokens that a reader who is gone has not taken from the context."""
        if self.context.answering is None and self.context.changes == self._changes:
            self.context.cut(self.unread)
        self._taken = self._given
        self.context.settled(self)

    def _disclaim(self) -> None:
        """Let the session answer another request."""
        if self.context.answering is self:
            self.context.answering = None


def _answering() -> OptionError:
    return OptionError(
        "the session is already answering; finish or close that stream, or `fork` the session"
    )
