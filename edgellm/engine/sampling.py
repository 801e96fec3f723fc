"""From logits to a token: pure functions, applied in llama.cpp's order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import NumericError, OptionError
from edgellm.generation_options import GenerationOptions
from edgellm.kernels.sampling import MOST_CANDIDATES, top_k
from edgellm.text.tokenizer import Tokenizer

Floats = NDArray[np.float32]
# Tolerance of a logarithm, for roundings on the way to a probability.
_SLACK = 1e-3


class Sampler:
    """Sampler of one answer's tokens."""

    def __init__(self, options: GenerationOptions) -> None:
        self._options = options
        changed = options.logit_bias or _penalizes(options)
        self._takes_best = options.temperature == 0 and not changed
        self._biased = np.fromiter(options.logit_bias, np.intp)
        self._biases = np.fromiter(options.logit_bias.values(), np.float32)
        self._random = np.random.default_rng(options.seed)

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
        options = self._options
        place = int(logits.argmax())
        if not math.isfinite(logits[place]):
            raise NumericError(
                "the model's logits are not finite; the model file or a kernel is broken"
            )
        if self._takes_best and not banned:
            return place if ids is None else int(ids[place])
        scores = logits.copy()
        scores[self._biased] += self._biases
        if banned:
            scores[_places(banned, ids)] = -np.inf
        recent = _recent(tokens, options.repeat_last_n) if _penalizes(options) else ()
        apply_penalties(scores, _places(recent, ids), options)
        best = int(scores.argmax())
        if scores[best] == -math.inf:
            raise OptionError(
                "no token is left to choose from: `logit_bias`, `ignore_eos`, `min_tokens` and the "
                "logit filter rule out all of them"
            )
        place = best if options.temperature == 0 else self._draw(scores)
        return place if ids is None else int(ids[place])

    def _draw(self, scores: Floats) -> int:
        """Draw a token; returns its place in `scores`."""
        options = self._options
        if options.top_k:
            places = top_k(scores, options.top_k)
            probabilities = softmax(scores[places])
        else:
            places = _by_score(scores, min_p=options.min_p)
            probabilities = softmax(scores)[places]
        kept = keep_top_p(probabilities, options.top_p)
        kept = kept & keep_min_p(probabilities, options.min_p)
        places = places[kept]
        probabilities = softmax(scores[places] / np.float32(options.temperature))
        # what `Generator.choice` does, without its checks of 12 µs
        sums = probabilities.cumsum()
        drawn = int((sums / sums[-1]).searchsorted(self._random.random(), side="right"))
        return int(places[drawn])


def _by_score(scores: Floats, *, min_p: float) -> NDArray[np.intp]:
    """Return places from the highest score on, without most of those that `min_p` leaves out."""
    least = scores.max() + np.float32(math.log(min_p) - _SLACK if min_p else -math.inf)
    places = np.flatnonzero(scores >= least)
    return places[top_k(scores[places], 0)]


def best_needed(options: GenerationOptions, *, ends: int) -> int:
    """Return the number of best logits that lead to the same token as all; 0: all are needed.

    A few suffice if scores are lowered and never raised: then as many as are needed are left.

    Args:
        ends: number of tokens that may be banned.
    """
    raising = min(options.repeat_penalty - 1, options.presence_penalty, options.frequency_penalty)
    needed = 1 if options.temperature == 0 else options.top_k
    if options.logit_bias or raising < 0 or needed == 0:
        return 0
    if _penalizes(options):
        if options.repeat_last_n < 0:
            return 0
        needed += options.repeat_last_n
    needed = max(needed + ends, options.logprobs)
    return needed if needed <= MOST_CANDIDATES else 0


def _penalizes(options: GenerationOptions) -> bool:
    """Whether penalties change the scores of recent tokens."""
    none = (1, 0, 0)
    return none != (options.repeat_penalty, options.presence_penalty, options.frequency_penalty)


def apply_penalties(scores: Floats, recent: Sequence[int], options: GenerationOptions) -> None:
    """Apply penalties to the scores `[V]` of recent tokens, in place."""
    if not recent:
        return
    times = Counter(recent)  # 64 tokens: 20 µs less than `np.unique`
    ids = np.fromiter(times, np.intp, len(times))
    values = scores[ids]
    if options.repeat_penalty != 1:
        penalty = np.float32(options.repeat_penalty)
        values = np.where(values > 0, values / penalty, values * penalty)
    values -= np.float32(options.presence_penalty)
    if options.frequency_penalty:
        counts = np.fromiter(times.values(), np.float32, len(times))
        values -= np.float32(options.frequency_penalty) * counts
    scores[ids] = values


def keep_top_p(probabilities: NDArray[np.float64], p: float) -> NDArray[np.bool_]:
    """Return a mask of the shortest head of descending probabilities whose sum reaches `p`."""
    before = np.cumsum(probabilities) - probabilities
    kept: NDArray[np.bool_] = before < p
    kept[0] = True
    return kept


def keep_min_p(probabilities: NDArray[np.float64], p: float) -> NDArray[np.bool_]:
    """Return a mask of tokens at least `p` times as probable as the first, most probable one."""
    kept: NDArray[np.bool_] = probabilities >= p * probabilities[0]
    return kept


def softmax(scores: Floats) -> NDArray[np.float64]:
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    total: NDArray[np.float64] = weights / weights.sum()
    return total


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Return log-probabilities in float64, over the last axis."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _recent(tokens: Sequence[int], count: int) -> Sequence[int]:
    if count == 0:
        return ()
    return tokens if count < 0 else tokens[-count:]


def _places(tokens: Sequence[int], ids: NDArray[np.intp] | None) -> Sequence[int]:
    """Return the places of tokens in the ascending `ids`, without missing ones; None: all ids."""
    if ids is None or not tokens:
        return tokens
    wanted = np.asarray(tokens)
    places = np.minimum(ids.searchsorted(wanted), len(ids) - 1)
    there: list[int] = places[ids[places] == wanted].tolist()
    return there


# Maximum of candidates: they are decoded and compared in pairs, which takes 12 ms for all.
_MOST_CANDIDATES = 256
# Tokens that go on with the text and are less probable than this are left out.
_LEAST = 0.2


class InfillSampler:
    """llama.cpp's `infill` sampler as a logit filter: an answer ends early rather than late.

    Only tokens that `top_k`, `top_p` and `min_p` leave count. The end tokens are taken if they are
    somewhat probable; else tokens that begin alike count as one, and improbable ones are left out.

    Args:
        options: options of the answer; its temperature applies to the tokens left.
    """

    def __init__(self, tokenizer: Tokenizer, options: GenerationOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._ends = sorted(tokenizer.eos_ids | set(options.stop_tokens))

    def __call__(self, scores: NDArray[np.float32], sampled: Sequence[int]) -> None:
        """Set scores `[V]` to logarithms of the sampler's weights; -inf where it leaves none."""
        options = self._options
        may_end = options.may_end(len(sampled))
        if not may_end:
            scores[self._ends] = -math.inf
        ids = top_k(scores, min(options.top_k or _MOST_CANDIDATES, _MOST_CANDIDATES))
        probabilities = softmax(scores[ids])
        kept = keep_top_p(probabilities, options.top_p)
        kept &= keep_min_p(probabilities, options.min_p)
        ids, probabilities = ids[kept], softmax(scores[ids[kept]])
        ends = np.isin(ids, self._ends)
        chosen = _chosen(probabilities, ends, [self._text(int(token)) for token in ids])
        if not chosen.any() and not may_end:
            ids, chosen = ids[:1], np.ones(1)
        elif not chosen.any():
            end = max(self._ends, key=lambda token: float(scores[token]))
            ids, chosen = np.array([end]), np.ones(1)
        scores.fill(-math.inf)
        left = chosen > 0
        scores[ids[left]] = np.log(chosen[left])

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)


def _chosen(
    probabilities: NDArray[np.float64], ends: NDArray[np.bool_], texts: Sequence[str]
) -> NDArray[np.float64]:
    """Return weights of the candidates, most probable first; all 0 where an end token that is none
    of them has to be taken."""
    chosen = probabilities.copy()
    if 3 * chosen[ends].sum() * len(chosen) > chosen[~ends].sum():
        chosen[~ends] = 0
        return chosen
    _join(chosen, ends, texts)
    chosen[~ends & (chosen < _LEAST)] = 0
    others = np.count_nonzero(chosen[~ends])
    if others == 0:
        return chosen * ends
    chosen /= chosen.sum()
    chosen[~ends & (chosen < 1 / (others + 1))] = 0
    return chosen


def _join(chosen: NDArray[np.float64], ends: NDArray[np.bool_], texts: Sequence[str]) -> None:
    """Add a token's probability to a more probable one's, where one text begins the other."""
    # parts of characters say nothing
    read = [i for i, text in enumerate(texts) if text and "\ufffd" not in text and not ends[i]]
    for at, i in enumerate(read):
        text = texts[i]
        for j in read[at + 1 :]:
            if not (texts[j].startswith(text) or text.startswith(texts[j])):
                continue
            if chosen[i] and chosen[j]:
                more, less = (i, j) if chosen[i] >= chosen[j] else (j, i)
                chosen[more] += chosen[less]
                chosen[less] = 0
