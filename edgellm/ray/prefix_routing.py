"""Which replica a request goes to: the one that has computed the beginning of its prompt, unless
that one has much more to do than others. Pure Python.

A prompt is known by the names of its beginnings: each names a piece of it and all before it, as
blocks of the KV cache are named (see `prefix_index.py`). Whoever has the tokens takes those names;
who has but a request, those of `request_prefix.py`.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgellm.errors import OptionError


@dataclass
class PrefixRouting:
    """Who has what, and who has how much to do.

    Attributes:
        most_ahead: requests that a replica may have more than the least busy one, and still be
            given one whose prefix it has.
        least_share: of a prompt that a replica must have computed to be given it for that.
        most_names: that are remembered; those used last stay.
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
        """All replicas, the one that should have a request first, then those that are next if it
        takes none.

        Args:
            prefix: the names of the prompt's beginnings, shortest first.
            busy: the replicas, and how many requests each has.
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
        """Remember where a request went, which computes all of its prompt."""
        for name in prefix:
            self._owners.setdefault(name, {})[replica] = None
            self._owners.move_to_end(name)
        while len(self._owners) > self.most_names:
            self._owners.popitem(last=False)

    def keep_only(self, replicas: Sequence[str]) -> None:
        """Forget what others had: they are gone."""
        alive = set(replicas)
        for name in list(self._owners):
            left = {owner: None for owner in self._owners[name] if owner in alive}
            if left:
                self._owners[name] = left
            else:
                del self._owners[name]

    def _lengths(self, prefix: Sequence[bytes], replicas: Mapping[str, int]) -> dict[str, int]:
        """How many of the names each replica has, from the first on."""
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
    """In any order, but of the first two the less busy one first: near to the best choice, and
    not the same one for all who choose at once."""
    order = draw.sample(sorted(busy), len(busy))
    order[:2] = sorted(order[:2], key=lambda replica: busy[replica])
    return order
