"""Plans in which long prompts go through the layers in groups (layered prefill). Pure Python."""

from __future__ import annotations

import math

from edgellm.engine.plan import Entry, Layers, Planner, RequestT, Share, Underway
from edgellm.engine.policies import StepBudget
from edgellm.engine.step_costs import StepLoad

# Maximum of prompts with parked rows: each holds blocks, and 4 bytes times the rows times the
# model's width, with that of Q, K and V where the next layer has begun.
_MOST_RESTING = 4
# Factor by which a group may exceed what is left of a step: within the error of a prediction.
_SLACK = 1.125
_FULL = StepBudget(0.0, 0, 0)
# Seconds of a step where no time is predicted.
_SHORTEST = 1e-9


class LayerGroups(Planner[RequestT]):
    """Planner whose long prompts go through the layers in groups.

    Up to `resting_rows` rows of a prompt that takes more than two steps go through as many layers
    as the step has time for, and are parked until the next step. Shorter prompts go through all
    layers together with the decodes, a few rows in a step, also when they pass a long one.
    """

    def _serve(self, entry: Entry[RequestT], room: int) -> None:
        underway = entry.request.underway
        long = self._left(entry) > room + room // 8
        if underway is None and long and self._budget.resting_rows and entry.request.may_rest:
            rows = self._rows_of(entry, room)
            if rows > 2 * room and self._resting() < _MOST_RESTING:
                underway = Underway(rows, 0)
        if underway is None:
            self._compute(entry, room)
        elif room > 0:
            self._pass_group(entry, underway, self._seconds_of(entry, room))

    def _resting(self) -> int:
        return sum(request.underway is not None for request in self._snapshot.running)

    def _seconds_of(self, entry: Entry[RequestT], room: int) -> float:
        """Return the seconds that `room` rows add to the step, also where decodes alone fill it."""
        seconds, position = self._costs.seconds, self._computed(entry)
        return seconds(self._load.plus(room, position)) - seconds(self._load)

    def _rows_of(self, entry: Entry[RequestT], room: int) -> int:
        """Return the rows of which whole layers fill a step: fewer in two layers, where 512 would
        pass one and a half. The rest of a prompt is taken whole if one layer of it fits."""
        costs, start, layers = self._costs, self._computed(entry), self._policy.layers
        step, left = max(self._seconds_of(entry, room), _SHORTEST), self._left(entry)
        most, in_each = min(left, self._budget.resting_rows), 1
        if most < left:
            steps = int(costs.seconds(StepLoad().plus(most, start)) / step)
            in_each = math.ceil(layers / min(max(steps, 1), layers))
        seconds, chunk = step * layers / in_each, self._budget.chunk_rows
        rows = costs.rows_within(seconds, start, beside=StepLoad(), limit=most)
        return rows if rows == left else min(max(rows // chunk, 1) * chunk, left)

    def _pass_group(self, entry: Entry[RequestT], underway: Underway, seconds: float) -> None:
        """Give a prompt's rows their next layers; those left are spread evenly over as few steps as
        they take."""
        start, count = self._computed(entry), self._policy.layers
        rows, passed = underway
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
