"""Eviction policies: which blocks of a long context stay in the KV cache, within a budget.

What a row sees depends on its position alone. So its K and V are the same however a prompt is cut
and by which request, and prefixes, forks and rewinds are exact, as with sliding windows.
Positions stay those of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from edgellm.kernels.kv_blocks import BLOCK

# Maximum of tokens that a step adds to a sequence under a budget, of which they take a part.
BUDGET_ROWS = 256
KVPolicy = Literal["sinks"]
KV_POLICIES: tuple[str, ...] = get_args(KVPolicy)


class EvictionPolicy(Protocol):
    """A choice of the blocks that stay."""

    @property
    def recent(self) -> int:
        """Number of last blocks that a row sees beside the first one, its own among them."""

    def first_block(self, length: int) -> int:
        """Return the number of the first block, apart from block 0, that tokens from position
        `length` on see."""

    def blocks_for(self, *, rows: int) -> int:
        """Return the blocks of a long sequence that grows by `rows` tokens at a time."""


@dataclass(frozen=True)
class Sinks:
    """The first block, and the last ones (StreamingLLM, Xiao et al., arXiv:2309.17453)."""

    recent: int

    @classmethod
    def within(cls, kv_budget: int) -> Sinks:
        """Return the policy whose sequences hold no more tokens, those of a step included."""
        return cls(kv_budget // BLOCK - (cls(0).blocks_for(rows=BUDGET_ROWS)))

    def first_block(self, length: int) -> int:
        return max(0, length // BLOCK + 1 - self.recent)

    def blocks_for(self, *, rows: int) -> int:
        return 1 + self.recent + -(-(rows - 1) // BLOCK)


# The block of a row and the one before it, the first one, and those of a step's other rows.
LEAST_BUDGET = Sinks(2).blocks_for(rows=BUDGET_ROWS) * BLOCK


def policy_of(kv_policy: KVPolicy, kv_budget: int | None) -> EvictionPolicy | None:
    """Return the policy of a budget in tokens; None without one."""
    return None if kv_budget is None else {"sinks": Sinks.within}[kv_policy](kv_budget)


def evicted_tokens(policy: EvictionPolicy | None, length: int) -> int:
    """Count the tokens of a context that its next token does not see."""
    return 0 if policy is None else max(0, policy.first_block(length) - 1) * BLOCK
