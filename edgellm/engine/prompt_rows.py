"""Rows of prompts in one step, and admission of their requests. Pure Python."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from edgellm.engine.admission import Admission, Entry, RequestT, Underway
from edgellm.engine.policies import Prompt, SchedulingPolicy, StepBudget
from edgellm.engine.step_costs import StepCosts, StepLoad


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of a model from `first` to before `end`, of `all` layers."""

    first: int
    end: int
    all: int

    def part(self, amount: int) -> int:
        """Return these layers' part of an amount; the parts of all groups add up to it."""
        return amount * self.end // self.all - amount * self.first // self.all


@dataclass(frozen=True, slots=True)
class Share(Generic[RequestT]):
    """Rows of a request in the next step: `tokens[start : start + rows]`, decoded or prefilled.

    Attributes:
        layers: layers they go through; None: all. They count as computed behind the last one.
    """

    request: RequestT
    start: int
    rows: int
    decode: bool
    layers: Layers | None = None

    @property
    def load(self) -> StepLoad:
        """Load of the rows by themselves, in all layers."""
        return StepLoad().plus(self.rows, self.start)


# Item of a heap: rank, number of tokens left, entry. No two ranks are the same, as they end with
# the entry's number.
_Ranked = tuple[tuple[float, ...], int, Entry[RequestT]]


class PromptRows(Generic[RequestT]):
    """Rows of prompts that are added to one step; requests are admitted on the way.

    Args:
        shares: shares of the step so far, to which those of prompts are added.
        reserve: see `admit` of `Scheduler.next`.
    """

    def __init__(
        self,
        admission: Admission[RequestT],
        policy: SchedulingPolicy,
        costs: StepCosts,
        budget: StepBudget,
        shares: list[Share[RequestT]],
        *,
        reserve: Callable[[RequestT], bool],
        block_size: int,
    ) -> None:
        self._admission, self._policy, self._costs = admission, policy, costs
        self._budget, self._shares = budget, shares
        self._reserve, self._block_size = reserve, block_size
        self._rows = 0
        self._load = StepLoad()
        self._served: set[int] = set()
        self._open = True  # until a request finds no room
        for share in shares:
            self._load = self._load.plus(share.rows, share.start)

    def add(self, prompts: list[Entry[RequestT]], *, most: int = sys.maxsize) -> None:
        """Serve prompts in their order, at most `most` of them, until the step is full."""
        line = self._line(prompts)
        while line and len(self._served) < most:
            _, _, entry = heapq.heappop(line)
            position = entry.request.computed
            room = self._room(position)
            # a few rows that are left of a step are no beginning for a long prompt
            if room < 1 or (self._rows and room < min(entry.left, self._budget.min_rows // 2)):
                return
            entry = self._computing_prefix_of(entry) or entry
            if entry.number in self._served:
                continue
            if not self._admit(entry, first=True):
                line = [item for item in line if item[2].request in self._admission.running]
                heapq.heapify(line)
                continue
            if entry.request.computed != position:
                room = self._room(entry.request.computed)
            if entry.left > room // 2 and self._let_short_ones_ride(line, room, entry.left):
                room = self._room(entry.request.computed)
            self._serve(entry, room)

    def in_line(self, entries: list[Entry[RequestT]]) -> list[Entry[RequestT]]:
        """Return entries in the order in which they are served."""
        return [entry for _, _, entry in sorted(self._line(entries))]

    def _serve(self, entry: Entry[RequestT], room: int) -> None:
        """Give the first prompt in line `room` rows."""
        self._compute(entry, room)

    def _line(self, entries: list[Entry[RequestT]]) -> list[_Ranked[RequestT]]:
        """Return a heap of entries with tokens left: owners in turns, each one's by rank."""
        rank, clock = self._policy.rank, self._admission.counts.prefill_rows
        line = []
        for entry in entries:
            left = entry.left
            if left > 0 and entry.request in self._admission.waiting:
                # another answer to a prompt that was computed ranks as the prompt did
                left = max(left, entry.asked.rows)
            if left > 0:
                prompt = Prompt(
                    entry.asked.number, entry.priority, entry.promised, left, clock - entry.clock
                )
                line.append(((*rank(prompt), entry.number), left, entry))
        return self._in_turns(sorted(line))

    def _in_turns(self, ranked: list[_Ranked[RequestT]]) -> list[_Ranked[RequestT]]:
        """Return a heap of entries by the tokens served to their owner before them (start-time fair
        queueing, Goyal et al. 1996); entries of a single owner keep their order."""
        served: dict[str, float] = {}
        line = []
        for rank, left, entry in ranked:
            before = served.get(entry.owner, self._admission.owners.of(entry.owner))
            line.append(((before, *rank), left, entry))
            served[entry.owner] = before + left
        heapq.heapify(line)
        return line

    def _room(self, position: int) -> int:
        """Return the number of rows from `position` on that the step still has room for."""
        limit = self._budget.max_rows - self._load.rows
        rows = self._costs.rows_within(
            self._budget.seconds, position, beside=self._load, limit=limit
        )
        return max(rows, min(self._budget.min_rows - self._rows, limit))

    def _compute(self, entry: Entry[RequestT], room: int) -> None:
        """Give a prompt the room in all layers, or its rest if that is at most an eighth more.

        An extra step for a few rows would cost a call, and the prompt's first token would wait for
        it. An eighth is within the error of a prediction.
        """
        limit = self._budget.max_rows - self._load.rows
        start, left = entry.request.computed, entry.left
        rows = left if left <= min(room + room // 8, limit) else min(left, room)
        if rows < 1:
            return
        self._shares.append(Share(entry.request, start, rows, decode=False))
        self._load = self._load.plus(rows, start)
        self._rows += rows
        self._served.add(entry.number)

    def _let_short_ones_ride(
        self, line: list[_Ranked[RequestT]], room: int, first_left: int
    ) -> bool:
        """Give half of the room to prompts much shorter than the first; False if there are none.

        By rank alone they would wait some steps, while the rest of a long prompt that has waited
        long is computed. So they begin with the next step, and the long one keeps going. A prompt
        that needs only half as much again is finished.
        """
        short = min(room, first_left * 2 // 3)
        half, rows_before = room // 2, self._rows
        for _, _, entry in sorted(item for item in line if item[1] <= short):
            if half < 1:
                break
            is_waiting = entry.request in self._admission.waiting
            if is_waiting and (self._admission.refused or self._computing_prefix_of(entry)):
                continue
            if entry.number in self._served or entry.request.underway is not None:
                continue
            if not self._admit(entry, first=False):
                continue
            rows = entry.left if entry.left <= half + half // 2 else half
            # the rest of a long prompt takes longer for as many rows
            rows = min(rows, self._room(entry.request.computed) * 3 // 4)
            self._compute(entry, rows)
            half -= rows
        return self._rows > rows_before

    def _admit(self, entry: Entry[RequestT], *, first: bool) -> bool:
        """Admit a request; False if it has to wait. The first without room ends the admission.

        Until the first in line finds room, no other request is admitted before it in later steps.
        """
        admission = self._admission
        if entry.request in admission.running:
            return True
        if not self._open or admission.full:
            return False
        self._open = admission.admit(entry, self._reserve, first=first)
        return self._open

    def _computing_prefix_of(self, entry: Entry[RequestT]) -> Entry[RequestT] | None:
        """Return the running prompt that computes blocks which a waiting one shares and waits for.

        It is given rows in the place of the waiting one, and by that gets its rank.
        """
        admission = self._admission
        if entry.request in admission.running:
            return None
        for other in admission.running.values():
            if other.request.decoding or other.request.salt != entry.request.salt:
                continue
            common = self._common(entry, other)
            gain = common - entry.request.computed
            if other.request.computed < common and gain >= self._block_size:
                admission.counts.waited_for_prefix += not entry.waited_for_prefix
                entry.waited_for_prefix = True
                return other
        return None

    def _common(self, entry: Entry[RequestT], other: Entry[RequestT]) -> int:
        """Count the tokens of the full blocks that both begin with, once for each pair."""
        if other.number not in entry.common:
            size, a, b = self._block_size, entry.request.tokens, other.request.tokens
            end = 0
            while end + size <= min(len(a), len(b)) and a[end : end + size] == b[end : end + size]:
                end += size
            entry.common[other.number] = end
        return entry.common[other.number]


# Maximum of prompts with parked rows: each holds blocks, and 4 bytes times the rows times the
# model's width, with that of Q, K and V where the next layer has begun.
_MOST_RESTING = 4
# Factor by which a group may exceed what is left of a step: within the error of a prediction.
_SLACK = 1.125
_FULL = StepBudget(0.0, 0, 0)
# Seconds of a step where no time is predicted.
_SHORTEST = 1e-9


class LayerGroups(PromptRows[RequestT]):
    """Prompt rows of one step, where long prompts go through the layers in groups.

    Up to `resting_rows` rows of a prompt that takes more than two steps go through as many layers
    as the step has time for, and are parked until the next step. Shorter prompts go through all
    layers together with the decodes, a few rows in a step, also when they pass a long one.
    """

    def _serve(self, entry: Entry[RequestT], room: int) -> None:
        underway = entry.request.underway
        long = entry.left > room + room // 8
        if underway is None and long and self._budget.resting_rows and entry.request.may_rest:
            rows = self._rows_of(entry, room)
            if rows > 2 * room and self._resting() < _MOST_RESTING:
                underway = Underway(rows, 0)
        if underway is None:
            self._compute(entry, room)
        elif room > 0:
            self._pass_group(entry, underway, self._seconds_of(entry, room))

    def _resting(self) -> int:
        running = self._admission.running
        return sum(request.underway is not None for request in running)

    def _seconds_of(self, entry: Entry[RequestT], room: int) -> float:
        """Return the seconds that `room` rows add to the step, also where decodes alone fill it."""
        seconds, position = self._costs.seconds, entry.request.computed
        return seconds(self._load.plus(room, position)) - seconds(self._load)

    def _rows_of(self, entry: Entry[RequestT], room: int) -> int:
        """Return the rows of which whole layers fill a step: fewer in two layers, where 512 would
        pass one and a half. The rest of a prompt is taken whole if one layer of it fits."""
        costs, start, layers = self._costs, entry.request.computed, self._policy.layers
        step = max(self._seconds_of(entry, room), _SHORTEST)
        most, in_each = min(entry.left, self._budget.resting_rows), 1
        if most < entry.left:
            steps = int(costs.seconds(StepLoad().plus(most, start)) / step)
            in_each = math.ceil(layers / min(max(steps, 1), layers))
        seconds, chunk = step * layers / in_each, self._budget.chunk_rows
        rows = costs.rows_within(seconds, start, beside=StepLoad(), limit=most)
        return rows if rows == entry.left else min(max(rows // chunk, 1) * chunk, entry.left)

    def _pass_group(self, entry: Entry[RequestT], underway: Underway, seconds: float) -> None:
        """Give a prompt's rows their next layers; those left are spread evenly over as few steps as
        they take."""
        start, count = entry.request.computed, self._policy.layers
        rows, passed = underway
        whole = self._costs.seconds(StepLoad().plus(rows, start))
        left = count - passed
        fitting = left if whole <= seconds else max(1, int(_SLACK * seconds / whole * count))
        layers = Layers(passed, passed + math.ceil(left / math.ceil(left / fitting)), count)
        self._shares.append(Share(entry.request, start, rows, decode=False, layers=layers))
        self._served.add(entry.number)
        if layers.end < count:
            # the little time left is not for another prompt, so that this one goes on sooner
            self._budget = _FULL
            return
        spent = whole * (layers.end - layers.first) / count
        self._budget = self._budget._replace(seconds=self._budget.seconds - spent)
        self._rows += layers.part(rows)
