"""Rows of a prompt on their way: through the layers in several steps, or on another device."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Span
from edgellm.cache.growth import Growth
from edgellm.cache.sequence import Sequence
from edgellm.checks import check_number
from edgellm.engine.plan import Entry, Layers, RequestT, Share, Underway
from edgellm.engine.prompt_rows import PromptRows, StallFree, StepBudget
from edgellm.engine.step_costs import StepLoad
from edgellm.kernels.lora import AdapterWeights
from edgellm.kernels.sealed_blocks import Shortlists
from edgellm.kernels.step import LayerGroup

Floats = NDArray[np.float32]


class PrefillJob:
    """Rows of a prompt whose K and V are in blocks of their own until all layers are computed.

    The sequence that they come next in does not know of them: dropping them leaves it as it was.

    Attributes:
        growth: the sequence with the rows behind it.
        away: whether a thread beside the engine's computes the rows, and writes to the blocks.
        dropped: whether the rows are not wanted.
    """

    def __init__(
        self,
        base: Sequence,
        tokens: SequenceOf[int],
        *,
        adapter: AdapterWeights | None = None,
        adapter_start: int = 0,
        shortlists: Shortlists = (),
    ) -> None:
        """Reserve room for `tokens` behind a sequence.

        Args:
            adapter, adapter_start, shortlists: see `Span`.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
        """
        self.growth = Growth(base, len(tokens))
        self.away = self.dropped = False
        self._base = base
        self._tokens = tokens
        self._adapter, self._adapter_start, self._shortlists = adapter, adapter_start, shortlists
        self._hidden: Floats | None = None  # states that enter the next layer
        self._passed = 0
        self._layers: Layers | None = None  # layers of the last span; None: all

    @property
    def underway(self) -> Underway:
        """Number of rows, and of the layers that they have passed."""
        count = 0 if self._layers is None else self._layers.all
        return Underway(len(self._tokens), self._passed, count)

    def continues(self, sequence: Sequence) -> bool:
        """Whether the rows still come next in `sequence`."""
        return sequence is self._base and len(sequence) == self.growth.start

    def span(
        self, layers: Layers | None, *, logit_rows: int, candidates: int, answers: bool
    ) -> Span:
        """Return the rows as a span in their next layers; logits come after the last layer.

        Args:
            layers: the layers; None: all.
        """
        self._layers, group = layers, None
        if layers is not None:
            group = LayerGroup(layers=range(layers.first, layers.end), entering=self._hidden)
            logit_rows = logit_rows if layers.end == layers.all else 0
        return Span(
            self.growth,
            self._tokens,
            logit_rows,
            candidates,
            group,
            self._adapter,
            self._adapter_start,
            answers=answers,
            shortlists=self._shortlists,
        )

    def take(self, hidden: Floats) -> bool:
        """Park the rows after the layers of the last span; returns whether no layers are left."""
        layers = self._layers
        if layers is None or layers.end == layers.all:
            return True
        self._hidden, self._passed = hidden, layers.end
        return False

    def drop(self) -> None:
        """Give the blocks back, at the latest with `returned`; what is computed can be found."""
        self.dropped = True
        if not self.away:
            self.growth.land().close()

    def returned(self) -> None:
        """Note that the thread beside the engine's has ended."""
        self.away = False
        if self.dropped:
            self.drop()


# Layered prefill: steps in which a long prompt goes through some of the layers.

# Maximum of prompts with parked rows: each holds blocks, and 4 bytes times the rows times the
# model's width, with that of Q, K and V where the next layer has begun.
_MOST_RESTING = 4
# Factor by which a group may exceed what is left of a step: within the error of a prediction.
_SLACK = 1.125
_FULL = StepBudget(0.0, 0, 0)
# Seconds of a step where no time is predicted.
_SHORTEST = 1e-9


class LayerGroups(PromptRows[RequestT]):
    """Rows of prompts in one step, where long prompts go through the layers in groups.

    Up to `resting_rows` rows of a prompt that takes more than two steps go through as many layers
    as the step has time for, and are parked until the next step. Shorter prompts go through all
    layers together with the decodes, a few rows in a step, also when they pass a long one.
    """

    def _serve(self, entry: Entry[RequestT], room: int) -> None:
        underway, policy = entry.request.underway, self._policy
        assert isinstance(policy, Layered)
        long = entry.left > room + room // 8
        if underway is None and long and self._budget.parks and entry.request.may_rest:
            rows = self._rows_of(entry, room, policy)
            if rows > 2 * room and self._resting() < _MOST_RESTING:
                underway = Underway(rows, 0, policy.layers)
        if underway is None:
            self._compute(entry, room)
        elif room > 0:
            self._pass_group(entry, underway, self._seconds_of(entry, room))

    def _resting(self) -> int:
        return sum(request.underway is not None for request in self._snapshot.running)

    def _seconds_of(self, entry: Entry[RequestT], room: int) -> float:
        """Return the seconds that `room` rows add to the step, also where decodes alone fill it."""
        seconds, position = self._costs.seconds, entry.request.computed
        return seconds(self._load.plus(room, position)) - seconds(self._load)

    def _rows_of(self, entry: Entry[RequestT], room: int, policy: Layered) -> int:
        """Return the rows of which whole layers fill a step: fewer in two layers, where 512 would
        pass one and a half. The rest of a prompt is taken whole if one layer of it fits."""
        costs, start, layers = self._costs, entry.request.computed, policy.layers
        step, left = max(self._seconds_of(entry, room), _SHORTEST), entry.left
        most, in_each = min(left, policy.resting_rows), 1
        if most < left:
            steps = int(costs.seconds(StepLoad().plus(most, start)) / step)
            in_each = math.ceil(layers / min(max(steps, 1), layers))
        seconds, chunk = step * layers / in_each, policy.chunk_rows
        rows = costs.rows_within(seconds, start, beside=StepLoad(), limit=most)
        return rows if rows == left else min(max(rows // chunk, 1) * chunk, left)

    def _pass_group(self, entry: Entry[RequestT], underway: Underway, seconds: float) -> None:
        """Give a prompt's rows their next layers; those left are spread evenly over as few steps as
        they take."""
        start, (rows, passed, count) = entry.request.computed, underway
        whole = self._costs.seconds(StepLoad().plus(rows, start))
        left = count - passed
        fitting = left if whole <= seconds else max(1, int(_SLACK * seconds / whole * count))
        layers = Layers(passed, passed + math.ceil(left / math.ceil(left / fitting)), count)
        self.plan.shares.append(Share(entry.request, start, rows, decode=False, layers=layers))
        self._served.add(entry.number)
        if layers.end < count:
            # the little time left is not for another prompt, so that this one goes on sooner
            self._budget = _FULL
            return
        spent = whole * (layers.end - layers.first) / count
        self._budget = self._budget._replace(seconds=self._budget.seconds - spent)
        self._rows += layers.part(rows)


@dataclass(frozen=True, kw_only=True)
class Layered(StallFree):
    """`StallFree` where a long prompt yields to others between layers (arXiv:2510.08055).

    In a step in which others decode or wait, up to `resting_rows` of its rows go through as many
    layers as the time target leaves. So a weight is read once for all these rows, or for each chunk
    of them, and not once for the few that go through all layers in the same time.

    Attributes:
        layers: number of layers of the model.
        resting_rows: maximum of parked rows of a prompt.
        chunk_rows: rows of a chunk. Parked rows are a multiple of it, or the end of a prompt: they
            are in the same chunks whatever the load.
    """

    layers: int
    resting_rows: int = 512
    chunk_rows: int = 1
    prompt_rows = LayerGroups

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "resting_rows", "chunk_rows"):
            check_number(name, getattr(self, name), 1, whole=True)

    def budget(self, *, decodes: int, requests: int) -> StepBudget:
        budget = super().budget(decodes=decodes, requests=requests)
        return budget._replace(parks=requests > 1)
