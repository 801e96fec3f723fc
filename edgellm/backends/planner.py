"""How rows are cut into chunks, from what they cost on this machine. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds, measured once (see `costs.py`).

    Attributes:
        chunks: a whole chunk of each static size, however many of its rows are padding.
        call: the decode step on the host, apart from its tokens; None where it takes none.
        token: the decode step, each token.
    """

    chunks: Mapping[int, float]
    call: float | None = None
    token: float = 0.0

    def seconds(self, plan: Iterable[PlannedChunk]) -> float:
        """What all of a plan takes, one after the other."""
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
    """The cheapest way through `tokens`; only the last chunk is padded, or on the host.

    Whole chunks of the size that is cheapest a token while more than two of the largest are left;
    the rest is tried in every combination. The largest chunks come first.

    Args:
        tails_only: the host takes no more than what is shorter than the smallest chunk, else as
            much as it is cheaper for.
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
    """Whose rows each chunk takes, where spans of `counts` tokens lie one behind the other.

    Returns:
        For each chunk the spans in it by their number, and how many rows each has there.
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
    """Dynamic programming over what has been computed so far."""
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
    """The same sizes in one order, so that a part of a plan is the plan of that part: orders cost
    the same but for rounding. The host's tokens stay the last ones."""
    sizes = [chunk.size for chunk in plan if chunk.size is not None]
    left = sum(chunk.count for chunk in plan if chunk.size is not None)
    ordered: list[PlannedChunk] = []
    for size in sorted(sizes, reverse=True):
        if left > 0:  # else there was room for these in what another one is padded by
            ordered.append(PlannedChunk(size, min(size, left)))
            left -= size
    return ordered + [chunk for chunk in plan if chunk.size is None]
