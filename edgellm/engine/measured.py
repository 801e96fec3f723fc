"""Times of a provider and of the native kernels, and their comparison. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgellm.backends.planner import Costs
from edgellm.backends.timing import Samples

# Factor by which a provider must be faster, at the least that its times allow. Chunks were measured
# on an empty sequence and the native step at 128 tokens: 512 at once are 9 % faster.
MARGIN = 1.2


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
