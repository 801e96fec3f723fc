"""Log-probabilities of a prompt's own tokens, computed as its hidden states arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.backend import Backend
from edgellm.kernels.sampling import Logits, log_sum_exp
from edgellm.results import TokenLogprob

# Rows that go through the LM head at a time: a row of logits takes up to 1 MB.
_ROWS = 64


class PromptScores:
    """The log-probabilities of one prompt.

    Args:
        backend: back end whose LM head turns hidden states into logits.
        tokens: tokens of the prompt.
        top: number of most likely tokens to report in each place.

    Attributes:
        tokens: results so far, the first one without a score.
        complete: whether all tokens have theirs.
    """

    def __init__(self, backend: Backend, tokens: Sequence[int], *, top: int) -> None:
        self._backend = backend
        self._prompt = list(tokens)
        self._top = top
        self.tokens = [TokenLogprob(token) for token in self._prompt[:1]]
        self.complete = False

    @property
    def known(self) -> int:
        """Number of tokens whose states are not needed again."""
        return len(self.tokens) - 1

    def add(
        self, start: int, hidden: NDArray[np.float32], *, should_stop: Callable[[], bool]
    ) -> None:
        """Take the hidden states `[n, E]` of tokens from `start` on, which are not beyond `known`.

        Args:
            should_stop: function that tells, some rows at a time, that they are no longer needed.
        """
        assert start <= self.known
        hidden = hidden[self.known - start : len(self._prompt) - 1 - start]
        for begin in range(0, len(hidden), _ROWS):
            if should_stop():
                return
            for row in self._backend.logits(hidden[begin : begin + _ROWS]):
                self.tokens.append(self._scored(Logits(row, log_sum_exp(row))))
        self.complete = len(self.tokens) == len(self._prompt)

    def _scored(self, logits: Logits) -> TokenLogprob:
        token = self._prompt[len(self.tokens)]
        return TokenLogprob(
            token,
            logits.log_probability(token),
            rank=1 + int(np.count_nonzero(logits.scores > logits.scores[token])),
            top=logits.best(self._top),
        )
