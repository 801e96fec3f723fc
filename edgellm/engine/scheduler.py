"""Which rows of which requests the next step computes. Pure Python; knows no model and no cache."""

from __future__ import annotations

import heapq
from collections.abc import Callable, KeysView, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from edgellm.engine.policies import Prompt, SchedulingPolicy, StepBudget
from edgellm.engine.step_costs import StepCosts, StepLoad


class Schedulable(Protocol):
    """What the scheduler knows of a request, which is hashed by identity.

    Attributes:
        tokens: the prompt, and what was sampled.
        computed: how many of them are in the KV cache.
        decoding: its prompt has been computed; all that is left goes into the next step, which is
            the token sampled last, and a draft behind it. Not so after a preemption, until all
            that it had is computed again.
        priority: larger is more urgent; it does not change.
    """

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def computed(self) -> int: ...

    @property
    def decoding(self) -> bool: ...

    @property
    def priority(self) -> int: ...


RequestT = TypeVar("RequestT", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class Share(Generic[RequestT]):
    """Rows of a request in the next step: `tokens[start : start + rows]`, decoded or prefilled."""

    request: RequestT
    start: int
    rows: int
    decode: bool


@dataclass
class SchedulerCounts:
    """What has happened so far; `waited_for_prefix`: requests whose prefix another computed."""

    steps: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    admitted: int = 0
    preempted: int = 0
    waited_for_prefix: int = 0


@dataclass(slots=True, eq=False)
class _Entry(Generic[RequestT]):
    """A request in the scheduler; `common` has full blocks shared with others, by their arrival."""

    request: RequestT
    arrival: int
    clock: int
    priority: int
    preempted: bool = False
    waited_for_prefix: bool = False
    last_decode: int = 0
    common: dict[int, int] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return len(self.request.tokens) - self.request.computed


# In the order of a heap: rank, what is left, and whose it is. No two ranks are the same.
_Ranked = tuple[tuple[float, ...], int, _Entry[RequestT]]


class Scheduler(Generic[RequestT]):
    """Chooses each step's rows: decodes first, then prompts in the order of the policy.

    A request waits until there is room for its whole prompt, is then running, and leaves when it
    is removed, or goes back to waiting when it is preempted. No choice changes an answer.

    Args:
        policy: order and bounds.
        costs: predicts what a step takes.
        block_size: tokens of a KV block; prefixes are shared in whole ones.
    """

    def __init__(
        self, *, policy: SchedulingPolicy, costs: StepCosts, block_size: int = 128
    ) -> None:
        self.policy, self.costs = policy, costs
        self.counts = SchedulerCounts()
        self._block_size = block_size
        self._arrivals = 0
        self._running: dict[RequestT, _Entry[RequestT]] = {}
        self._waiting: dict[RequestT, _Entry[RequestT]] = {}
        self._refused: _Entry[RequestT] | None = None  # first in line, and there was no room

    @property
    def running(self) -> KeysView[RequestT]:
        """Admitted requests, the last one admitted last."""
        return self._running.keys()

    @property
    def waiting(self) -> KeysView[RequestT]:
        """Those that are not; who goes first is the policy's choice."""
        return self._waiting.keys()

    def add(self, request: RequestT) -> None:
        """Let a request wait for its admission."""
        assert request not in self._running, "added twice"
        assert request not in self._waiting, "added twice"
        self._arrivals += 1
        clock = self.counts.prefill_rows
        self._waiting[request] = _Entry(request, self._arrivals, clock, request.priority)

    def remove(self, request: RequestT) -> None:
        """Forget a request that is finished or cancelled; one that has gone already is no error."""
        entry = self._running.pop(request, None) or self._waiting.pop(request, None)
        if entry is self._refused:
            self._refused = None

    def next(self, admit: Callable[[RequestT], bool]) -> list[Share[RequestT]]:
        """What to compute now; empty if there is nothing, or no room for who is first in line.

        Args:
            admit: reserves blocks for all tokens of a request, after a match of its prefix, which
                may move `computed`; returns False, and leaves all as it was, if there are too few.
        """
        self.counts.steps += 1
        shares = self._decodes()
        prompts = [entry for entry in self._running.values() if not entry.request.decoding]
        if len(self._running) < self.policy.max_running:
            prompts.extend(self._waiting.values())
        if prompts:
            requests = len(self._running) + len(self._waiting)
            budget = self.policy.budget(decodes=len(shares), requests=requests)
            _Prefill(self, budget, shares, admit).run(prompts)
        return shares

    def preempt(self) -> RequestT | None:
        """The newest running request of the lowest priority goes back to the front of the line.

        The caller frees its blocks. None if it is the only one left.
        """
        if len(self._running) < 2:
            return None
        victim = min(self._running.values(), key=lambda entry: (entry.priority, -entry.arrival))
        self._waiting[victim.request] = self._running.pop(victim.request)
        victim.preempted = True
        self.counts.preempted += 1
        return victim.request

    def done(self, shares: Sequence[Share[RequestT]], seconds: float) -> None:
        """Learn from a step that has run; shares that were dropped before it are left out."""
        load = StepLoad()
        for share in shares:
            load = load.plus(share.rows, share.start)
            if share.decode:
                self.counts.decode_rows += share.rows
            else:
                self.counts.prefill_rows += share.rows
        self.costs.learn(load, seconds)

    def _decodes(self) -> list[Share[RequestT]]:
        """One share for each request that decodes; if too many do, for those that waited longest.

        A request without a token to compute (its reader is slow) is left out.
        """
        ready = [e for e in self._running.values() if e.request.decoding and e.left > 0]
        if len(ready) > self.policy.max_decodes:
            ready = sorted(ready, key=lambda e: e.last_decode)[: self.policy.max_decodes]
        for entry in ready:
            entry.last_decode = self.counts.steps
        return [Share(e.request, e.request.computed, e.left, decode=True) for e in ready]


class _Prefill(Generic[RequestT]):
    """Adds shares of prompts to those of one step, and admits requests on the way."""

    def __init__(
        self,
        scheduler: Scheduler[RequestT],
        budget: StepBudget,
        shares: list[Share[RequestT]],
        admit: Callable[[RequestT], bool],
    ) -> None:
        self._scheduler, self._budget, self._shares = scheduler, budget, shares
        self._admit_request = admit
        self._rows = 0
        self._load = StepLoad()
        self._served: set[int] = set()
        self._open = True  # until somebody finds no room
        for share in shares:
            self._load = self._load.plus(share.rows, share.start)

    def run(self, prompts: list[_Entry[RequestT]]) -> None:
        """Serve the first in line until the step is full."""
        line = self._line(prompts)
        while line:
            _, left, entry = heapq.heappop(line)
            position = entry.request.computed
            room = self._room(position)
            # a few rows that are left of a step are no beginning for a long prompt
            if room < 1 or (self._rows and room < min(left, self._budget.min_rows // 2)):
                return
            entry = self._computing_prefix_of(entry) or entry
            if entry.arrival in self._served:
                continue
            if not self._admit(entry, first=True):
                line = [item for item in line if item[2].request in self._scheduler._running]
                heapq.heapify(line)
                continue
            if entry.request.computed != position:
                room = self._room(entry.request.computed)
            if entry.left > room // 2 and self._let_short_ones_ride(line, room, entry.left):
                room = self._room(entry.request.computed)
            self._serve(entry, room)

    def _line(self, entries: list[_Entry[RequestT]]) -> list[_Ranked[RequestT]]:
        """A heap by rank of those that have something left to compute."""
        rank, clock = self._scheduler.policy.rank, self._scheduler.counts.prefill_rows
        line = []
        for entry in entries:
            left = entry.left
            if left > 0:
                prompt = Prompt(
                    entry.arrival, entry.priority, entry.preempted, left, clock - entry.clock
                )
                line.append((rank(prompt), left, entry))
        heapq.heapify(line)
        return line

    def _room(self, position: int) -> int:
        """Rows from `position` on that the step still has."""
        limit = self._budget.max_rows - self._load.rows
        rows = self._scheduler.costs.rows_within(
            self._budget.seconds, position, beside=self._load, limit=limit
        )
        return max(rows, min(self._budget.min_rows - self._rows, limit))

    def _serve(self, entry: _Entry[RequestT], room: int) -> None:
        """Give a prompt the room, or its rest if that is at most an eighth more.

        An extra step for a few rows would cost a call, and the prompt's first token would wait
        for it. An eighth is within what a prediction is wrong by.
        """
        limit = self._budget.max_rows - self._load.rows
        start, left = entry.request.computed, entry.left
        rows = left if left <= min(room + room // 8, limit) else min(left, room)
        if rows < 1:
            return
        self._shares.append(Share(entry.request, start, rows, decode=False))
        self._load = self._load.plus(rows, start)
        self._rows += rows
        self._served.add(entry.arrival)

    def _let_short_ones_ride(
        self, line: list[_Ranked[RequestT]], room: int, first_left: int
    ) -> bool:
        """Give half of the room to prompts much shorter than the first; whether there were any.

        By rank alone they would wait while the rest of a long prompt that has waited long is
        computed: some steps. So they begin with the next step, and the long one keeps going. Who
        needs only half as much again is finished.
        """
        short = min(room, first_left * 2 // 3)
        half, rows_before = room // 2, self._rows
        for _, _, entry in sorted(item for item in line if item[1] <= short):
            if half < 1:
                break
            is_waiting = entry.request in self._scheduler._waiting
            if is_waiting and (self._scheduler._refused or self._computing_prefix_of(entry)):
                continue
            if entry.arrival in self._served or not self._admit(entry, first=False):
                continue
            rows = entry.left if entry.left <= half + half // 2 else half
            # the rest of a long prompt takes longer for as many rows
            rows = min(rows, self._room(entry.request.computed) * 3 // 4)
            self._serve(entry, rows)
            half -= rows
        return self._rows > rows_before

    def _admit(self, entry: _Entry[RequestT], *, first: bool) -> bool:
        """Whether it is running now. Who finds no room ends the admission of all behind it.

        Until the first in line finds room, nobody takes a ride in front of it in later steps.
        """
        scheduler, request = self._scheduler, entry.request
        if request in scheduler._running:
            return True
        if not self._open or len(scheduler._running) >= scheduler.policy.max_running:
            return False
        self._open = self._admit_request(request)
        if not self._open:
            if first:
                scheduler._refused = entry
            return False
        scheduler._running[request] = scheduler._waiting.pop(request)
        scheduler.counts.admitted += 1
        entry.preempted = False
        if entry is scheduler._refused:
            scheduler._refused = None
        return True

    def _computing_prefix_of(self, entry: _Entry[RequestT]) -> _Entry[RequestT] | None:
        """The running prompt that a waiting one waits for, as it computes blocks that both have.

        It is given rows in the place of the one that waits, which by that gives it its rank.
        """
        scheduler = self._scheduler
        if entry.request in scheduler._running:
            return None
        for other in scheduler._running.values():
            if other.request.decoding:
                continue
            common = self._common(entry, other)
            gain = common - entry.request.computed
            if other.request.computed < common and gain >= scheduler._block_size:
                scheduler.counts.waited_for_prefix += not entry.waited_for_prefix
                entry.waited_for_prefix = True
                return other
        return None

    def _common(self, entry: _Entry[RequestT], other: _Entry[RequestT]) -> int:
        """Tokens of the full blocks that both begin with; compared once for each pair."""
        if other.arrival not in entry.common:
            size, a, b = self._scheduler._block_size, entry.request.tokens, other.request.tokens
            end = 0
            while end + size <= min(len(a), len(b)) and a[end : end + size] == b[end : end + size]:
                end += size
            entry.common[other.arrival] = end
        return entry.common[other.arrival]
