"""Timing of calls, and comparison of a provider with the native kernels by their times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from edgellm.backends.planner import Costs

Key = TypeVar("Key")
Result = TypeVar("Result")
# Seconds of single calls; the fastest was disturbed least, and their spread shows the uncertainty.
Samples = tuple[float, ...]

# A call that takes longer is timed once: an emulated accelerator needs minutes for a chunk.
_LONG_S = 1.0
# Time after which no further round of calls in turns begins.
_ROUNDS_S = 3.0
# Factor by which a provider must be faster, at the least that its times allow. Chunks were measured
# on an empty sequence and the native step at 128 tokens: 512 at once are 9 % faster.
MARGIN = 1.2


def repeated(run: Callable[[], Result], *, times: int = 3) -> list[tuple[float, Result]]:
    """Time some calls, only one if it takes long; return the seconds and result of each."""
    results = []
    for _ in range(times):
        begin = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begin
        results.append((seconds, result))
        if seconds > _LONG_S:
            break
    return results


def best_seconds(run: Callable[[], object], *, times: int = 3) -> float:
    """Return the seconds of the fastest of some calls."""
    return min(seconds for seconds, _ in repeated(run, times=times))


def in_turns(
    runs: Mapping[Key, Callable[[], object]], *, times: int = 5, limit_s: float = _ROUNDS_S
) -> dict[Key, Samples]:
    """Time calls to compare in rounds, so that other work on the machine disturbs all of them.

    The first round warms up and does not count, unless it takes so long that it is the only one.
    """
    rounds: list[dict[Key, float]] = []
    begin = time.perf_counter()
    while len(rounds) <= times and (not rounds or time.perf_counter() - begin < limit_s):
        rounds.append({key: _seconds(run) for key, run in runs.items()})
    counted = rounds[1:] or rounds
    return {key: tuple(seconds[key] for seconds in counted) for key in runs}


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class MeasuredPrompt:
    """Seconds of a whole prompt: through a provider's chunks, and through the native kernels."""

    tokens: int
    provider: Samples
    native: Samples


@dataclass(frozen=True)
class Measured:
    """Seconds of calls, each measured a few times.

    Attributes:
        chunks: seconds of a whole chunk, by size.
        step: seconds of the decode step on the host, by its tokens; empty where it takes none.
        prompt: seconds of a whole prompt, if that was measured.
    """

    chunks: Mapping[int, Samples]
    step: Mapping[int, Samples] = field(default_factory=dict)
    prompt: MeasuredPrompt | None = None

    def costs(self) -> Costs:
        """Return costs for the planner, from the least disturbed calls."""
        chunks = {size: min(samples) for size, samples in self.chunks.items()}
        if not self.step:
            return Costs(chunks)
        few, many = min(self.step), max(self.step)
        token = self._token(min(self.step[few]), min(self.step[many]))
        return Costs(chunks, max(0.0, min(self.step[few]) - token * few), token)

    def native_token(self) -> float:
        """Return the least seconds of a token in the decode step, as far as is known."""
        return self._token(max(self.step[min(self.step)]), min(self.step[max(self.step)]))

    def chunk_token(self) -> float:
        """Return the most seconds of a token in the cheapest chunk."""
        return min(max(samples) / size for size, samples in self.chunks.items())

    def advantage(self) -> float:
        """Return the least factor by which a long prompt is faster than on the native kernels.

        The provider's slowest call counts against the fastest native one. The times of a whole
        prompt, if measured, decide instead of those of its parts.
        """
        if self.prompt is not None:
            return min(self.prompt.native) / max(self.prompt.provider)
        return self.native_token() / self.chunk_token() if self.step else 0.0

    def _token(self, few_seconds: float, many_seconds: float) -> float:
        few, many = min(self.step), max(self.step)
        if few == many:
            return many_seconds / many
        return max(0.0, (many_seconds - few_seconds) / (many - few))


def to_json(measured: Measured) -> dict[str, Any]:
    """Return times as JSON that `from_json` reads."""
    prompt = measured.prompt
    return {
        "chunks": {str(size): list(samples) for size, samples in measured.chunks.items()},
        "step": {str(count): list(samples) for count, samples in measured.step.items()},
        "prompt": prompt and [prompt.tokens, list(prompt.provider), list(prompt.native)],
    }


def from_json(values: Any, chunk_sizes: Sequence[int]) -> Measured | None:
    """Read the JSON of `to_json`, for chunks of these sizes; None for anything else."""
    try:
        chunks = {size: _samples(values["chunks"][str(size)]) for size in chunk_sizes}
        step = {int(count): _samples(times) for count, times in values["step"].items()}
        if any(count < 1 for count in step):
            return None
        if values["prompt"] is None:
            return Measured(chunks, step)
        tokens, provider, native = values["prompt"]
        prompt = MeasuredPrompt(int(tokens), _samples(provider), _samples(native))
        return Measured(chunks, step, prompt)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def _samples(values: Any) -> Samples:
    samples = tuple(map(float, values))
    if not samples or not all(0 < seconds < math.inf for seconds in samples):
        raise ValueError("times are positive numbers")
    return samples
