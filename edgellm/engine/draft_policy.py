"""Drafters, and the policy that says which of them guesses for a step, and how many tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.options import MOST_DRAFTED

# Numbers of draft tokens to choose from: with the token sampled last, rows that kernels like.
_LENGTHS = (1, 3, 7, 15, 31, MOST_DRAFTED)
# Plain steps that a step of 2, 4, 8 .. rows takes as long as, until one was timed.
_STEPS = (1.1, 1.25, 2.2, 3.6, 4.0, 7.5)
# Tokens that the share of a kind counts as, before any of its drafts is known.
_WORTH = 4.0
# Weight of the old value in averages; what is known of kinds without a draft fades more slowly.
_KEEP, _FADE = 0.8, 0.99
# How many times as fast as plain steps a draft must promise to be.
_GAIN = 1.05
# Plain steps of an answer before drafts that take time to make, and drafts after which another
# plain one shows whether it still takes as long.
_PLAIN_FIRST, _PLAIN_EVERY = 4, 32
# Plain steps that a purse holds at first and at most, and the part of each step that it earns.
_FIRST, _MOST, _EARNED = 64.0, 512.0, 0.02
# Tokens computed at once for each that is computed by itself in the same time, about.
_AT_ONCE = 8.0
# Times as long as expected that a step counts as at most: what stops a process is no draft's fault.
_HICCUP = 4.0
# Share of a model's draft tokens that are right, until some are known: 0.6 to 0.85 for pairs of one
# family. A model guesses as well some lines later, so that the drafts before weigh much.
_MODELS = 0.7, 0.95
# Tokens that a drafter lacks after a step, at most, unless it has rested.
_CAUGHT_UP = 8


@dataclass(frozen=True)
class Kind:
    """Kind of evidence for a draft, by which its acceptance is learnt.

    Attributes:
        drafter: name of the drafter.
        share: share of draft tokens that are right, until some are known.
        most: largest number of tokens of a draft.
        keep: weight of the drafts before when one is learnt: little where a text may change soon,
            much where rest costs time.
        token_steps: plain steps that a draft token takes as long as to make, until one was timed;
            0: no time that counts.
    """

    drafter: str
    share: float
    most: int
    keep: float = 0.8
    token_steps: float = 0.0


@dataclass(frozen=True)
class Evidence:
    """Evidence for a draft behind some tokens.

    Attributes:
        behind: number of tokens that the drafter has not computed yet.
    """

    kind: Kind
    behind: int = 0


class Drafter(Protocol):
    """A guesser of the tokens that follow those of one answer.

    All is for the engine's thread. Tokens are those of the prompt, and sampled tokens.

    Attributes:
        name: name in `Stats.drafts`.
    """

    name: str

    def evidence(self, tokens: Sequence[int]) -> Evidence | None:
        """Return the evidence for a draft behind `tokens`; None: there is none."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens that may follow `tokens`, after `evidence` of the same."""

    def close(self) -> None:
        """Give back memory that is not needed until the next draft."""


@runtime_checkable
class StateDrafter(Drafter, Protocol):
    """A drafter that guesses from the model's hidden states."""

    def computed(
        self, tokens: Sequence[int], sequence: CachedSequence, hidden: NDArray[np.float32]
    ) -> None:
        """Take the hidden states of a sequence's last tokens, some of which may be a draft's.

        Without any, forget those of tokens that the sequence no longer has.

        Args:
            tokens: tokens of the prompt, and sampled tokens, as far as they are known.
            sequence: the answer's tokens in the model's KV cache.
        """


@dataclass(frozen=True)
class Choice:
    """Choice of a drafter by its evidence, and of the number of tokens.

    Attributes:
        company: number of sequences in the step, each of which drafts as many.
    """

    evidence: Evidence
    count: int
    company: int = 1

    @property
    def kind(self) -> Kind:
        return self.evidence.kind


@dataclass(frozen=True)
class Acceptance:
    """Draft tokens that were right, and those that were tried; both fade."""

    right: float
    tried: float

    @classmethod
    def first(cls, kind: Kind) -> Acceptance:
        return cls(kind.share * _WORTH, _WORTH)

    @property
    def share(self) -> float:
        return min(self.right / self.tried, 0.999)

    def learn(self, accepted: int, count: int, *, keep: float) -> Acceptance:
        """Return what is known after a draft of `count` tokens that ended behind `accepted`."""
        tried = accepted + (accepted < count)
        return Acceptance(keep * self.right + accepted, keep * self.tried + tried)

    def faded(self, kind: Kind) -> Acceptance:
        """Return a little less of what is known, for another try later."""
        first = Acceptance.first(kind)
        right = _FADE * self.right + (1 - _FADE) * first.right
        return Acceptance(right, _FADE * self.tried + (1 - _FADE) * first.tried)


class Purse:
    """Plain steps that drafts which take time may lose, for all answers of a model.

    It earns a part of each step, and what drafts gain, and drafts that lose empty it. So drafts
    that never pay cost its first content and that part of the time, and no more.

    Attributes:
        known: what the answers so far have shown of such drafts.
    """

    def __init__(self) -> None:
        self.steps = _FIRST
        self.known: dict[Kind, Acceptance] = {}

    def put(self, steps: float) -> None:
        """Add plain steps; what is lost is negative."""
        self.steps = min(_MOST, self.steps + steps)


@dataclass(frozen=True, kw_only=True)
class DraftSource(ABC):
    """A loaded model, or a model's head, that drafts for all answers of another model.

    Attributes:
        ctx_size: number of tokens behind which it drafts nothing.
        tokens: largest number of tokens of a draft.
        p_min: probability of its best token below which a draft ends before the token.
        token_steps: steps of the other model that one of its steps takes as long as, about.
        purse: see `Purse`.
    """

    name: ClassVar[str]
    ctx_size: int
    tokens: int
    p_min: float
    token_steps: float
    purse: Purse = field(default_factory=Purse)

    @property
    def kind(self) -> Kind:
        share, keep = _MODELS
        return Kind(self.name, share, self.tokens, keep=keep, token_steps=self.token_steps)

    @abstractmethod
    def drafter(self, salt: str) -> Drafter:
        """Return a drafter for one answer; see `Context` for `salt`."""


class DraftPolicy:
    """Drafts that pay, from the times of steps and the number of accepted tokens.

    A draft of d tokens, each right with probability a, gives (1 - a^(d+1)) / (1 - a) tokens on
    average (Leviathan et al., arXiv:2211.17192). The time of a step has that of its draft in it.
    Timings decide nothing but which drafts there are: the answer is the same with any.

    Args:
        state_steps: plain steps that keeping a model's states after a row takes as long as, until
            steps with drafts were timed.
    """

    def __init__(self, purse: Purse | None = None, *, state_steps: float = 0.0) -> None:
        self._purse = Purse() if purse is None else purse
        self._state_steps = state_steps
        self._plain_s: dict[int, float] = {}  # by company
        self._plain_steps = 0
        self._since_plain = 0
        self._seconds: dict[tuple[str, int], list[float]] = {}
        self._known: dict[Kind, Acceptance] = {}

    def choose(self, offers: Sequence[Evidence], *, most: int, company: int = 1) -> Choice | None:
        """Choose the drafter that promises the most tokens in a time; None: a plain step.

        Args:
            most: largest number of tokens of the draft.
            company: number of sequences in the step, if each drafts as many. Drafts that take time
                to make are for a sequence by itself.
        """
        if company not in self._plain_s or most < 1:  # the first steps say what a plain one takes
            return None
        best, chosen = _GAIN, None
        for offer in offers:
            kind = offer.kind
            gain, count = max(self._gains(kind, company, most), default=(0.0, 0))
            if gain <= _GAIN:
                self._fade(kind, company)
            elif gain > best and (not kind.token_steps or self._affords(offer, count, company)):
                best, chosen = gain, Choice(offer, count, company)
        return chosen

    def too_far(self, offer: Evidence) -> bool:
        """Whether the purse does not hold what its drafter takes to catch up."""
        return _catch_up(offer) > self._purse.steps

    def plain(self, seconds: float, *, company: int = 1) -> None:
        """Learn the seconds of a step without a draft."""
        self._plain_s[company] = _average(self._plain_s.get(company, 0.0), seconds)
        if company == 1:
            self._plain_steps += 1
            self._since_plain = 0
            self._purse.put(_EARNED)

    def drafted(self, seconds: float, choice: Choice, *, drafted: int, accepted: int) -> None:
        """Learn the seconds of a step with `drafted` draft tokens, `accepted` of them right."""
        kind, caught_up = choice.kind, choice.evidence.behind <= _CAUGHT_UP
        if kind.token_steps:
            self._since_plain += 1
            expected = self._steps(kind, choice.count, choice.company) + _catch_up(choice.evidence)
            took = min(seconds / self._plain_s[choice.company], _HICCUP * expected)
            self._purse.put(1 + accepted - took + _EARNED * took)
        if caught_up:
            times, index = self._times(kind, choice.company), _size(choice.count)
            times[index] = _average(times[index], seconds)
        if caught_up or drafted:
            known = self._acceptance(kind).learn(accepted, choice.count, keep=kind.keep)
            self._known_of(kind)[kind] = known

    def _gains(self, kind: Kind, company: int, most: int) -> Iterator[tuple[float, int]]:
        """Iterate over tokens for the time of one in plain steps, and the length of a draft."""
        share = self._acceptance(kind).share
        for count in sorted({min(count, kind.most, most) for count in _LENGTHS}):
            tokens = (1 - share ** (count + 1)) / (1 - share)
            yield tokens / self._steps(kind, count, company), count

    def _steps(self, kind: Kind, count: int, company: int) -> float:
        """Return the plain steps that a step takes as long as; more rows never take less."""
        index, plain_s = _size(count), self._plain_s[company]
        times = self._times(kind, company)
        known = [seconds for seconds in times[: index + 1] if seconds]
        guess = self._guess(kind, count, company)
        if times[index] or not known:
            return times[index] / plain_s or guess
        return max(guess, known[-1] / plain_s)

    def _guess(self, kind: Kind, count: int, company: int) -> float:
        """Guess the plain steps that a step takes as long as, before one was timed."""
        rows = _of_rows(company * (1 + count)) + company * count * self._state_steps
        return rows / _of_rows(company) + count * kind.token_steps

    def _affords(self, offer: Evidence, count: int, company: int) -> bool:
        """Whether the purse holds what a draft that takes time loses if all of it is wrong."""
        if company > 1 or self._plain_steps < _PLAIN_FIRST or self._since_plain >= _PLAIN_EVERY:
            return False
        lost = self._steps(offer.kind, count, company) - 1 + _catch_up(offer)
        return lost <= self._purse.steps

    def _fade(self, kind: Kind, company: int) -> None:
        """Forget a little of what speaks against drafts of a kind, for another try later."""
        self._known_of(kind)[kind] = self._acceptance(kind).faded(kind)
        times = self._times(kind, company)
        for index, seconds in enumerate(times):
            if seconds:
                guess = self._guess(kind, _LENGTHS[index], company) * self._plain_s[company]
                times[index] = _FADE * seconds + (1 - _FADE) * guess

    def _acceptance(self, kind: Kind) -> Acceptance:
        return self._known_of(kind).get(kind) or Acceptance.first(kind)

    def _known_of(self, kind: Kind) -> dict[Kind, Acceptance]:
        """Return what is known of drafts; matches are like those of the same answer alone."""
        return self._purse.known if kind.token_steps else self._known

    def _times(self, kind: Kind, company: int) -> list[float]:
        """Return the seconds of steps with a drafter's drafts, by `_LENGTHS`; 0: not known."""
        return self._seconds.setdefault((kind.drafter, company), [0.0] * len(_LENGTHS))


def common_length(choices: Sequence[Choice | None]) -> int:
    """Return the tokens that each sequence of a step drafts; 0: none does.

    A step with drafts takes longer, so all its sequences have to gain by it.
    """
    return min((0 if choice is None else choice.count for choice in choices), default=0)


def _catch_up(evidence: Evidence) -> float:
    """Guess the plain steps in which a drafter computes the tokens that it has not yet."""
    return evidence.kind.token_steps * evidence.behind / _AT_ONCE


def _of_rows(rows: int) -> float:
    """Return the steps of one row that a step of `rows` takes as long as."""
    size = min((rows - 1).bit_length(), len(_STEPS))
    more = (1.0, *_STEPS)[size]
    if not size or rows >= 1 << size:
        return more * rows / (1 << size)
    less, whole = (1.0, *_STEPS)[size - 1], 1 << (size - 1)
    return less + (more - less) * (rows - whole) / whole


def _size(count: int) -> int:
    """Return the index of the length that a draft, which may have been cut, takes as long as."""
    return next((i for i, length in enumerate(_LENGTHS) if count <= length), len(_LENGTHS) - 1)


def _average(old: float, new: float) -> float:
    return new if not old else _KEEP * old + (1 - _KEEP) * min(new, _HICCUP * old)
