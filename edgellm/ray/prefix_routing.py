"""Routing of requests to the replica that has computed the beginning of their prompt.

A replica that has many more requests than others is not chosen for that. Prompts are compared by
the names of their beginnings: each names a piece of the prompt and all pieces before it, as blocks
of the KV cache are named (see `prefix_index.py`). Callers with the tokens use the names of blocks;
callers with a request alone use those of `forwarding.py`. Pure Python.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgellm.errors import OptionError


@dataclass
class PrefixRouting:
    """The prefixes that each replica has computed, and the choice of a replica for a request.

    Attributes:
        most_ahead: number of requests that a replica may have more than the least busy one, and
            still be given a request whose prefix it has.
        least_share: minimum share of a prompt that a replica must have computed to be preferred
            for it.
        most_names: maximum of names remembered; the last used stay.
    """

    most_ahead: int = 8
    least_share: float = 0.1
    most_names: int = 100_000
    _owners: OrderedDict[bytes, dict[str, None]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        if self.most_ahead < 0 or not 0 <= self.least_share <= 1 or self.most_names < 1:
            raise OptionError(
                f"`most_ahead` is {self.most_ahead}, `least_share` {self.least_share}, `most_names`"
                f" {self.most_names}; allowed are 0 and more, 0 to 1, 1 and more"
            )

    def ranked(
        self, prefix: Sequence[bytes], busy: Mapping[str, int], *, draw: random.Random
    ) -> list[str]:
        """Rank all replicas for a request, the preferred one first.

        Later ones are for the case that the earlier ones take no request.

        Args:
            prefix: names of the beginnings of the request's prompt, shortest first.
            busy: number of requests of each replica.
            draw: source of random numbers.
        """
        order = _two_choices(busy, draw)
        if not order or not prefix:
            return order
        limit = min(busy.values()) + self.most_ahead
        lengths = self._lengths(prefix, busy)
        able = [replica for replica in order if busy[replica] <= limit]
        best = max(able, key=lambda replica: lengths[replica])  # of equals, the first in order
        if lengths[best] == 0 or lengths[best] < self.least_share * len(prefix):
            return order
        return [best, *(replica for replica in order if replica != best)]

    def sent(self, prefix: Sequence[bytes], replica: str) -> None:
        """Remember the replica of a request, which computes all of its prompt."""
        for name in prefix:
            self._owners.setdefault(name, {})[replica] = None
            self._owners.move_to_end(name)
        while len(self._owners) > self.most_names:
            self._owners.popitem(last=False)

    def keep_only(self, replicas: Sequence[str]) -> None:
        """Forget the prefixes of all other replicas, which are gone."""
        alive = set(replicas)
        for name in list(self._owners):
            left = {owner: None for owner in self._owners[name] if owner in alive}
            if left:
                self._owners[name] = left
            else:
                del self._owners[name]

    def _lengths(self, prefix: Sequence[bytes], replicas: Mapping[str, int]) -> dict[str, int]:
        """Count the leading names that each replica has."""
        lengths = dict.fromkeys(replicas, 0)
        for number, name in enumerate(prefix):
            owners = self._owners.get(name, {})
            having = [r for r in replicas if r in owners and lengths[r] == number]
            for replica in having:
                lengths[replica] = number + 1
            if not having:
                break
        return lengths


def _two_choices(busy: Mapping[str, int], draw: random.Random) -> list[str]:
    """Return the replicas in random order, but the less busy one of the first two first.

    Near to the best choice, and not the same one for all callers at once.
    """
    order = draw.sample(sorted(busy), len(busy))
    order[:2] = sorted(order[:2], key=lambda replica: busy[replica])
    return order
