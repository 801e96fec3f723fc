"""The plan of a step: its rows, and the requests that it admits. Pure Python; changes nothing."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from edgellm.engine.policies import Prompt, SchedulingPolicy, StepBudget
from edgellm.engine.step_costs import StepCosts, StepLoad

NO_BOUNDS = StepBudget(math.inf, 1, sys.maxsize)


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
        found: number that would be in the KV cache if the request were begun now.
        needed: KV blocks of each cache group that it lacks for all tokens and one more.
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
    def found(self) -> int: ...

    @property
    def needed(self) -> Sequence[int]: ...

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


@dataclass(slots=True, eq=False)
class Entry(Generic[RequestT]):
    """A request in the scheduler; `common`: tokens in blocks shared with others, by their number.

    Attributes:
        number: number among all added requests, ascending.
        asked: arrival of its prompt.
        clock: prompt rows computed before the request began to wait for its turn.
        since: rows of all kinds computed before it began to wait, or to run.
        promised: whether it goes first: it lost its place for blocks, or one was taken for it.
        waited_for_prefix: whether it has waited for another request to compute its prefix.
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

    def common_with(self, other: Entry[RequestT], *, block_size: int) -> int:
        """Count the tokens of the full blocks that both begin with, once for each pair."""
        if other.number not in self.common:
            size, a, b = block_size, self.request.tokens, other.request.tokens
            end = 0
            while end + size <= min(len(a), len(b)) and a[end : end + size] == b[end : end + size]:
                end += size
            self.common[other.number] = end
        return self.common[other.number]


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


@dataclass(slots=True)
class Plan(Generic[RequestT]):
    """Plan of a step.

    Attributes:
        shares: rows to compute, decodes first.
        admitted: waiting requests to begin, with the number of tokens that they begin with.
        refused: first request in line, if it has found no room.
        delayed: requests that wait for a prefix which another one computes.
    """

    shares: list[Share[RequestT]]
    admitted: dict[RequestT, int] = field(default_factory=dict)
    refused: Entry[RequestT] | None = None
    delayed: list[Entry[RequestT]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[RequestT]):
    """State of the engine before a step.

    Attributes:
        running: running requests, in the order of their admission.
        waiting: waiting requests.
        refused: request that was first in line and found no room.
        served: number of tokens served to an owner.
        clock: prompt rows computed so far.
        free: free KV blocks of each cache group.
        block_size: tokens of a KV block.
    """

    running: Mapping[RequestT, Entry[RequestT]]
    waiting: Mapping[RequestT, Entry[RequestT]]
    refused: Entry[RequestT] | None
    served: Callable[[str], float]
    clock: int
    free: Sequence[int]
    block_size: int


# Item of a heap: rank, number of tokens left, entry. No two ranks are the same, as they end with
# the entry's number.
_Ranked = tuple[tuple[float, ...], int, Entry[RequestT]]


class Planner(Generic[RequestT]):
    """Planner of a step's prompt rows, beside those of decodes.

    Args:
        shares: shares of the step so far.
    """

    def __init__(
        self,
        snapshot: Snapshot[RequestT],
        policy: SchedulingPolicy,
        costs: StepCosts,
        *,
        budget: StepBudget = NO_BOUNDS,
        shares: Iterable[Share[RequestT]] = (),
    ) -> None:
        self.plan = Plan(list(shares), refused=snapshot.refused)
        self._snapshot, self._policy, self._costs = snapshot, policy, costs
        self._budget = budget
        self._places = policy.max_running - len(snapshot.running)
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
            position = entry.request.computed
            room = self._room(position)
            # a few rows that are left of a step are no beginning for a long prompt
            if room < 1 or (self._rows and room < min(entry.left, self._budget.min_rows // 2)):
                return
            entry = self._computing_prefix_of(entry) or entry
            if entry.number in self._served:
                continue
            if not self._admit(entry, first=True):
                line = [item for item in line if self._runs(item[2])]
                heapq.heapify(line)
                continue
            if self._computed(entry) != position:
                room = self._room(self._computed(entry))
            if self._left(entry) > room // 2 and self._let_short_ones_ride(line, room, entry):
                room = self._room(self._computed(entry))
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
        start, left = self._computed(entry), self._left(entry)
        rows = left if left <= min(room + room // 8, limit) else min(left, room)
        if rows < 1:
            return
        self.plan.shares.append(Share(entry.request, start, rows, decode=False))
        self._load = self._load.plus(rows, start)
        self._rows += rows
        self._served.add(entry.number)

    def _let_short_ones_ride(
        self, line: list[_Ranked[RequestT]], room: int, first: Entry[RequestT]
    ) -> bool:
        """Give half of the room to prompts much shorter than the first; False if there are none.

        By rank alone they would wait some steps, while the rest of a long prompt that has waited
        long is computed. So they begin with the next step, and the long one keeps going. A prompt
        that needs only half as much again is finished.
        """
        short = min(room, self._left(first) * 2 // 3)
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
            left = self._left(entry)
            rows = left if left <= half + half // 2 else half
            # the rest of a long prompt takes longer for as many rows
            rows = min(rows, self._room(self._computed(entry)) * 3 // 4)
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
            self._places = 0
            if first:
                self.plan.refused = entry
            return False
        self._places -= 1
        self.plan.admitted[entry.request] = entry.request.found
        if entry is self.plan.refused:
            self.plan.refused = None
        return True

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
        snapshot, size = self._snapshot, self._snapshot.block_size
        admitted = (snapshot.waiting[request] for request in self.plan.admitted)
        for other in (*snapshot.running.values(), *admitted):
            if other.request.decoding or other.request.salt != entry.request.salt:
                continue
            common = entry.common_with(other, block_size=size)
            if self._computed(other) < common and common - entry.request.computed >= size:
                self.plan.delayed.append(entry)
                return other
        return None

    def _runs(self, entry: Entry[RequestT]) -> bool:
        return entry.request in self._snapshot.running or entry.request in self.plan.admitted

    def _computed(self, entry: Entry[RequestT]) -> int:
        """Return the number of tokens in the KV cache, once the plan's requests have begun."""
        found = self.plan.admitted.get(entry.request)
        return entry.request.computed if found is None else found

    def _left(self, entry: Entry[RequestT]) -> int:
        return len(entry.request.tokens) - self._computed(entry)


def in_line(
    entries: Iterable[Entry[RequestT]], snapshot: Snapshot[RequestT], policy: SchedulingPolicy
) -> list[_Ranked[RequestT]]:
    """Return a heap of the entries with tokens left: owners in turns, each one's by rank."""
    ranked = []
    for entry in entries:
        left = entry.left
        if left > 0 and entry.request in snapshot.waiting:
            # another answer to a prompt that was computed ranks as the prompt did
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
