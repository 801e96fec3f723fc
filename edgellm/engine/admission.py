"""Requests that run and requests that wait for a place. Pure Python; knows no model, no cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from edgellm.engine.owners import OwnerCounters


class Underway(NamedTuple):
    """Parked rows of a prompt, behind its computed tokens, that have passed `layers` layers."""

    rows: int
    layers: int


@dataclass(slots=True)
class Arrival:
    """Arrival of a prompt, shared by all answers to it.

    Attributes:
        number: number among all added requests, ascending.
        clock: prompt rows that the engine had computed before.
        rows: tokens of the prompt that were left to compute.
        begun: whether one of the answers has had a place.
    """

    number: int
    clock: int
    rows: int
    begun: bool = False


class Schedulable(Protocol):
    """A request as the scheduler sees it, hashed by identity.

    Attributes:
        tokens: tokens of the prompt, and sampled tokens.
        computed: number of tokens that are in the KV cache.
        underway: parked rows of its prompt; None: none.
        may_rest: whether rows of its prompt may be parked; False after they found no room.
        decoding: whether its prompt is computed, so that all that is left goes into the next step:
            the token sampled last, and a draft behind it. False after a preemption, until all that
            it had is computed again.
        paused: whether nothing is to be computed for it now, because its reader is slow.
        owner: name of its owner; it does not change.
        priority: priority among its owner's requests, larger is more urgent; it does not change.
        salt: salt of its prefixes; only requests with the same salt share computed prefixes.
        holding: whether it has blocks in the KV cache. Answers that begin at the end of another
            one's prompt have some while they wait.
        asked: arrival of its prompt; set when it is added, unless shared with another answer.
    """

    asked: Arrival | None

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def computed(self) -> int: ...

    @property
    def underway(self) -> Underway | None: ...

    @property
    def may_rest(self) -> bool: ...

    @property
    def decoding(self) -> bool: ...

    @property
    def paused(self) -> bool: ...

    @property
    def owner(self) -> str: ...

    @property
    def priority(self) -> int: ...

    @property
    def salt(self) -> str: ...

    @property
    def holding(self) -> bool: ...


RequestT = TypeVar("RequestT", bound=Schedulable)


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


@dataclass(slots=True, eq=False)
class Entry(Generic[RequestT]):
    """A request in the scheduler; `common`: tokens in blocks shared with others, by their number.

    Attributes:
        number: number among all added requests, ascending.
        asked: arrival of its prompt.
        clock: prompt rows computed before the request began to wait for its turn.
        since: rows of all kinds computed before it began to wait, or to run.
        promised: whether it goes first: it lost its place for blocks, or one was taken for it.
    """

    request: RequestT
    number: int
    asked: Arrival
    clock: int
    since: int
    owner: str
    priority: int
    promised: bool = False
    waited_for_prefix: bool = False
    last_decode: int = 0
    common: dict[int, int] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return len(self.request.tokens) - self.request.computed


class Admission(Generic[RequestT]):
    """Requests that run, at most `max_running`, and requests that wait.

    Attributes:
        running: running requests, in the order of their admission.
        refused: first request in line, if it found no room.
        owners: tokens computed for each owner.
    """

    def __init__(self, *, max_running: int, before: Admission[RequestT] | None = None) -> None:
        """`before`: admission whose counts go on."""
        self.counts: SchedulerCounts = SchedulerCounts() if before is None else before.counts
        self.running: dict[RequestT, Entry[RequestT]] = {}
        self.waiting: dict[RequestT, Entry[RequestT]] = {}
        self.refused: Entry[RequestT] | None = None
        self.owners: OwnerCounters = OwnerCounters() if before is None else before.owners
        self._present: Counter[str] = Counter()  # requests of each owner
        self._max_running = max_running
        self._arrivals: int = 0 if before is None else before._arrivals

    @property
    def full(self) -> bool:
        """Whether `max_running` requests run."""
        return len(self.running) >= self._max_running

    def add(self, request: RequestT) -> None:
        """Add a request to the waiting ones."""
        assert request not in self.running, "added twice"
        assert request not in self.waiting, "added twice"
        self._arrivals += 1
        clock, number = self.counts.prefill_rows, self._arrivals
        if request.asked is None:
            rows = len(request.tokens) - request.computed
            request.asked = Arrival(number, clock, rows)
        entry = Entry(
            request,
            number,
            request.asked,
            clock=request.asked.clock,
            since=self.counts.rows,
            owner=request.owner,
            priority=request.priority,
        )
        self.owners.came(entry.owner, present=self._present)
        self._present[entry.owner] += 1
        self.waiting[request] = entry

    def remove(self, request: RequestT) -> None:
        """Forget a request; one that has gone already is no error."""
        if self.refused is not None and self.refused.request is request:
            self.refused = None
        entry = self.running.pop(request, None) or self.waiting.pop(request, None)
        if entry is not None:
            self._present[entry.owner] -= 1
            if not self._present[entry.owner]:
                del self._present[entry.owner]

    def admit(
        self, entry: Entry[RequestT], reserve: Callable[[RequestT], bool], *, first: bool
    ) -> bool:
        """Admit a waiting request; False if there is no room for it.

        Args:
            first: whether it is first in line.
        """
        if not reserve(entry.request):
            if first:
                self.refused = entry
            return False
        self.running[entry.request] = self.waiting.pop(entry.request)
        self.counts.admitted += 1
        entry.promised, entry.asked.begun = False, True
        entry.since = self.counts.rows
        if entry is self.refused:
            self.refused = None
        return True

    def preempt(self, *, but: RequestT | None = None) -> RequestT | None:
        """See `Scheduler.preempt`."""
        waiting = self.waiting.values()
        holders = [e for e in waiting if e.request.holding and e.request is not but]
        if not holders and len(self.running) < 2:
            return None
        victim = min(holders or self.running.values(), key=self._goes_last)
        if not holders:
            self._stop(victim)
            victim.promised = True
        self.counts.preempted += 1
        return victim.request

    def make_way(self, line: Sequence[Entry[RequestT]], *, quantum: float) -> RequestT | None:
        """See `Scheduler.make_way`.

        Args:
            line: waiting requests, in the order in which they are served.
            quantum: see `SchedulingPolicy`.
        """
        first, places = line[0], Counter(entry.owner for entry in self.running.values())
        running = [entry for entry in self.running.values() if not entry.request.paused]
        victims = [e for e in running if places[e.owner] > places[first.owner] + 1]
        if not victims and self.full:
            before = self.counts.rows - quantum
            own = (e for e in line if e.owner == first.owner and not e.asked.begun)
            late = next((e for e in own if e.since < before), None)
            if late is None:
                return None
            first = late
            victims = [
                entry
                for entry in running
                if entry.since < before and self._may_pass(first, entry, places)
            ]
        if not victims:
            return None
        most = max(places[entry.owner] for entry in victims)
        victim = min((e for e in victims if places[e.owner] == most), key=self._goes_last)
        self._stop(victim)
        victim.clock = self.counts.prefill_rows
        first.promised = True
        self.counts.preempted += 1
        return victim.request

    @staticmethod
    def _may_pass(
        first: Entry[RequestT], other: Entry[RequestT], places: Mapping[str, int]
    ) -> bool:
        """Whether a waiting request may have a running one's place, if it waits long enough."""
        if first.owner == other.owner:
            return first.priority >= other.priority
        return places[first.owner] < places[other.owner]

    def _stop(self, entry: Entry[RequestT]) -> None:
        """Move a running request to the waiting ones."""
        self.waiting[entry.request] = self.running.pop(entry.request)
        entry.since = self.counts.rows

    def _goes_last(self, entry: Entry[RequestT]) -> tuple[float, ...]:
        """Return a sort key: the smallest loses its blocks first."""
        served = self.owners.of(entry.owner)
        return (not entry.request.paused, -served, entry.priority, -entry.number)
