"""Tokens served to each owner of requests, so that none pushes out another. Pure Python.

The virtual token counters of "Fairness in Serving Large Language Models" (VTC, Sheng et al.,
arXiv:2401.00588): the owner that was served the fewest tokens goes first, and one that comes back
has saved nothing up meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# Tokens served, to all owners, after which half of an owner's lead or debt is forgotten: four
# prompts of 4,096. An owner of endless small answers would else gather a lead without an end.
_HALF_LIFE = 16_384


class OwnerCounters:
    """Tokens computed for each owner, of prompts and of answers, older ones counted less."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def of(self, owner: str) -> float:
        """Return the tokens served to an owner; the owner with the fewest goes first."""
        return self._served.get(owner, 0.0)

    def came(self, owner: str, *, present: Collection[str]) -> None:
        """Count in a new request; an owner that had none is lifted to the least of the others'.

        Args:
            present: owners of the requests that are on their way already.
        """
        if owner in present:
            return
        if not present:  # no owner to be compared with
            self._served = {owner: 0.0}
            return
        least = min(map(self.of, present))
        # counts up to the least would be lifted to it anyway
        served = {each: tokens for each, tokens in self._served.items() if tokens > least}
        self._served = {owner: least} | {each: self.of(each) for each in present} | served

    def serve(self, rows: Mapping[str, int]) -> None:
        """Count the tokens that a step has computed for each owner."""
        kept = 0.5 ** (sum(rows.values()) / _HALF_LIFE)
        self._served = {owner: tokens * kept for owner, tokens in self._served.items()}
        for owner, count in rows.items():
            self._served[owner] = self.of(owner) + count
