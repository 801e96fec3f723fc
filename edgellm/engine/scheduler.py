"""Scheduling: which requests run, which wait, and the plan of each step. Pure Python; knows no
model and no cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, KeysView, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from edgellm.engine.plan import Arrival, Entry, Plan, RequestT, Share, Snapshot
from edgellm.engine.prompt_rows import PromptRows, SchedulingPolicy, in_line
from edgellm.engine.step_costs import StepCosts, StepLoad


@dataclass
class SchedulerCounts:
    """Counts so far; `waited_for_prefix`: requests whose prefix another one computed meanwhile."""

    steps: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    admitted: int = 0
    preempted: int = 0
    waited_for_prefix: int = 0

    @property
    def rows(self) -> int:
        """Computed rows of prompts and of decodes."""
        return self.prefill_rows + self.decode_rows


class Scheduler(Generic[RequestT]):
    """Scheduler of each step's rows: decodes first, then prompts in the order of the policy.

    Of several owners of requests, the one that was served the least goes first, whatever the
    policy, which orders the requests of one owner.

    A request waits until there is room for its whole prompt, and then runs until it is removed. It
    goes back to waiting when it is preempted or makes way for another one. No choice changes an
    answer.

    Attributes:
        policy: order of prompts, and bounds of a step.
        costs: predictor of a step's time.
        counts: counts of rows, steps and requests so far.
    """

    def __init__(self, *, policy: SchedulingPolicy, costs: StepCosts) -> None:
        self.policy, self.costs = policy, costs
        self.counts = SchedulerCounts()
        self._owners = OwnerCounters()
        self._arrivals = 0
        self.start_again()

    def start_again(self) -> None:
        """Forget all requests, but not the counts."""
        self._running: dict[RequestT, Entry[RequestT]] = {}
        self._waiting: dict[RequestT, Entry[RequestT]] = {}
        self._refused: Entry[RequestT] | None = None  # first in line, which found no room
        self._present: Counter[str] = Counter()  # requests of each owner

    @property
    def running(self) -> KeysView[RequestT]:
        """Running requests, in the order of their admission."""
        return self._running.keys()

    @property
    def waiting(self) -> KeysView[RequestT]:
        """Waiting requests; the policy chooses which goes first."""
        return self._waiting.keys()

    @property
    def _full(self) -> bool:
        return len(self._running) >= self.policy.max_running

    @property
    def wants_room(self) -> bool:
        """Whether a request waits for the place or the blocks of another one."""
        if self._refused is not None:
            return True
        return self._full and any(not request.paused for request in self._waiting)

    def add(self, request: RequestT, *, findable: int = 0, version: int = -1) -> None:
        """Add a request, which waits for its admission.

        Args:
            findable: tokens that it would begin with, as they are in the KV cache.
            version: version of the cache in which they were looked up.
        """
        assert request not in self._running, "added twice"
        assert request not in self._waiting, "added twice"
        self._arrivals += 1
        clock, number = self.counts.prefill_rows, self._arrivals
        if request.asked is None:
            rows = len(request.tokens) - max(request.computed, findable)
            request.asked = Arrival(number, clock, rows)
        entry = Entry(
            request,
            number,
            request.asked,
            clock=request.asked.clock,
            since=self.counts.rows,
            owner=request.owner,
            priority=request.priority,
            findable=findable,
            looked_up=version,
        )
        self._owners.came(entry.owner, present=self._present)
        self._present[entry.owner] += 1
        self._waiting[request] = entry

    def look_up(self, version: int, findable: Callable[[RequestT], int]) -> None:
        """Look up again what one waiting request finds in a cache that has changed.

        One a step bounds the time: a prompt of 27,000 tokens takes 3 ms.

        Args:
            version: version of the cache, larger after each change.
            findable: function that looks up the tokens that a request would begin with.
        """
        stale = [entry for entry in self._waiting.values() if entry.looked_up != version]
        if stale:
            entry = min(stale, key=lambda entry: entry.looked_up)
            entry.findable, entry.looked_up = findable(entry.request), version

    def remove(self, request: RequestT) -> None:
        """Forget a request that is finished or cancelled; one that has gone already is no error."""
        if self._refused is not None and self._refused.request is request:
            self._refused = None
        entry = self._running.pop(request, None) or self._waiting.pop(request, None)
        if entry is not None:
            self._present[entry.owner] -= 1
            if not self._present[entry.owner]:
                del self._present[entry.owner]

    def plan(self, free: Sequence[int], *, admits: bool = True) -> Plan[RequestT]:
        """Plan a step; without shares if there are no rows, or the first in line finds no room.

        A plan that admits requests is for the caller to begin these, to call `admitted` or `refuse`
        for each, and to plan again: what they begin with is known then.

        Args:
            free: free KV blocks of each cache group.
            admits: whether waiting requests may be admitted.
        """
        decodes, prompts = self._decodes(), self._prompts()
        if not prompts:
            return Plan(decodes, refused=self._refused)
        present = sum(not request.paused for request in self._running) + len(self._waiting)
        rows = self.policy.prompt_rows(
            self._snapshot(free),
            self.policy,
            self.costs,
            budget=self.policy.budget(decodes=len(decodes), requests=present),
            shares=decodes,
            admits=admits,
        )
        rows.add(prompts)
        return self._noted(rows.plan)

    def plan_prompt(self, free: Sequence[int], *, admits: bool = True) -> Plan[RequestT]:
        """Plan all that is left of the prompt first in line, for its own device; see `plan`."""
        rows = PromptRows(self._snapshot(free), self.policy, self.costs, admits=admits)
        rows.add(self._prompts(), most=1)
        return self._noted(rows.plan)

    def admitted(self, request: RequestT) -> None:
        """Move a waiting request to the running ones, as it has begun."""
        entry = self._waiting.pop(request)
        self._running[request] = entry
        self.counts.admitted += 1
        entry.asked.begun = True
        entry.since = self.counts.rows
        if entry is self._refused:
            self._refused = None

    def refuse(self, request: RequestT, *, first: bool) -> None:
        """Leave a request waiting that was to begin and found no room.

        Args:
            first: whether it is first in line; no other one is admitted before it then.
        """
        if first:
            self._refused = self._waiting[request]

    def preempt(self, *, but: RequestT | None = None) -> RequestT | None:
        """Send the newest running request of the lowest priority back to the front of the line.

        Of several owners, the one that was served the most loses a request. A request whose reader
        is slow goes before all others, and one that waits and has blocks before all that run. The
        caller frees its blocks. None if there is only one left.

        Args:
            but: request that keeps its blocks.
        """
        waiting = self._waiting.values()
        holders = [e for e in waiting if e.request.holding and e.request is not but]
        if not holders and len(self._running) < 2:
            return None
        victim = min(holders or self._running.values(), key=self._goes_last)
        if not holders:
            self._stop(victim)
            victim.promised = True
        self.counts.preempted += 1
        return victim.request

    def make_way(self) -> RequestT | None:
        """Send a running request back to waiting for one that waits; None if there is no need.

        The owner with the most places loses one to the least served of all, if that has at least
        two fewer. Where all places are taken, one is also taken for a prompt that has waited a
        quantum, from a request that has run as long. The caller frees its blocks.
        """
        if not self._full and self._refused is None:
            return None
        waiting = [entry for entry in self._waiting.values() if not entry.request.paused]
        line = [entry for *_, entry in sorted(in_line(waiting, self._snapshot(()), self.policy))]
        if not line:
            return None
        first, places = line[0], Counter(entry.owner for entry in self._running.values())
        running = [entry for entry in self._running.values() if not entry.request.paused]
        victims = [e for e in running if places[e.owner] > places[first.owner] + 1]
        if not victims and self._full:
            before = self.counts.rows - self.policy.quantum
            own = (e for e in line if e.owner == first.owner and not e.asked.begun)
            late = next((e for e in own if e.since < before), None)
            if late is None:
                return None
            first = late
            victims = [e for e in running if e.since < before and _may_pass(first, e, places)]
        if not victims:
            return None
        most = max(places[entry.owner] for entry in victims)
        victim = min((e for e in victims if places[e.owner] == most), key=self._goes_last)
        self._stop(victim)
        victim.clock = self.counts.prefill_rows
        first.promised = True
        self.counts.preempted += 1
        return victim.request

    def done(self, shares: Sequence[Share[RequestT]], seconds: float) -> None:
        """Learn the seconds of a step that has run `shares`; dropped shares are left out."""
        self.costs.learn(self.count(shares), seconds)

    def passed(self, share: Share[RequestT], seconds: float) -> None:
        """Learn the seconds of rows in a group of layers, in proportion for all layers."""
        layers = share.layers
        assert layers is not None
        self.count([share])
        self.costs.learn(share.load, seconds * layers.all / (layers.end - layers.first))

    def count(self, shares: Sequence[Share[RequestT]]) -> StepLoad:
        """Count computed rows, a part of them for a group of layers; returns the load of all."""
        load, served = StepLoad(), Counter[str]()
        for share in shares:
            load = load.plus(share.rows, share.start)
            rows = share.rows if share.layers is None else share.layers.part(share.rows)
            served[share.request.owner] += rows
            if share.decode:
                self.counts.decode_rows += rows
            else:
                self.counts.prefill_rows += rows
            entry = self._running.get(share.request)
            if entry is not None:
                entry.promised = False
                if share.decode:
                    entry.last_decode = self.counts.steps
        self._owners.serve(served)
        return load

    def _snapshot(self, free: Sequence[int]) -> Snapshot[RequestT]:
        return Snapshot(
            self._running,
            self._waiting,
            self._refused,
            served=self._owners.of,
            clock=self.counts.prefill_rows,
            free=free,
        )

    def _noted(self, plan: Plan[RequestT]) -> Plan[RequestT]:
        """Note what concerns later steps, and return a plan."""
        if plan.admitted:
            return plan  # another one follows
        self._refused = plan.refused
        for entry in plan.delayed:
            self.counts.waited_for_prefix += not entry.waited_for_prefix
            entry.waited_for_prefix = True
        return plan

    def _prompts(self) -> list[Entry[RequestT]]:
        """Return the entries that may have rows of prompts now."""
        entries = [e for e in self._running.values() if not e.request.decoding]
        if not self._full:
            entries.extend(self._waiting.values())
        return [entry for entry in entries if not entry.request.paused]

    def _decodes(self) -> list[Share[RequestT]]:
        """Return shares of the requests that decode; of too many, those that waited longest."""
        running = self._running.values()
        ready = [e for e in running if e.request.decoding and not e.request.paused and e.left > 0]
        if len(ready) > self.policy.max_decodes:
            ready = sorted(ready, key=lambda e: e.last_decode)[: self.policy.max_decodes]
        return [Share(e.request, e.request.computed, e.left, decode=True) for e in ready]

    def _stop(self, entry: Entry[RequestT]) -> None:
        """Move a running request to the waiting ones."""
        self._waiting[entry.request] = self._running.pop(entry.request)
        entry.since = self.counts.rows

    def _goes_last(self, entry: Entry[RequestT]) -> tuple[float, ...]:
        """Return a sort key: the smallest loses its blocks first."""
        served = self._owners.of(entry.owner)
        return (not entry.request.paused, -served, entry.priority, -entry.number)


def _may_pass(first: Entry[RequestT], other: Entry[RequestT], places: Mapping[str, int]) -> bool:
    """Whether a waiting request may have a running one's place, if it waits long enough."""
    if first.owner == other.owner:
        return first.priority >= other.priority
    return places[first.owner] < places[other.owner]


# Tokens served, to all owners, after which half of an owner's lead or debt is forgotten: four
# prompts of 4,096. An owner of endless small answers would else gather a lead without an end.
_HALF_LIFE = 16_384


class OwnerCounters:
    """Tokens computed for each owner, of prompts and of answers, older ones counted less.

    The virtual token counters of "Fairness in Serving Large Language Models" (VTC, Sheng et al.,
    arXiv:2401.00588): the owner that was served the fewest tokens goes first, and one that comes
    back has saved nothing up meanwhile.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def of(self, owner: str) -> float:
        """Return the tokens served to an owner; the owner with the fewest goes first."""
        return self._served.get(owner, 0.0)

    def came(self, owner: str, *, present: Collection[str]) -> None:
        """Count in a new request; an owner that had none is lifted to the least of the others'.

        Args:
            present: owners of the requests that are on their way already.
        """
        if owner in present:
            return
        if not present:  # no owner to be compared with
            self._served = {owner: 0.0}
            return
        least = min(map(self.of, present))
        # counts up to the least would be lifted to it anyway
        served = {each: tokens for each, tokens in self._served.items() if tokens > least}
        self._served = {owner: least} | {each: self.of(each) for each in present} | served

    def serve(self, rows: Mapping[str, int]) -> None:
        """Count the tokens that a step has computed for each owner."""
        kept = 0.5 ** (sum(rows.values()) / _HALF_LIFE)
        self._served = {owner: tokens * kept for owner, tokens in self._served.items()}
        for owner, count in rows.items():
            self._served[owner] = self.of(owner) + count
