"""DRY: penalties of tokens that would go on with a repetition (llama.cpp's sampler `dry`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgellm.generation_options import GenerationOptions
from edgellm.text.tokenizer import Tokenizer

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
            found = [
                len(tail)
                for tail in self._tails(tokens[at])
                if len(tail) <= back and tuple(tokens[at + 1 : at + 1 + len(tail)]) == tail
            ]
            if found:
                return back - max(found)
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
