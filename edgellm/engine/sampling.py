"""From logits to a token: pure functions, applied in llama.cpp's order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edgellm.checks import check_choice, check_flag, check_number, check_texts
from edgellm.errors import NumericError, OptionError
from edgellm.kernels.sampling import MOST_CANDIDATES, top_k

Floats = NDArray[np.float32]

ContextPolicy = Literal["error", "shift"]
CONTEXT_POLICIES: tuple[str, ...] = get_args(ContextPolicy)

# Lowest and highest value, and whether it is a whole number.
_RANGES: Mapping[str, tuple[float, float, bool]] = {
    "temperature": (0, 100, False),
    "top_k": (0, math.inf, True),
    "top_p": (0, 1, False),
    "min_p": (0, 1, False),
    "repeat_penalty": (0.01, 100, False),
    "presence_penalty": (-100, 100, False),
    "frequency_penalty": (-100, 100, False),
    "repeat_last_n": (-1, math.inf, True),
    "seed": (0, 2**64 - 1, True),
    "max_tokens": (0, math.inf, True),
    "keep": (0, math.inf, True),
    "min_indent": (0, 1000, True),
    "time_limit_ms": (1, math.inf, True),
    "logprobs": (0, 100, True),
    "repetition_limit": (0, 65536, True),
}
MAY_BE_NONE = ("seed", "max_tokens", "time_limit_ms")
# Beyond it a bias would drown float32 scores.
_MOST_BIAS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How tokens are chosen and when to stop. The defaults are llama.cpp's.

    Attributes:
        temperature: 0 always takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens that make up this probability.
        min_p: keep tokens at least this probable relative to the most likely one.
        repeat_penalty: divides positive and multiplies negative logits of recent tokens
            (CTRL, Keskar et al., arXiv:1909.05858).
        presence_penalty: subtracted once from the logit of each recent token.
        frequency_penalty: subtracted for each time that a recent token occurs.
        repeat_last_n: how many tokens count as recent; 0 none, -1 all.
        logit_bias: added to the logits of these tokens.
        seed: the same seed gives the same text; None draws one.
        max_tokens: stop after this many; None goes on to the end of the answer or of the context,
            or until it only repeats itself (`repetition_limit`).
        context_policy: what to do when the context is full. error: a prompt that is too long is an
            error, an answer ends. shift: forget half of what stands behind the first `keep` tokens,
            the oldest, and go on; `Stats.dropped_tokens` says how many were forgotten.
        keep: first tokens that `shift` never forgets; the attention of most models needs the first
            few (StreamingLLM, Xiao et al., arXiv:2309.17453).
        stop: texts that end the answer and are not part of it.
        stop_tokens: likewise, beside the model's own end tokens.
        min_indent: stop before a line that is indented by fewer characters; 0 never does.
        time_limit_ms: stop after this time, prefill included; None never does.
        logprobs: report this many most likely tokens at each step.
        ignore_eos: never take an end token.
        repetition_limit: end an answer whose last so many tokens only say the same again and again,
            if neither `max_tokens` nor `ignore_eos` is set; 0 never does.
        speculate: check guesses of several tokens in one step where that is faster (see
            `speculation.py`); the answer is the same.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    context_policy: ContextPolicy = "error"
    keep: int = 4
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    min_indent: int = 0
    time_limit_ms: int | None = None
    logprobs: int = 0
    ignore_eos: bool = False
    repetition_limit: int = 256
    speculate: bool = True

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            OptionError: one is of another type than it should be, or not allowed.
        """
        for name, (low, high, whole) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in MAY_BE_NONE:
                check_number(name, value, low, high, whole=whole)
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("speculate", self.speculate)
        check_choice("context_policy", self.context_policy, CONTEXT_POLICIES)
        check_texts("stop", self.stop)
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError(
                f"`logit_bias` is {self.logit_bias!r}; a dict of token ids and numbers is expected"
            )
        for token, bias in self.logit_bias.items():
            check_number("logit_bias", token, 0, whole=True)
            if bias != -math.inf:  # which rules a token out
                check_number("logit_bias", bias, -_MOST_BIAS, _MOST_BIAS)
        if isinstance(self.stop_tokens, str) or not isinstance(self.stop_tokens, Sequence):
            raise OptionError(
                f"`stop_tokens` is {self.stop_tokens!r}; a list of token ids is expected"
            )
        for token in self.stop_tokens:
            check_number("stop_tokens", token, 0, whole=True)


class Sampler:
    """Draws tokens for one answer.

    Args:
        banned: tokens that are never taken.
    """

    def __init__(self, options: GenerationOptions, *, banned: Sequence[int] = ()) -> None:
        self._options = options
        self._banned = list(banned)
        self._random = np.random.default_rng(options.seed)

    def sample(
        self, logits: Floats, tokens: Sequence[int], *, ids: NDArray[np.intp] | None = None
    ) -> int:
        """The next token.

        Args:
            logits: `[V]` float32; left as it is.
            tokens: everything so far, for the penalties.
            ids: the tokens that `logits` are of, ascending, if not of all; see `best_will_do`.

        Raises:
            NumericError: the logits are not finite.
            OptionError: a biased token is not in the vocabulary, or nothing is left to choose.
        """
        options = self._options
        if not math.isfinite(float(logits.max())):
            raise NumericError(
                "the model's logits are not finite; the model file or a kernel is broken"
            )
        scores = logits.copy()
        for token, bias in options.logit_bias.items():
            if not 0 <= token < scores.shape[0]:
                raise OptionError(
                    f"`logit_bias`: token {token} is not in the vocabulary of {scores.shape[0]}"
                )
            scores[token] += bias
        scores[_places(self._banned, ids)] = -np.inf
        recent = _recent(tokens, options.repeat_last_n) if _penalizes(options) else ()
        apply_penalties(scores, _places(recent, ids), options)
        if scores.max() == -math.inf:
            raise OptionError(
                "no token is left to choose from: `logit_bias`, `ignore_eos` and the logit filter "
                "rule out all of them"
            )
        place = self._draw(scores)
        return place if ids is None else int(ids[place])

    def _draw(self, scores: Floats) -> int:
        """The place of the one that is taken."""
        options = self._options
        if options.temperature == 0:
            return int(scores.argmax())
        places = top_k(scores, options.top_k)
        probabilities = softmax(scores[places])
        kept = keep_top_p(probabilities, options.top_p)
        kept = kept & keep_min_p(probabilities, options.min_p)
        places = places[kept]
        probabilities = softmax(scores[places] / np.float32(options.temperature))
        return int(self._random.choice(places, p=probabilities))


def best_will_do(options: GenerationOptions, *, ends: int) -> bool:
    """Whether the `MOST_CANDIDATES` best logits lead to the same token as all of them.

    They do if nothing but lowering some of them is done, and as many as are needed are left.

    Args:
        ends: tokens that may be banned.
    """
    raising = min(options.repeat_penalty - 1, options.presence_penalty, options.frequency_penalty)
    needed = 1 if options.temperature == 0 else options.top_k
    if options.logit_bias or raising < 0 or needed == 0:
        return False
    if _penalizes(options):
        if options.repeat_last_n < 0:
            return False
        needed += options.repeat_last_n
    return max(needed + ends, options.logprobs) <= MOST_CANDIDATES


def _penalizes(options: GenerationOptions) -> bool:
    """Whether recent tokens have other scores."""
    none = (1, 0, 0)
    return none != (options.repeat_penalty, options.presence_penalty, options.frequency_penalty)


def apply_penalties(scores: Floats, recent: Sequence[int], options: GenerationOptions) -> None:
    """Lower the scores `[V]` of recent tokens, in place."""
    if not recent:
        return
    ids, counts = np.unique(np.asarray(recent, np.intp), return_counts=True)
    values = scores[ids]
    if options.repeat_penalty != 1:
        penalty = np.float32(options.repeat_penalty)
        values = np.where(values > 0, values / penalty, values * penalty)
    values -= np.float32(options.presence_penalty)
    values -= np.float32(options.frequency_penalty) * counts.astype(np.float32)
    scores[ids] = values


def keep_top_p(probabilities: NDArray[np.float64], p: float) -> NDArray[np.bool_]:
    """Mask of the shortest head of descending probabilities whose sum reaches `p`."""
    before = np.cumsum(probabilities) - probabilities
    kept: NDArray[np.bool_] = before < p
    kept[0] = True
    return kept


def keep_min_p(probabilities: NDArray[np.float64], p: float) -> NDArray[np.bool_]:
    """Mask of what is at least `p` times as probable as the first, most probable one."""
    kept: NDArray[np.bool_] = probabilities >= p * probabilities[0]
    return kept


def softmax(scores: Floats) -> NDArray[np.float64]:
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    total: NDArray[np.float64] = weights / weights.sum()
    return total


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Log-probabilities in float64, over the last axis."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _recent(tokens: Sequence[int], count: int) -> Sequence[int]:
    if count == 0:
        return ()
    return tokens if count < 0 else tokens[-count:]


def _places(tokens: Sequence[int], ids: NDArray[np.intp] | None) -> Sequence[int]:
    """Where tokens are among the ascending `ids`, those that are; None stands for all tokens."""
    if ids is None or not tokens:
        return tokens
    wanted = np.asarray(tokens)
    places = np.searchsorted(ids, wanted).clip(max=len(ids) - 1)
    found: list[int] = places[ids[places] == wanted].tolist()
    return found
