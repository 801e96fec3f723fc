"""Drafters: guesses of the tokens that follow, and the kinds of evidence for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.sequence import Sequence as CachedSequence


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
