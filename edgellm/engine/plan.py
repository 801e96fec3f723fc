"""Plans of steps, and the snapshots that they are made from. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from edgellm.engine.step_costs import StepLoad
from edgellm.kernels.kv_blocks import BLOCK


class Underway(NamedTuple):
    """Rows of a prompt on their way, which have passed `layers` of `all` layers.

    Both are 0 where another device computes them.
    """

    rows: int
    layers: int
    all: int


@dataclass(slots=True)
class Arrival:
    """Arrival of a prompt, shared by all answers to it.

    Attributes:
        number: number among all added requests, ascending.
        clock: prompt rows that the engine had computed before.
        rows: tokens of the prompt that were left to compute and not in the KV cache.
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
        needed: KV blocks of each cache group that it lacks for all tokens and one more.
        underway: rows of its prompt on their way; None: none.
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
        promised: whether it goes first, until rows of it are computed: it lost its place for
            blocks, or one was taken for it.
        last_decode: number of the step that decoded it last.
        findable: while it waits, tokens that it would begin with, as they are in the KV cache.
        looked_up: version of the cache in which they were looked up.
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
    findable: int = 0
    looked_up: int = -1
    common: dict[int, int] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return len(self.request.tokens) - self.request.computed

    def common_with(self, other: Entry[RequestT]) -> int:
        """Count the tokens of the full blocks that both begin with, once for each pair."""
        if other.number not in self.common:
            a, b, end = self.request.tokens, other.request.tokens, 0
            most = min(len(a), len(b))
            while end + BLOCK <= most and a[end : end + BLOCK] == b[end : end + BLOCK]:
                end += BLOCK
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
        admitted: waiting requests to begin, and whether each is the first in line. Their shares are
            a guess: they may begin with tokens that the KV cache has.
        refused: first request in line, if it has found no room.
        full: whether a request found too few free blocks in this plan.
        delayed: requests that wait for a prefix which another one computes.
    """

    shares: list[Share[RequestT]]
    admitted: dict[RequestT, bool] = field(default_factory=dict)
    refused: Entry[RequestT] | None = None
    full: bool = False
    delayed: list[Entry[RequestT]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[RequestT]):
    """State of the engine before a step, which does not change while a plan is made.

    Attributes:
        running: running requests, in the order of their admission.
        waiting: waiting requests.
        refused: request that was first in line and found no room.
        served: number of tokens served to an owner.
        clock: prompt rows computed so far.
        free: free KV blocks of each cache group.
    """

    running: Mapping[RequestT, Entry[RequestT]]
    waiting: Mapping[RequestT, Entry[RequestT]]
    refused: Entry[RequestT] | None
    served: Callable[[str], float]
    clock: int
    free: Sequence[int]
