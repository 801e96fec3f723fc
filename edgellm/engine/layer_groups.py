"""Rows of prompts that go through the layers in groups, one group in each step. Pure Python."""

from __future__ import annotations

import math

from edgellm.engine.admission import Entry, RequestT, Underway
from edgellm.engine.policies import StepBudget
from edgellm.engine.prompt_rows import Layers, PromptRows, Share
from edgellm.engine.step_costs import StepLoad

# Prompts with rows that rest between two layers: each holds blocks, and 4 bytes times the rows
# times the model's width.
_MOST_UNDERWAY = 4
# A group may take so much longer than what is left of a step: within what a prediction is wrong by.
_SLACK = 1.125
_FULL = StepBudget(0.0, 0, 0)


class LayerGroups(PromptRows[RequestT]):
    """As `PromptRows`; of a prompt that takes more than a step, up to `max_rows` rows go through as
    many layers as the step has time for, and through the next ones with the next steps.

    What fits into the step goes through all layers together with the decodes, and so do short
    prompts that pass a long one.
    """

    def _serve(self, entry: Entry[RequestT], room: int) -> None:
        underway = entry.request.underway
        if underway is None:
            rests = self._budget.may_rest and self._underway() < _MOST_UNDERWAY
            if not rests or entry.left <= room + room // 8:
                return self._compute(entry, room)
        if room > 0:
            self._pass_group(entry, underway, self._seconds_of(entry, room))

    def _underway(self) -> int:
        running = self._admission.running
        return sum(request.underway is not None for request in running)

    def _seconds_of(self, entry: Entry[RequestT], room: int) -> float:
        """What the step has for a prompt: also where decodes alone take as long as it may."""
        seconds, position = self._costs.seconds, entry.request.computed
        return seconds(self._load.plus(room, position)) - seconds(self._load)

    def _pass_group(
        self, entry: Entry[RequestT], underway: Underway | None, seconds: float
    ) -> None:
        """Give a prompt its next layers, or the first ones, where those that are left are shared
        among as few steps as it takes."""
        start, count = entry.request.computed, self._policy.layers
        rows, passed = underway or (self._most_rows(entry, seconds * count), 0)
        whole = self._costs.seconds(StepLoad().plus(rows, start))
        left = count - passed
        fitting = left if whole <= seconds else max(1, int(_SLACK * seconds / whole * count))
        layers = Layers(passed, passed + math.ceil(left / math.ceil(left / fitting)), count)
        self._shares.append(Share(entry.request, start, rows, decode=False, layers=layers))
        self._served.add(entry.arrival)
        if layers.end < count:
            # what little time is left is not for another prompt: this one goes on all the sooner
            self._budget = _FULL
            return
        spent = whole * (layers.end - layers.first) / count
        self._budget = self._budget._replace(seconds=self._budget.seconds - spent)
        self._rows += layers.part(rows)

    def _most_rows(self, entry: Entry[RequestT], seconds: float) -> int:
        """As many as go through all layers in so long, so that a layer fits into a step."""
        fitting = self._costs.rows_within(
            seconds,
            entry.request.computed,
            beside=StepLoad(),
            limit=min(entry.left, self._budget.max_rows),
        )
        return max(1, fitting)
