"""From logits to a token: llama.cpp's samplers, in the order of the options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.engine import samplers
from edgellm.engine.samplers import Candidates, Dry, Floats, softmax
from edgellm.errors import NumericError, OptionError
from edgellm.generation_options import SAMPLERS, GenerationOptions
from edgellm.kernels.sampling import MOST_CANDIDATES
from edgellm.text.tokenizer import Tokenizer

# A function from candidates and all tokens so far to the candidates that are left.
_Step = Callable[[Candidates, Sequence[int]], Candidates]


class Sampler:
    """Sampler of one answer's tokens.

    Args:
        tokenizer: tokenizer for `dry_sequence_breakers`.
    """

    def __init__(self, options: GenerationOptions, tokenizer: Tokenizer | None = None) -> None:
        self._options = options
        names = active_samplers(options)
        self._steps = [self._step(name, tokenizer) for name in names]
        self._takes_best = options.temperature == 0 and not (names or options.logit_bias)
        self._biased = np.fromiter(options.logit_bias, np.intp)
        self._biases = np.fromiter(options.logit_bias.values(), np.float32)
        self._random = np.random.default_rng(options.seed)
        self._mu = 2 * options.mirostat_tau

    def sample(
        self,
        logits: Floats,
        tokens: Sequence[int],
        *,
        ids: NDArray[np.intp] | None = None,
        banned: Sequence[int] = (),
    ) -> int:
        """Sample the next token.

        Args:
            logits: `[V]` float32, or those of `ids`; left as they are.
            tokens: all tokens so far, for the penalties.
            ids: tokens that `logits` belong to, ascending; None: all; see `best_needed`.
            banned: tokens that are not taken.

        Raises:
            NumericError: the logits are not finite.
            OptionError: no token is left to choose.
        """
        place = int(logits.argmax())
        if not math.isfinite(logits[place]):
            raise NumericError(
                "the model's logits are not finite; the model file or a kernel is broken"
            )
        best = place if ids is None else int(ids[place])
        if self._takes_best and best not in banned:
            return best
        candidates = self.candidates(logits, tokens, ids=ids, banned=banned)
        if self._options.temperature == 0:
            return candidates.token(int(candidates.scores.argmax()))
        return self._mirostat(candidates) if self._options.mirostat else self._draw(candidates)

    def candidates(
        self,
        logits: Floats,
        tokens: Sequence[int],
        *,
        ids: NDArray[np.intp] | None = None,
        banned: Sequence[int] = (),
    ) -> Candidates:
        """Return the tokens that the samplers leave, with the scores that they are drawn by.

        Args:
            logits, tokens, ids, banned: see `sample`.

        Raises:
            OptionError: no token is left to choose.
        """
        candidates = Candidates(logits.copy(), ids)
        candidates.scores[self._biased] += self._biases
        if banned:
            candidates.scores[candidates.places(banned)] = -np.inf
        if candidates.scores.max() == -math.inf:
            raise OptionError(
                "no token is left to choose from: `logit_bias`, `ignore_eos`, `min_tokens` and the "
                "logit filter rule out all of them"
            )
        for step in self._steps:
            candidates = step(candidates, tokens)
        return candidates

    def _draw(self, candidates: Candidates) -> int:
        candidates = candidates.in_order()
        return candidates.token(self._drawn(softmax(candidates.scores)))

    def _mirostat(self, candidates: Candidates) -> int:
        """Draw a token, and move the limit on its surprise towards the target."""
        candidates = samplers.mirostat(candidates, self._mu)
        probabilities = softmax(candidates.scores)
        place = self._drawn(probabilities)
        surprise = -math.log2(probabilities[place])
        self._mu -= self._options.mirostat_eta * (surprise - self._options.mirostat_tau)
        return candidates.token(place)

    def _drawn(self, probabilities: NDArray[np.float64]) -> int:
        # what `Generator.choice` does, without its checks of 12 µs
        sums = probabilities.cumsum()
        return int((sums / sums[-1]).searchsorted(self._random.random(), side="right"))

    def _step(self, name: str, tokenizer: Tokenizer | None) -> _Step:
        options, least = self._options, self._options.min_keep
        if name == "dry":
            dry = Dry(options, tokenizer)
            return lambda candidates, tokens: _subtracted(candidates, dry.penalties(tokens))
        steps: dict[str, _Step] = {
            "penalties": self._penalized,
            "top_n_sigma": lambda given, _: samplers.top_n_sigma(given, options.top_n_sigma),
            "top_k": lambda given, _: samplers.top_k(given, options.top_k),
            "typ_p": lambda given, _: samplers.typical(given, options.typical_p, min_keep=least),
            "top_p": lambda given, _: samplers.top_p(given, options.top_p, min_keep=least),
            "min_p": lambda given, _: samplers.min_p(given, options.min_p, min_keep=least),
            "xtc": self._without_top,
            "temperature": lambda given, _: samplers.temperature(given, options),
        }
        return steps[name]

    def _penalized(self, candidates: Candidates, tokens: Sequence[int]) -> Candidates:
        last = self._options.repeat_last_n
        recent = tokens if last < 0 else tokens[-last:] if last else ()
        samplers.apply_penalties(candidates.scores, candidates.places(recent), self._options)
        return Candidates(candidates.scores, candidates.ids)

    def _without_top(self, candidates: Candidates, _: Sequence[int]) -> Candidates:
        options = self._options
        if self._random.random() > options.xtc_probability:
            return candidates
        return samplers.xtc(candidates, options.xtc_threshold, min_keep=options.min_keep)


def _subtracted(candidates: Candidates, penalties: dict[int, float]) -> Candidates:
    scores = candidates.scores
    if candidates.ids is None:
        scores[list(penalties)] -= np.array(list(penalties.values()), np.float32)
    elif penalties:
        values = [penalties.get(token, 0.0) for token in candidates.ids.tolist()]
        scores -= np.array(values, np.float32)
    return Candidates(scores, candidates.ids)


def active_samplers(options: GenerationOptions) -> list[str]:
    """Return the samplers that have an effect with these options, in order."""
    if options.mirostat:
        return ["temperature"] if options.temperature else []
    active = {
        "penalties": _penalizes(options),
        "dry": options.dry_multiplier > 0 and options.dry_penalty_last_n != 0,
        "top_n_sigma": options.top_n_sigma > 0,
        "top_k": options.top_k > 0,
        "typ_p": options.typical_p < 1,
        "top_p": options.top_p < 1,
        "min_p": options.min_p > 0,
        "xtc": options.xtc_probability > 0 and options.xtc_threshold <= 0.5,
        "temperature": options.temperature != 1 or options.dynatemp_range > 0,
    }
    names = [name for name in options.samplers if active[name]]
    if options.temperature == 0 and _in_usual_order(names) and not {"typ_p", "xtc"} & set(names):
        return [name for name in names if name in ("penalties", "dry")]  # others keep the best
    return names


def _in_usual_order(names: Sequence[str]) -> bool:
    return list(names) == sorted(names, key=SAMPLERS.index)


def best_needed(options: GenerationOptions, *, ends: int) -> int:
    """Return the number of best logits that lead to the same token as all; 0: all are needed.

    A few suffice if scores are lowered and never raised: then as many as are needed are left.

    Args:
        ends: number of tokens that may be banned.
    """
    names = active_samplers(options)
    few = {"penalties", "top_k", "top_p", "min_p", "temperature"}.issuperset(names)
    if options.mirostat or not few or not _in_usual_order(names):
        return 0
    raising = min(options.repeat_penalty - 1, options.presence_penalty, options.frequency_penalty)
    needed = 1 if options.temperature == 0 else options.top_k if "top_k" in names else 0
    if options.logit_bias or ("penalties" in names and raising < 0) or needed == 0:
        return 0
    if "penalties" in names:
        if options.repeat_last_n < 0:
            return 0
        needed += options.repeat_last_n
    needed = max(needed + ends, options.logprobs)
    return needed if needed <= MOST_CANDIDATES else 0


def _penalizes(options: GenerationOptions) -> bool:
    """Whether penalties change the scores of recent tokens."""
    none = (1, 0, 0)
    return none != (options.repeat_penalty, options.presence_penalty, options.frequency_penalty)


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Return log-probabilities in float64, over the last axis."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
