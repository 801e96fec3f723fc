"""How a prompt is cut into fixed-size chunks. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

# A call of a segment costs about as much as this many more rows: 8 rows of SmolLM2-135M take
# 0.5 ms a chunk over 31 segments on two cores with AVX-512 VNNI.
CALL_OVERHEAD_ROWS = 8


def plan_chunks(tokens: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Chunks that cover `tokens`, each as (static size, tokens in it); only the last is padded.

    The largest size is used while it can be filled. What remains goes into the cheapest run of
    one size, counting padded rows and a fixed cost a call.
    """
    largest = max(sizes)
    plan = [(largest, largest)] * (tokens // largest)
    rest = tokens % largest
    if rest:
        size = min(sizes, key=lambda s: (-(-rest // s) * (s + CALL_OVERHEAD_ROWS), s))
        plan += [(size, size)] * (rest // size)
        if rest % size:
            plan.append((size, rest % size))
    return plan
