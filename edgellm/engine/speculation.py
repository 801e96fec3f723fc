"""Decoding with drafts: several tokens in one step where a guess turns out right."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from edgellm.kernels.sampling import Logits

# Numbers of last tokens that must have stood together before, the longest first. Chance finds some
# places of three tokens in any text; where 16 stood before, a file is being copied.
_MATCHES = (16, 8, 4, 3)
_LONGEST_MATCH = 64
# Numbers of draft tokens to choose from: with the token sampled last, rows that kernels like.
_LENGTHS = (1, 3, 7, 15, 31, 63)
# Plain steps that a step of 2, 4, 8 .. rows takes as long as, until one was timed.
_STEPS = (1.1, 1.25, 2.2, 3.6, 4.0, 7.5)
# Share of draft tokens that are right after matches of 3, 4, 8, 16, and 32 tokens and more, until
# some are known, and how many tokens that is worth.
_RIGHT = (0.4, 0.6, 0.8, 0.9, 0.95)
_WORTH = 4.0
# Weight of the old value in averages; what matches without a draft are known for fades more slowly.
_KEEP, _FADE = 0.8, 0.99
# How many times as fast as plain steps a draft must promise to be.
_GAIN = 1.05


class PromptLookup:
    """Lookup of the tokens that followed the last tokens at an earlier place.

    Saxena, "Prompt Lookup Decoding", 2023.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        # by hash: a tuple as a key takes 170 bytes more for 16 tokens
        self._after: list[dict[int, int]] = [{} for _ in _MATCHES]
        for token in tokens:
            self.add(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: int) -> None:
        end = len(self._tokens)
        for size, after in zip(_MATCHES, self._after, strict=True):
            if end >= size:
                after[self._key(size)] = end
        self._tokens.append(token)

    def match(self) -> tuple[int, int]:
        """Return the place behind an earlier match, and the number of tokens that match.

        The number is at most 64; 0: there is no such place.
        """
        for size, after in zip(_MATCHES, self._after, strict=True):
            at = after.get(self._key(size))
            if at is not None and len(self._tokens) > size:
                length = self._common(at)
                if length >= size:  # not other tokens of the same hash
                    return at, length
        return len(self._tokens), 0

    def following(self, at: int, count: int) -> list[int]:
        """Return the `count` tokens that begin at `at`; behind the end what repeats goes on."""
        period = len(self._tokens) - at
        return [self._tokens[at + i % period] for i in range(count if period else 0)]

    def _key(self, size: int) -> int:
        return hash(tuple(self._tokens[-size:]))

    def _common(self, at: int) -> int:
        """Count the tokens before `at` that the last ones are the same as."""
        tokens, end, length = self._tokens, len(self._tokens), 0
        most = min(at, _LONGEST_MATCH)
        while length < most and tokens[at - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


class DraftPolicy:
    """Length of drafts that pay, from the times of steps and the number of accepted tokens.

    A draft of d tokens, each right with probability a, gives (1 - a^(d+1)) / (1 - a) tokens on
    average (Leviathan et al., arXiv:2211.17192). Timings decide nothing but the length of drafts:
    the answer is the same with any.
    """

    def __init__(self) -> None:
        self._plain_s = 0.0
        self._drafted_s = [0.0] * len(_LENGTHS)
        self._right = [share * _WORTH for share in _RIGHT]
        self._tried = [_WORTH] * len(_RIGHT)

    def length(self, match: int) -> int:
        """Return the number of tokens to draft after a match of `match` tokens; 0: no draft."""
        if not (match and self._plain_s):  # the first steps say what a plain one takes
            return 0
        kind = _kind(match)
        share = min(self._right[kind] / self._tried[kind], 0.999)
        best, chosen = _GAIN, 0
        for index, count in enumerate(_LENGTHS):
            gain = (1 - share ** (count + 1)) / (1 - share) / self._steps(index)
            if gain > best:
                best, chosen = gain, count
        if not chosen:  # another try later
            self._drafted_s = [
                _FADE * seconds + (1 - _FADE) * steps * self._plain_s if seconds else 0.0
                for seconds, steps in zip(self._drafted_s, _STEPS, strict=True)
            ]
            self._right[kind] = _FADE * self._right[kind] + (1 - _FADE) * _RIGHT[kind] * _WORTH
            self._tried[kind] = _FADE * self._tried[kind] + (1 - _FADE) * _WORTH
        return chosen

    def plain(self, seconds: float) -> None:
        """Learn the seconds of a step without a draft."""
        self._plain_s = _average(self._plain_s, seconds)

    def drafted(self, seconds: float, *, match: int, drafted: int, accepted: int) -> None:
        """Learn the seconds of a step with `drafted` draft tokens, `accepted` of them right.

        Args:
            match: tokens that matched where the draft was found.
        """
        index = _size(drafted)
        self._drafted_s[index] = _average(self._drafted_s[index], seconds)
        kind = _kind(match)
        self._right[kind] = _KEEP * self._right[kind] + accepted
        self._tried[kind] = _KEEP * self._tried[kind] + accepted + (accepted < drafted)

    def _steps(self, index: int) -> float:
        """Return the plain steps that a step takes as long as; more rows never take less."""
        known = [seconds for seconds in self._drafted_s[: index + 1] if seconds]
        if self._drafted_s[index] or not known:
            return self._drafted_s[index] / self._plain_s or _STEPS[index]
        return max(_STEPS[index], known[-1] / self._plain_s)


def _kind(match: int) -> int:
    return min(max(match.bit_length() - 2, 0), len(_RIGHT) - 1)


def _size(drafted: int) -> int:
    """Return the index of the length that a draft, which may have been cut, takes as long as."""
    return next((i for i, length in enumerate(_LENGTHS) if drafted <= length), len(_LENGTHS) - 1)


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
        self._match = 0
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
        # 296 bytes and 1.9 µs a token: only for a lone request, and only for its last tokens
        if self._lookup is None or len(self._lookup) > 2 * self._most:
            self._lookup = PromptLookup(tokens[-self._most :])
        at, self._match = self._lookup.match()
        return self._lookup.following(at, max(0, min(self._policy.length(self._match), room)))

    def settle(self) -> int:
        """End a step's draft; returns the number of rejected tokens at the sequence's end."""
        wrong, self._draft = len(self._ahead), []
        self._ahead.clear()
        if self._seconds is not None:
            if self._hits + wrong:
                drafted = self._hits + wrong
                self._policy.drafted(
                    self._seconds, match=self._match, drafted=drafted, accepted=self._hits
                )
            else:
                self._policy.plain(self._seconds)
        self._seconds = None
        return wrong
