"""Counters and histograms of a server since its start, as `/metrics` shows them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from edgellm.results import Stats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Histogram: counts of values by the smallest bound that is not below them, and their sum."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class Metrics:
    """Counters of one server.

    Attributes:
        running: unfinished asks that have a first token.
        waiting: unfinished asks without a first token; embeddings never have one.
        finished: number of answers by finish reason.
        rejected: number of refused asks and texts by reason.
        prompt_seconds, generation_seconds: seconds of prefill and of decode, summed over answers.
    """

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preempted: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_seconds: float = 0.0
    generation_seconds: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    whole_answer: Histogram = field(default_factory=Histogram)
    queued: Histogram = field(default_factory=Histogram)

    def answered(self, stats: Stats, reason: str, *, seconds: float, first: bool) -> None:
        """Count a finished answer.

        Args:
            seconds: time from the arrival of its ask to its end.
            first: whether it is the first of the answers to its prompt, which counts once.
        """
        self.finished[reason] += 1
        self.generation_tokens += stats.generation_tokens
        self.preempted += stats.preempted
        self.drafted_tokens += stats.drafted_tokens
        self.accepted_tokens += stats.accepted_tokens
        self.whole_answer.add(seconds)
        if stats.generation_tokens_per_second > 0:
            decoded = max(stats.generation_tokens - 1, 0)
            self.generation_seconds += decoded / stats.generation_tokens_per_second
        if not first:
            return
        self.prompt_tokens += stats.prompt_tokens
        self.cached_tokens += stats.cached_tokens
        self.queued.add(stats.queued_s)
        if stats.ttft_s > 0:
            self.first_token.add(stats.ttft_s)
        if stats.prompt_tokens_per_second > 0:
            computed = stats.prompt_tokens - stats.cached_tokens
            self.prompt_seconds += computed / stats.prompt_tokens_per_second

    @property
    def prompt_tokens_per_second(self) -> float:
        """Average rate of prefill so far, in tokens per second; 0 before the first prompt."""
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prompt_seconds if self.prompt_seconds > 0 else 0.0
