"""Plans that cut rows into chunks, from the costs of chunks on this machine. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Costs of chunks and of the host in seconds, measured once (see `costs.py`).

    Attributes:
        chunks: seconds of a whole chunk by static size, however many of its rows are padding.
        call: seconds of a step on the host, apart from its tokens; None: the host takes no tokens.
        token: seconds of each token in a step on the host.
    """

    chunks: Mapping[int, float]
    call: float | None = None
    token: float = 0.0

    def seconds(self, plan: Iterable[PlannedChunk]) -> float:
        """Return the seconds that all chunks of a plan take, one after the other."""
        return sum(
            (self.call or 0.0) + self.token * chunk.count
            if chunk.size is None
            else self.chunks[chunk.size]
            for chunk in plan
        )


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
    best_size = min(costs.chunks, key=lambda size: (costs.chunks[size] / size, -size))
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
            (PlannedChunk(size, min(size, left)), cost) for size, cost in costs.chunks.items()
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
