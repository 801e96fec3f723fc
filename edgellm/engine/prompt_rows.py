"""Policies of scheduling: the prompt rows of a step, and the requests that it admits.

Pure Python; changes nothing but the plan.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple

from edgellm.checks import check_number
from edgellm.engine.plan import Entry, Plan, RequestT, Share, Snapshot
from edgellm.engine.step_costs import StepCosts, StepLoad, nearest_multiple
from edgellm.errors import OptionError
from edgellm.kernels.kv_blocks import BLOCK

# Seconds of a step of a prompt that has the engine for itself, in time targets: a request that
# arrives during the step waits for its end, and is to begin within two.
_LONE_PROMPT = 1.5


class Prompt(NamedTuple):
    """Properties of a prompt that decide its rank.

    Attributes:
        arrival: number of its arrival, smaller is earlier. Answers to one prompt have the same.
        priority: larger is more urgent.
        promised: whether it lost its place for want of blocks, or a place was taken for it.
        left: number of tokens that are not computed, at least 1.
        waited: prompt tokens that the engine computed, for all requests, since it began to wait.
    """

    arrival: int
    priority: int
    promised: bool
    left: int
    waited: int


class StepBudget(NamedTuple):
    """Bounds of one step: `seconds` give way to `min_rows` of prompts, never to `max_rows`.

    Attributes:
        parks: whether rows of a prompt may begin to be parked between layers.
    """

    seconds: float
    min_rows: int
    max_rows: int
    parks: bool = False


NO_BOUNDS = StepBudget(math.inf, 1, sys.maxsize)
# Item of a heap: rank, number of tokens left, entry. No two ranks are the same, as they end with
# the entry's number.
_Ranked = tuple[tuple[float, ...], int, Entry[RequestT]]


class PromptRows(Generic[RequestT]):
    """Rows of prompts in one step, added to the plan of its decodes; requests are admitted on the
    way.

    Args:
        shares: shares of the step so far.
        admits: whether waiting requests may be admitted.

    Attributes:
        plan: the plan so far.
    """

    def __init__(
        self,
        snapshot: Snapshot[RequestT],
        policy: SchedulingPolicy,
        costs: StepCosts,
        *,
        budget: StepBudget = NO_BOUNDS,
        shares: Iterable[Share[RequestT]] = (),
        admits: bool = True,
    ) -> None:
        self.plan = Plan(list(shares), refused=snapshot.refused)
        self._snapshot, self._policy, self._costs = snapshot, policy, costs
        self._budget = budget
        self._places = policy.max_running - len(snapshot.running) if admits else 0
        self._rows = 0
        self._load = StepLoad()
        self._served: set[int] = set()
        self._needed: list[int] | None = None  # blocks of all that run or are admitted
        for share in self.plan.shares:
            self._load = self._load.plus(share.rows, share.start)

    def add(self, prompts: Iterable[Entry[RequestT]], *, most: int = sys.maxsize) -> None:
        """Serve prompts in their order, at most `most` of them, until the step is full."""
        line = in_line(prompts, self._snapshot, self._policy)
        while line and len(self._served) < most:
            _, _, entry = heapq.heappop(line)
            room = self._room(entry.request.computed)
            # a few rows that are left of a step are no beginning for a long prompt
            if room < 1 or (self._rows and room < min(entry.left, self._budget.min_rows // 2)):
                return
            leader = self._computing_prefix_of(entry)
            if leader is not None:
                entry, room = leader, self._room(leader.request.computed)
            if entry.number in self._served:
                continue
            if not self._admit(entry, first=True):
                if self._places < 1:
                    line = [item for item in line if self._runs(item[2])]
                    heapq.heapify(line)
                continue
            if entry.left > room // 2 and self._let_short_ones_ride(line, room, entry.left):
                room = self._room(entry.request.computed)
            self._serve(entry, room)

    def _serve(self, entry: Entry[RequestT], room: int) -> None:
        """Give the first prompt in line `room` rows."""
        self._compute(entry, room)

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
        self.plan.shares.append(Share(entry.request, start, rows, decode=False))
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
            if not self._runs(entry) and (self.plan.refused or self._computing_prefix_of(entry)):
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
        if self._runs(entry):
            return True
        if self._places < 1:
            return False
        if not self._has_blocks(entry.request):
            self.plan.full = True
            if first and self._is_claimed(entry):
                return False
            self._places = 0
            if first:
                self.plan.refused = entry
            return False
        self._places -= 1
        self.plan.admitted[entry.request] = first
        if entry is self.plan.refused:
            self.plan.refused = None
        return True

    def _is_claimed(self, entry: Entry[RequestT]) -> bool:
        """Whether a prompt is first only by what it finds in the cache, so that others may pass it.

        It needs room for all of its tokens all the same. Once it has waited for as many rows, it is
        first by its waiting.
        """
        waited = self._snapshot.clock - entry.clock
        return entry.findable > 0 and waited < len(entry.request.tokens)

    def _has_blocks(self, request: RequestT) -> bool:
        """Whether all requests find room at the same time; a lone one may take that of others."""
        others = [*self._snapshot.running, *self.plan.admitted]
        if not others:
            return True
        if self._needed is None:
            self._needed = [sum(each) for each in zip(*(r.needed for r in others), strict=True)]
        needed = [a + b for a, b in zip(self._needed, request.needed, strict=True)]
        if any(a > b for a, b in zip(needed, self._snapshot.free, strict=True)):
            return False
        self._needed = needed
        return True

    def _computing_prefix_of(self, entry: Entry[RequestT]) -> Entry[RequestT] | None:
        """Return the running prompt that computes blocks which a waiting one shares and waits for.

        It is given rows in the place of the waiting one, and by that gets its rank.
        """
        if self._runs(entry):
            return None
        snapshot = self._snapshot
        admitted = (snapshot.waiting[request] for request in self.plan.admitted)
        for other in (*snapshot.running.values(), *admitted):
            if other.request.decoding or other.request.salt != entry.request.salt:
                continue
            common = entry.common_with(other)
            if other.request.computed < common and common - entry.request.computed >= BLOCK:
                self.plan.delayed.append(entry)
                return other
        return None

    def _runs(self, entry: Entry[RequestT]) -> bool:
        return entry.request in self._snapshot.running or entry.request in self.plan.admitted


def in_line(
    entries: Iterable[Entry[RequestT]], snapshot: Snapshot[RequestT], policy: SchedulingPolicy
) -> list[_Ranked[RequestT]]:
    """Return a heap of the entries with tokens left: owners in turns, each one's by rank."""
    ranked = []
    for entry in entries:
        left = entry.left
        if left > 0 and entry.request in snapshot.waiting:
            left = max(1, min(left, len(entry.request.tokens) - entry.findable))
            if entry.asked.begun:  # another answer to a prompt ranks as the prompt did
                left = max(left, entry.asked.rows)
        if left > 0:
            waited = snapshot.clock - entry.clock
            prompt = Prompt(entry.asked.number, entry.priority, entry.promised, left, waited)
            ranked.append(((*policy.rank(prompt), entry.number), left, entry))
    return _in_turns(sorted(ranked), snapshot.served)


def _in_turns(
    ranked: list[_Ranked[RequestT]], served_to: Callable[[str], float]
) -> list[_Ranked[RequestT]]:
    """Return a heap of entries by the tokens served to their owner before them (start-time fair
    queueing, Goyal et al. 1996); entries of a single owner keep their order."""
    served: dict[str, float] = {}
    line = []
    for rank, left, entry in ranked:
        before = served.get(entry.owner, served_to(entry.owner))
        line.append(((before, *rank), left, entry))
        served[entry.owner] = before + left
    heapq.heapify(line)
    return line


@dataclass(frozen=True, kw_only=True)
class Serial:
    """Requests one after another, each to its end, first come, first served.

    Attributes:
        max_running: maximum of requests that are admitted at once.
        max_decodes: maximum of requests that decode in one step; with more, they take turns.
        prompt_rows: class that plans the rows of prompts.
        quantum: rows computed, for all requests, while a prompt waits and another request runs,
            before the one may have the place of the other.
    """

    max_rows: int = 512
    max_running = max_decodes = 1
    prompt_rows = PromptRows
    quantum = math.inf

    def __post_init__(self) -> None:
        check_number("max_rows", self.max_rows, 1, whole=True)

    def rank(self, prompt: Prompt) -> tuple[float, ...]:
        """Return the sort key of a prompt; the smallest goes first."""
        return (prompt.arrival,)

    def budget(self, *, decodes: int, requests: int) -> StepBudget:
        """Return the bounds of a step; `decodes` of all `requests` (running or waiting) decode."""
        return StepBudget(math.inf, 1, self.max_rows)


@dataclass(frozen=True, kw_only=True)
class StallFree:
    """Decodes in each step, and as much of prompts as the time target leaves (Sarathi-Serve).

    Prompts go in the order of the highest response ratio in tokens (HRRN): short ones go first, and
    waiting ones grow more urgent, without a clock. Ageing stays within a priority. See
    arXiv:2403.02310.

    Attributes:
        time_target: seconds of a step that others wait for: the gap in a stream, and half of the
            time to first token of a short prompt behind long ones.
        min_rows: minimum of prompt rows in a step, even where decodes alone take as long: prompts
            always progress.
        max_rows: maximum of rows in a step.
        lone_rows: minimum of rows of a prompt without other requests, even where they take longer.
            512 rows in native steps of 128 take 0.93 to 1.1 times as long as in one (SmolLM2-135M
            at 0 and 3,500 tokens, Qwen2.5-0.5B at 0 and 2,000; two cores), in steps of 64 up to 1.3
            times.
        row_multiple: rows that steps are padded to a multiple of; `min_rows` is rounded to fit.
        quantum: rows after which a place may be taken. With 64 answers it is 16 tokens of each.
    """

    time_target: float = 0.100
    min_rows: int = 32
    max_rows: int = 512
    lone_rows: int = 128
    max_running: int = 64
    max_decodes: int = 64
    row_multiple: int = 1
    quantum: int = 1024
    prompt_rows = PromptRows

    def __post_init__(self) -> None:
        check_number("time_target", self.time_target, 0.001)
        for name in (
            "min_rows",
            "max_rows",
            "lone_rows",
            "max_running",
            "max_decodes",
            "row_multiple",
            "quantum",
        ):
            check_number(name, getattr(self, name), 1, whole=True)
        if self.min_rows + self.max_decodes > self.max_rows:
            raise OptionError(
                f"`max_rows` is {self.max_rows}, but `max_decodes` ({self.max_decodes}) and "
                f"`min_rows` ({self.min_rows}) together are more; raise it or lower one of them"
            )

    def rank(self, prompt: Prompt) -> tuple[float, ...]:
        ratio = (prompt.waited + prompt.left) / prompt.left
        return (-prompt.priority, not prompt.promised, -ratio, prompt.left, prompt.arrival)

    def budget(self, *, decodes: int, requests: int) -> StepBudget:
        seconds, rows = self.time_target, self.min_rows
        if not decodes and requests == 1:
            seconds, rows = _LONE_PROMPT * seconds, self.lone_rows
        rows = nearest_multiple(decodes + rows, self.row_multiple) - decodes
        if rows < 1:
            rows += self.row_multiple
        return StepBudget(seconds, min(rows, self.max_rows), self.max_rows)


SchedulingPolicy = Serial | StallFree
