"""What each owner of requests was served, so that none pushes out another. Pure Python.

The virtual token counters of "Fairness in Serving Large Language Models" (VTC, Sheng et al.,
arXiv:2401.00588): who was served the fewest tokens goes first, and who comes back has saved nothing
up meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# Tokens served, to whomever, after which half of an owner's lead or debt is forgotten: four prompts
# of 4,096. One that always has some small answer on its way would gather a lead without an end.
_HALF_LIFE = 16_384


class OwnerCounters:
    """Tokens computed for each owner, of prompts and of answers, older ones counted less."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def of(self, owner: str) -> float:
        """Who has the smallest goes first."""
        return self._served.get(owner, 0.0)

    def came(self, owner: str, *, present: Collection[str]) -> None:
        """A request of an owner arrives. One that had none is lifted to the least of the others'.

        Args:
            present: owners of the requests that are on their way already.
        """
        if owner in present:
            return
        if not present:  # nobody to be compared with
            self._served = {owner: 0.0}
            return
        least = min(map(self.of, present))
        # what is no more than the least will be lifted to it anyway
        served = {each: tokens for each, tokens in self._served.items() if tokens > least}
        self._served = {owner: least} | {each: self.of(each) for each in present} | served

    def serve(self, rows: Mapping[str, int]) -> None:
        """A step has computed so many tokens of each owner."""
        kept = 0.5 ** (sum(rows.values()) / _HALF_LIFE)
        self._served = {owner: tokens * kept for owner, tokens in self._served.items()}
        for owner, count in rows.items():
            self._served[owner] = self.of(owner) + count
