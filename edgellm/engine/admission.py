"""Who is running, and who waits for a place. Pure Python; knows no model and no cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from edgellm.engine.owners import OwnerCounters


class Underway(NamedTuple):
    """So many rows behind what is computed have passed so many layers, and rest there."""

    rows: int
    layers: int


class Schedulable(Protocol):
    """What the scheduler knows of a request, which is hashed by identity.

    Attributes:
        tokens: the prompt, and what was sampled.
        computed: how many of them are in the KV cache.
        underway: rows of its prompt that rest between two layers, if some do.
        may_rest: rows of its prompt may rest between two layers; not where that found no room.
        decoding: its prompt has been computed; all that is left goes into the next step, which is
            the token sampled last, and a draft behind it. Not so after a preemption, until all
            that it had is computed again.
        paused: its reader is slow, and nothing is to be computed for it now.
        owner: whose it is; it does not change.
        priority: among those of its owner, larger is more urgent; it does not change.
        salt: only requests with the same one share what is computed of a prefix.
    """

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


RequestT = TypeVar("RequestT", bound=Schedulable)


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
class Entry(Generic[RequestT]):
    """A request in the scheduler; `common` has full blocks shared with others, by their arrival."""

    request: RequestT
    arrival: int
    clock: int
    owner: str
    priority: int
    preempted: bool = False
    waited_for_prefix: bool = False
    last_decode: int = 0
    common: dict[int, int] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return len(self.request.tokens) - self.request.computed


class Admission(Generic[RequestT]):
    """Requests that run, at most `max_running`, and those that wait.

    Attributes:
        running: the last one admitted last.
        refused: who is first in line, and found no room.
        owners: what was computed for whom.
    """

    def __init__(self, *, max_running: int) -> None:
        self.counts = SchedulerCounts()
        self.running: dict[RequestT, Entry[RequestT]] = {}
        self.waiting: dict[RequestT, Entry[RequestT]] = {}
        self.refused: Entry[RequestT] | None = None
        self.owners = OwnerCounters()
        self._present: Counter[str] = Counter()  # requests of each owner
        self._max_running = max_running
        self._arrivals = 0

    @property
    def full(self) -> bool:
        """Whether as many run as may."""
        return len(self.running) >= self._max_running

    def add(self, request: RequestT) -> None:
        """Let a request wait."""
        assert request not in self.running, "added twice"
        assert request not in self.waiting, "added twice"
        self._arrivals += 1
        clock = self.counts.prefill_rows
        entry = Entry(request, self._arrivals, clock, request.owner, request.priority)
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
        """Whether there was room for one that waits; it is running then.

        Args:
            first: in line.
        """
        if not reserve(entry.request):
            if first:
                self.refused = entry
            return False
        self.running[entry.request] = self.waiting.pop(entry.request)
        self.counts.admitted += 1
        entry.preempted = False
        if entry is self.refused:
            self.refused = None
        return True

    def preempt(self) -> RequestT | None:
        """See `Scheduler.preempt`."""
        if len(self.running) < 2:
            return None
        victim = min(
            self.running.values(),
            key=lambda entry: (
                not entry.request.paused,
                -self.owners.of(entry.owner),
                entry.priority,
                -entry.arrival,
            ),
        )
        self.waiting[victim.request] = self.running.pop(victim.request)
        victim.preempted = True
        self.counts.preempted += 1
        return victim.request
