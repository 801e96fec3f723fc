"""llama.cpp's samplers: pure functions that cut, or score anew, the candidates for a token.

Each gives what llama.cpp's sampler of that name gives for the same logits. Only chance differs:
`xtc` and the draw itself take their random numbers from the caller.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.generation_options import GenerationOptions
from edgellm.kernels.sampling import top_k as best_places
from edgellm.text.tokenizer import Tokenizer

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Candidates:
    """Tokens that may come next.

    Attributes:
        scores: `[n]` float32.
        ids: token id of each score `[n]`; None: all tokens, by id.
        ordered: whether the highest score comes first.
    """

    scores: Floats
    ids: NDArray[np.intp] | None = None
    ordered: bool = False

    def at(self, places: NDArray[np.intp], *, ordered: bool) -> Candidates:
        ids = places if self.ids is None else self.ids[places]
        return Candidates(self.scores[places], ids, ordered)

    def first(self, count: int) -> Candidates:
        """Return the `count` best candidates, at least one; these must be ordered."""
        count = max(1, count)
        if count >= len(self.scores):
            return self
        ids = np.arange(count) if self.ids is None else self.ids[:count]
        return Candidates(self.scores[:count], ids, ordered=True)

    def in_order(self) -> Candidates:
        return self if self.ordered else self.at(best_places(self.scores, 0), ordered=True)

    def token(self, place: int) -> int:
        return place if self.ids is None else int(self.ids[place])

    def places(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the places of the tokens that are candidates, as often as they are given."""
        if self.ids is None or not tokens:
            return tokens
        by_id = self.ids.argsort(kind="stable")
        wanted, ids = np.asarray(tokens), self.ids[by_id]
        ranks = np.minimum(ids.searchsorted(wanted), len(ids) - 1)
        places: list[int] = by_id[ranks[ids[ranks] == wanted]].tolist()
        return places


def softmax(scores: Floats) -> NDArray[np.float64]:
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    total: NDArray[np.float64] = weights / weights.sum()
    return total


def apply_penalties(scores: Floats, recent: Sequence[int], options: GenerationOptions) -> None:
    """Apply penalties to the scores of recent tokens, given by their places, in place."""
    if not recent:
        return
    times = Counter(recent)  # 64 tokens: 20 µs less than `np.unique`
    places = np.fromiter(times, np.intp, len(times))
    values = scores[places]
    if options.repeat_penalty != 1:
        penalty = np.float32(options.repeat_penalty)
        values = np.where(values > 0, values / penalty, values * penalty)
    values -= np.float32(options.presence_penalty)
    if options.frequency_penalty:
        counts = np.fromiter(times.values(), np.float32, len(times))
        values -= np.float32(options.frequency_penalty) * counts
    scores[places] = values


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Rule out scores more than `n` standard deviations below the best (Tang et al.,
    arXiv:2411.07641)."""
    scores = candidates.scores
    finite = scores[scores > -math.inf].astype(np.float64)
    least = finite.max() - n * finite.std()
    kept = np.where(scores < np.float32(least), np.float32(-math.inf), scores)
    return Candidates(kept, candidates.ids, candidates.ordered)


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep the `k` best; 0: all."""
    if k == 0:
        return candidates
    if candidates.ordered:
        return candidates.first(k)
    return candidates.at(best_places(candidates.scores, k), ordered=True)


def typical(candidates: Candidates, p: float, *, min_keep: int = 0) -> Candidates:
    """Keep tokens whose surprise is nearest to the entropy, until they make up more than `p`
    (Meister et al., arXiv:2202.00666)."""
    candidates = candidates.in_order()
    probabilities = softmax(candidates.scores)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    likely = probabilities > 0
    entropy = probabilities[likely] @ surprise[likely]
    order = np.abs(surprise - entropy).argsort(kind="stable")
    within = np.count_nonzero(probabilities[order].cumsum() <= p)
    return candidates.at(np.sort(order[: max(within + 1, min_keep)]), ordered=True)


def top_p(candidates: Candidates, p: float, *, min_keep: int = 0) -> Candidates:
    """Keep the fewest best tokens whose probabilities sum up to `p` (Holtzman et al.,
    arXiv:1904.09751)."""
    if not candidates.ordered:
        # tokens below make up less than 1 - p together, so none of them is kept
        least = (1 - p) / len(candidates.scores)
        probabilities = softmax(candidates.scores)
        places = np.flatnonzero(probabilities >= least)
        if len(places) < min_keep:
            places = np.arange(len(probabilities))
        places = places[best_places(candidates.scores[places], 0)]
        candidates, probabilities = candidates.at(places, ordered=True), probabilities[places]
    else:
        probabilities = softmax(candidates.scores)
    return candidates.first(max(int(np.count_nonzero(keep_top_p(probabilities, p))), min_keep))


def min_p(candidates: Candidates, p: float, *, min_keep: int = 0) -> Candidates:
    """Keep tokens at least `p` times as probable as the best (Nguyen et al., arXiv:2407.01082)."""
    scores = candidates.scores.astype(np.float64)
    kept = scores >= float(scores.max()) + (math.log(p) if p else -math.inf)
    count = int(np.count_nonzero(kept))
    if count < min_keep or candidates.ordered:
        return candidates.in_order().first(max(count, min_keep))
    return candidates.at(np.flatnonzero(kept), ordered=False)


def xtc(candidates: Candidates, threshold: float, *, min_keep: int = 0) -> Candidates:
    """Leave out all tokens as probable as `threshold` but the least probable of them."""
    candidates = candidates.in_order()
    probabilities = softmax(candidates.scores)
    left_out = int(np.count_nonzero((probabilities >= threshold) & (probabilities > 0))) - 1
    count = len(candidates.scores)
    if left_out < 1 or count - left_out < min_keep:
        return candidates
    return candidates.at(np.arange(left_out, count), ordered=True)


def temperature(candidates: Candidates, options: GenerationOptions) -> Candidates:
    """Divide scores by the temperature.

    With a `dynatemp_range`, it grows with the entropy, from that much below `temperature` to that
    much above it.
    """
    value, count = options.temperature, len(candidates.scores)
    if options.dynatemp_range and not options.mirostat:
        if count == 1:
            return candidates
        probabilities = softmax(candidates.scores)
        probabilities = probabilities[probabilities > 0]
        entropy = -float(probabilities @ np.log(probabilities)) / math.log(count)
        low, high = max(0.0, value - options.dynatemp_range), value + options.dynatemp_range
        value = low + (high - low) * max(0.0, entropy) ** options.dynatemp_exponent
    divisor = np.float32(value)
    if divisor == 0:
        return candidates.in_order().first(1)
    with np.errstate(over="ignore"):
        scores = candidates.scores / divisor
        if not math.isfinite(scores.max()):  # with the best at 0, others are at minus infinity
            scores = (candidates.scores - candidates.scores.max()) / divisor
    return Candidates(scores, candidates.ids, ordered=candidates.ordered)


def mirostat(candidates: Candidates, mu: float) -> Candidates:
    """Keep tokens with a surprise of up to `mu` bits, at least one (Mirostat 2.0, Basu et al.,
    arXiv:2007.14966)."""
    candidates = candidates.in_order()
    probabilities = softmax(candidates.scores)
    return candidates.first(int(np.count_nonzero(probabilities >= 2.0**-mu)))


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


# DRY: penalties of tokens that would go on with a repetition.

# Repeated tokens beyond `dry_allowed_length` that are counted. With the usual base, a penalty stops
# growing after 158 of them, where float32 ends.
_MOST = 1000
_LARGEST_LOGARITHM = math.log(np.finfo(np.float32).max)
# Largest penalty: scores stay finite, so that the best of penalized tokens is still found.
_LARGEST = 1e30


class Dry:
    """The penalties of one answer.

    Args:
        tokenizer: tokenizer with which texts that end repetitions are recognized.
    """

    def __init__(self, options: GenerationOptions, tokenizer: Tokenizer | None) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._breakers: dict[int, list[tuple[int, ...]]] = {}
        base = math.log(options.dry_base)
        self._most = math.floor(_LARGEST_LOGARITHM / base) if base > 1e-6 else 0
        self._longest = options.dry_allowed_length + min(self._most, _MOST)
        self._repetitions = Repetitions(max(self._longest, 1))

    def penalties(self, tokens: Sequence[int]) -> dict[int, float]:
        """Return what is subtracted from the scores of tokens that would go on with a repetition.

        Args:
            tokens: all tokens so far.
        """
        options = self._options
        last_n = options.dry_penalty_last_n
        count = len(tokens) if last_n < 0 else min(last_n, len(tokens))
        allowed = options.dry_allowed_length
        self._repetitions.follow(tokens)  # at each token, also where nothing repeats
        limit = self._since_breaker(tokens, count)
        if count <= allowed or limit < allowed:
            return {}
        lengths = self._repetitions.before(tokens, count, limit=limit, least=allowed)
        return {
            token: min(_LARGEST, options.dry_multiplier * options.dry_base**more)
            for token, length in lengths.items()
            for more in (min(length - allowed, self._most),)
            if () not in self._tails(token)
        }

    def _since_breaker(self, tokens: Sequence[int], count: int) -> int:
        """Return the number of last tokens behind which a repetition cannot begin."""
        for back in range(min(count, self._longest)):
            at = len(tokens) - 1 - back
            breakers = [
                len(tail)
                for tail in self._tails(tokens[at])
                if len(tail) <= back and tuple(tokens[at + 1 : at + 1 + len(tail)]) == tail
            ]
            if breakers:
                return back - max(breakers)
        return min(count, self._longest)

    def _tails(self, token: int) -> list[tuple[int, ...]]:
        """Return the tokens that make a breaker with a token: each a tail; () if it has one."""
        if token not in self._breakers:
            self._breakers[token] = self._found_tails(token)
        return self._breakers[token]

    def _found_tails(self, token: int) -> list[tuple[int, ...]]:
        if self._tokenizer is None:
            return []
        text = self._tokenizer.bytes_of(token).decode(errors="replace")
        tails: list[tuple[int, ...]] = []
        for breaker in self._options.dry_sequence_breakers:
            if breaker in text:
                tails.append(())
                continue
            for length in range(1, min(len(breaker), len(text) + 1)):
                if text.endswith(breaker[:length]):
                    rest = self._tokenizer.encode(breaker[length:], add_bos=False)
                    tails.append(tuple(rest))
        return tails


class Repetitions:
    """Earlier places of what a text ends with, kept up as the text grows token by token.

    A token costs a pass over all earlier ones, 60 µs for 32,000.

    Args:
        longest: length up to which repetitions are told apart.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._tokens = np.empty(0, np.int64)
        self._count = 0
        # at each place: length of the longest text that ends there and at the end
        self._lengths = np.empty(0, np.int32)

    def before(
        self, tokens: Sequence[int], count: int, *, limit: int, least: int
    ) -> dict[int, int]:
        """Return, for tokens that came behind what the text ends with, how long that was.

        Args:
            tokens: token ids of the text.
            count: number of last tokens to look at.
            limit: longest repetition that counts; longer ones count as this long.
            least: length from which on a repetition counts.
        """
        self.follow(tokens)
        start, last = len(tokens) - count, len(tokens) - 1
        lengths = np.minimum(self._lengths[start:last], np.arange(1, count))
        np.minimum(lengths, limit, out=lengths)
        ends = np.flatnonzero(lengths >= least)
        ends = ends[lengths[ends].argsort(kind="stable")]
        followers = self._tokens[start + ends + 1]
        return dict(zip(followers.tolist(), lengths[ends].tolist(), strict=True))

    def follow(self, tokens: Sequence[int]) -> None:
        """Take over a text: usually the one before, and one token more."""
        known = self._count
        if 0 < known == len(tokens) and tokens[-1] == self._tokens[known - 1]:
            return
        grown = (
            len(tokens) == known + 1 and known > 0 and tokens[known - 1] == self._tokens[known - 1]
        )
        if len(tokens) > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * len(tokens))
            self._lengths = np.resize(self._lengths, 2 * len(tokens))
        if not grown:
            self._tokens[: len(tokens)] = tokens
            self._lengths[: len(tokens)] = 0
            known = max(0, len(tokens) - self._longest)
        for end in range(known, len(tokens)):
            self._tokens[end] = tokens[end]
            self._add(end)
        self._count = len(tokens)

    def _add(self, end: int) -> None:
        """Bring the lengths from those at the token before `end` to those at `end`."""
        before = self._lengths[: max(0, end - 1)].copy()
        alike = self._tokens[:end] == self._tokens[end]
        longer = np.ones(end, np.int32)
        longer[1:] += before
        np.minimum(longer, self._longest, out=longer)
        self._lengths[:end] = np.where(alike, longer, 0)
