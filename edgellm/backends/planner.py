"""Plans that cut rows into chunks, from the costs of chunks on this machine. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

# Seconds of single calls; the fastest was disturbed least, and their spread shows the uncertainty.
Samples = tuple[float, ...]


@dataclass(frozen=True)
class MeasuredPrompt:
    """Seconds of a whole prompt: through a provider's chunks, and through the native kernels."""

    tokens: int
    provider: Samples
    native: Samples


@dataclass(frozen=True)
class Costs:
    """Costs of chunks and of the host: seconds of calls, measured once (see `engine/costs.py`).

    Attributes:
        chunks: seconds of a whole chunk by static size, however many of its rows are padding.
        step: seconds of a step on the host, by its tokens; empty: the host takes no tokens.
        prompt: seconds of a whole prompt, if that was measured.
    """

    chunks: Mapping[int, Samples]
    step: Mapping[int, Samples] = field(default_factory=dict)
    prompt: MeasuredPrompt | None = None

    @cached_property
    def chunk(self) -> Mapping[int, float]:
        """Seconds of a whole chunk by static size."""
        return {size: min(samples) for size, samples in self.chunks.items()}

    @cached_property
    def token(self) -> float:
        """Seconds of each token in a step on the host."""
        return self._token(min, min) if self.step else 0.0

    @cached_property
    def call(self) -> float | None:
        """Seconds of a step on the host, apart from its tokens; None: it takes no tokens."""
        if not self.step:
            return None
        few = min(self.step)
        return max(0.0, min(self.step[few]) - self.token * few)

    def seconds(self, plan: Iterable[PlannedChunk]) -> float:
        """Return the seconds that all chunks of a plan take, one after the other."""
        return sum(
            (self.call or 0.0) + self.token * chunk.count
            if chunk.size is None
            else self.chunk[chunk.size]
            for chunk in plan
        )

    def native_token(self) -> float:
        """Return the least seconds of a token in the step on the host, as far as is known."""
        return self._token(max, min)

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

    def _token(
        self, of_few: Callable[[Samples], float], of_many: Callable[[Samples], float]
    ) -> float:
        few, many = min(self.step), max(self.step)
        seconds = of_many(self.step[many])
        if few == many:
            return seconds / many
        return max(0.0, (seconds - of_few(self.step[few])) / (many - few))


@dataclass(frozen=True)
class PlannedChunk:
    """Tokens computed together; `size` is the static chunk, or None for the host."""

    size: int | None
    count: int


def plan_chunks(tokens: int, costs: Costs, *, tails_only: bool = True) -> list[PlannedChunk]:
    """Plan the cheapest way through `tokens`; only the last chunk is padded, or on the host.

    Whole chunks of the size that is cheapest for each token come first, while more tokens than two
    of the largest chunks are left. The rest is tried in every combination, and all chunks are
    sorted, the largest first.

    Args:
        tails_only: whether the host takes only a tail shorter than the smallest chunk, else all
            tokens for which it is cheaper.
    """
    best_size = min(costs.chunks, key=lambda size: (costs.chunk[size] / size, -size))
    whole = max(0, (tokens - 2 * max(costs.chunks)) // best_size)
    rest = _cheapest(
        tokens - whole * best_size,
        costs,
        host_limit=min(costs.chunks) - 1 if tails_only else tokens,
    )
    return _largest_first([PlannedChunk(best_size, best_size)] * whole + rest)


def shares_of_chunks(
    plan: Sequence[PlannedChunk], counts: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Share chunks among spans of `counts` tokens that lie one behind the other.

    Returns:
        For each chunk, pairs of a span's number and how many rows the span has there.
    """
    shares: list[list[tuple[int, int]]] = []
    number, used = 0, 0
    for chunk in plan:
        free, shared = chunk.count, list[tuple[int, int]]()
        while free:
            rows = min(free, counts[number] - used)
            if rows:
                shared.append((number, rows))
            free, used = free - rows, used + rows
            if used == counts[number]:
                number, used = number + 1, 0
        shares.append(shared)
    return shares


def _cheapest(tokens: int, costs: Costs, *, host_limit: int) -> list[PlannedChunk]:
    """Find the cheapest chunks for `tokens`, by dynamic programming over the tokens done."""
    seconds = [0.0] + [float("inf")] * tokens
    before: list[PlannedChunk] = [PlannedChunk(None, 0)] * (tokens + 1)
    for done in range(tokens):
        left = tokens - done
        choices = [
            (PlannedChunk(size, min(size, left)), cost) for size, cost in costs.chunk.items()
        ]
        if costs.call is not None and left <= host_limit:
            choices.append((PlannedChunk(None, left), costs.call + costs.token * left))
        for chunk, cost in choices:
            if seconds[done] + cost <= seconds[done + chunk.count]:
                seconds[done + chunk.count] = seconds[done] + cost
                before[done + chunk.count] = chunk
    plan: list[PlannedChunk] = []
    while tokens:
        plan.append(before[tokens])
        tokens -= before[tokens].count
    return plan[::-1]


def _largest_first(plan: Sequence[PlannedChunk]) -> list[PlannedChunk]:
    """Sort the chunks of a plan by size, the largest first; the host's tokens stay the last.

    So a part of a plan is the plan of that part. All orders cost the same but for rounding.
    """
    sizes = [chunk.size for chunk in plan if chunk.size is not None]
    left = sum(chunk.count for chunk in plan if chunk.size is not None)
    ordered: list[PlannedChunk] = []
    for size in sorted(sizes, reverse=True):
        if left > 0:  # else these tokens already fit into the padding of a larger chunk
            ordered.append(PlannedChunk(size, min(size, left)))
            left -= size
    return ordered + [chunk for chunk in plan if chunk.size is None]
