"""Decoding with drafts: several tokens in one step where a guess turns out right."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from edgellm.kernels.sampling import Logits

# Numbers of last tokens that must have stood together before, the longer first.
_MATCHES = (4, 3)
_LONGEST = 8
# Weight of the old value in averages.
_KEEP = 0.8
# Plain steps in a row after drafts that did not pay.
_REST = 16


class PromptLookup:
    """Lookup of the tokens that followed the last tokens at an earlier place."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.add(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: int) -> None:
        end = len(self._tokens)
        for size in _MATCHES:
            if end >= size:
                self._after[tuple(self._tokens[end - size :])] = end
        self._tokens.append(token)

    def draft(self, count: int) -> list[int]:
        """Return at most `count` tokens that may come next; none without an earlier match."""
        for size in _MATCHES:
            at = self._after.get(tuple(self._tokens[-size:]))
            if at is not None and len(self._tokens) > size:
                return self._tokens[at : at + count]
        return []


class DraftPolicy:
    """Length of drafts that pay, from the times of steps and the number of accepted tokens.

    Timings decide nothing but the length of drafts: the answer is the same with any.
    """

    def __init__(self) -> None:
        self._length = 2
        self._plain_s = 0.0
        self._drafted_s = 0.0  # per token
        self._rest = 0

    def length(self) -> int:
        """Return the number of tokens to draft next; 0: no draft in this step."""
        if self._rest:
            self._rest -= 1
            return 0
        return self._length if self._plain_s else 0  # the first steps say what a plain one costs

    def plain(self, seconds: float) -> None:
        """Learn the seconds of a step without a draft."""
        self._plain_s = _average(self._plain_s, seconds)

    def drafted(self, seconds: float, *, drafted: int, accepted: int) -> None:
        """Learn the seconds of a step with `drafted` draft tokens, `accepted` of them right."""
        self._drafted_s = _average(self._drafted_s, seconds / (accepted + 1))
        if accepted == drafted:
            self._length = min(2 * self._length, _LONGEST)
        elif accepted == 0:
            self._length = max(1, self._length // 2)
        if self._drafted_s > self._plain_s:
            self._rest = _REST
            self._drafted_s = 0.0
            self._length = 2


def _average(old: float, new: float) -> float:
    return new if not old else _KEEP * old + (1 - _KEEP) * new


class Speculation:
    """Drafts of an answer, with the logits after their tokens until the sampled tokens are known.

    A row has the same bits however many come with it, so sampling from it gives the same token as
    without drafts: greedy text is the same, and so is sampled text of a seed.

    Args:
        most: number of last tokens that drafts are looked up in; 0: no drafts.

    Attributes:
        drafted, accepted: number of draft tokens so far, and of accepted ones.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lookup: PromptLookup | None = None
        self._policy = DraftPolicy()
        self._draft: list[int] = []
        self._ahead: deque[tuple[int, Logits]] = deque()
        self._seconds: float | None = None
        self._hits = 0
        self.drafted = self.accepted = 0

    def draft(self, room: int, tokens: Sequence[int]) -> list[int]:
        """Draft at most `room` tokens to compute together with the token sampled last.

        Args:
            tokens: tokens of the prompt, and sampled tokens.
        """
        self._draft = self._guess(room, tokens)
        return self._draft

    def computed(self, logits: Sequence[Logits], *, seconds: float | None) -> None:
        """Keep the logits after each token of the draft, if there was one.

        Args:
            seconds: seconds that the step took; None if other requests were in it.
        """
        self._seconds, self._hits = seconds, 0
        self._ahead.extend(zip(self._draft[: len(logits)], logits, strict=True))
        self.drafted += len(logits)

    def after(self, token: int) -> Logits | None:
        """Return the logits after a sampled token; None if the draft did not have it."""
        if self._lookup is not None:
            self._lookup.add(token)
        if not self._ahead or self._ahead[0][0] != token:
            return None
        self._hits += 1
        self.accepted += 1
        return self._ahead.popleft()[1]

    def _guess(self, room: int, tokens: Sequence[int]) -> list[int]:
        if not self._most:
            return []
        count = min(self._policy.length(), room)
        if count < 1:
            return []
        # 277 bytes and 0.9 µs a token: only for a lone request, and only for its last tokens
        if self._lookup is None or len(self._lookup) > 2 * self._most:
            self._lookup = PromptLookup(tokens[-self._most :])
        return self._lookup.draft(count)

    def settle(self) -> int:
        """End a step's draft; returns the number of rejected tokens at the sequence's end."""
        wrong, self._draft = len(self._ahead), []
        self._ahead.clear()
        if self._seconds is not None:
            if self._hits + wrong:
                drafted = self._hits + wrong
                self._policy.drafted(self._seconds, drafted=drafted, accepted=self._hits)
            else:
                self._policy.plain(self._seconds)
        self._seconds = None
        return wrong
