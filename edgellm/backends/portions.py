"""Portions of spans that are computed together, in a chunk or on the host, and their results."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Span
from edgellm.backends.trace import TaskRecord

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Portion:
    """Rows of some spans that are computed together.

    Attributes:
        size: size of the static chunk; None: the host computes the rows.
        owners: for each part, the number of the span that it belongs to.
        parts: the rows, as one span for each owner.
    """

    size: int | None
    owners: SequenceOf[int]
    parts: SequenceOf[Span]


@dataclass
class Computed:
    """Results computed so far for one span; see `Rows`."""

    hidden: list[Floats] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    tasks: list[TaskRecord] = field(default_factory=list)

    def add(self, place: str, rows: Floats) -> None:
        self.hidden.append(rows)
        self.places[place] = self.places.get(place, 0) + len(rows)

    @property
    def count(self) -> int:
        return sum(map(len, self.hidden))

    def joined(self) -> Floats:
        """Return all rows; host rows are zero-padded to the width of rows kept between layers."""
        width = max(rows.shape[1] for rows in self.hidden)
        padded = [np.pad(rows, ((0, 0), (0, width - rows.shape[1]))) for rows in self.hidden]
        return np.concatenate(padded)


def part_of(span: Span, begin: int, count: int, *, on_host: bool) -> Span:
    """Return `count` rows of a span from row `begin` on; host rows go through all layers."""
    end, group = begin + count, None if on_host else span.group
    if group is not None and group.entering is not None:
        group = replace(group, entering=group.entering[begin:end])
    return Span(span.sequence, span.tokens[begin:end], group=group)
