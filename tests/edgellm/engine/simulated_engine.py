"""An engine without a model: virtual time, and a pool that only counts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from edgellm.engine.plan import Arrival, Share, Underway
from edgellm.engine.prompt_rows import SchedulingPolicy
from edgellm.engine.scheduler import Scheduler
from edgellm.engine.step_costs import StepCosts, StepLoad

BLOCK = 128


TARGET = 0.1


@dataclass
class Shared:
    """Blocks of a prompt that several answers begin with, the last of which may not be full."""

    blocks: int
    holders: int


@dataclass(eq=False)
class Request:
    """A prompt of numbers and so many tokens of answer; `arrival` and `cancelled_at` in seconds.

    Attributes:
        forks: other answers to the prompt, which begin where it ends, and hold its blocks from then
            on, also while they wait.
        blocks: that it has alone.
    """

    tokens: list[int]
    answer: int = 1
    arrival: float = 0.0
    priority: int = 0
    cancelled_at: float = float("inf")
    computed: int = 0
    sampled: int = 0
    blocks: int = 0
    failed: bool = False
    paused: bool = False
    salt: str = ""
    owner: str = ""
    prefilled: int = 0
    underway: Underway | None = None
    may_rest: bool = True
    began: float | None = None
    times: list[float] = field(default_factory=list)
    forks: list[Request] = field(default_factory=list)
    shared: Shared | None = None
    asked: Arrival | None = None

    @property
    def holding(self) -> bool:
        return self.blocks > 0 or self.shared is not None

    @property
    def needed(self) -> list[int]:
        return [self.missing(len(self.tokens))]

    def missing(self, end: int) -> int:
        """Blocks that it lacks for so many tokens; of a prompt that others begin with as well, the
        last block is copied."""
        blocks, shared = self.blocks, self.shared
        if shared is None or shared.holders == 1:
            full = 0 if shared is None else shared.blocks
        else:
            full = (len(self.tokens) - self.sampled) // BLOCK
        return max(0, -(-end // BLOCK) - full - blocks)

    @property
    def decoding(self) -> bool:
        return self.sampled > 0 and len(self.tokens) - self.computed == 1

    @property
    def gap(self) -> float:
        """The longest time between two of its tokens."""
        return max((b - a for a, b in itertools.pairwise(self.times)), default=0.0)


def two_cores(load: StepLoad) -> float:
    """SmolLM2-135M: few rows are slower each than many are."""
    few = 2.3e-3 + 0.86e-3 * load.rows
    many = 10e-3 + 0.40e-3 * load.rows
    return min(few, many) + 0.17e-6 * load.positions


def numbers(length: int, start: int = 0) -> list[int]:
    """A prompt that begins like no other with another start."""
    return list(range(start * 10_000, start * 10_000 + length))


class Engine:
    """What the real one does around its scheduler; checks each step.

    Args:
        blocks: of the pool; a request that needs more alone fails.
        watermark: blocks that an admission leaves free.
        sharing: finished blocks of prompts are found by those that are admitted later.
        surprises: some find no room though there seemed to be, while others run.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        *,
        blocks: int = 10**9,
        watermark: int = 0,
        sharing: bool = False,
        surprises: bool = False,
        law: Callable[[StepLoad], float] = two_cores,
        noise: float = 0.0,
        costs: StepCosts | None = None,
    ) -> None:
        self.scheduler: Scheduler[Request] = Scheduler(policy=policy, costs=costs or taught())
        self.policy, self.law, self.noise = policy, law, noise
        self.blocks, self.free, self.watermark = blocks, blocks, watermark
        self.known: set[tuple[int, ...]] | None = set() if sharing else None
        self.surprises, self.begins = surprises, 0
        self.now = 0.0
        self.chance = random.Random(0)
        self.steps: list[tuple[list[Share[Request]], float]] = []

    def run(self, requests: Iterable[Request], *, until: float = float("inf")) -> None:
        arriving = sorted(requests, key=lambda r: r.arrival)[::-1]
        cancelled = sorted(
            (r for r in arriving if r.cancelled_at < float("inf")),
            key=lambda r: r.cancelled_at,
            reverse=True,
        )
        while self.now < until:
            self.arrive(arriving, cancelled)
            self.make_way()
            self.scheduler.counts.steps += 1
            waiting, chosen = len(self.scheduler.waiting), self.planned()
            self.check(chosen)
            shares = self.reserve(chosen)
            if shares:
                for share in shares:
                    if share.request.began is None:
                        share.request.began = self.now
                calls = [(call, self.seconds(call)) for call in calls_of(shares)]
                self.now += sum(seconds for _, seconds in calls)
                self.arrive(arriving, cancelled)  # while the step is running
                self.finish(shares, calls)
            elif chosen or len(self.scheduler.waiting) < waiting:
                continue  # who was to be computed has failed
            elif arriving:
                self.now = max(self.now, arriving[-1].arrival)
            else:
                return

    def arrive(self, arriving: list[Request], cancelled: list[Request]) -> None:
        while arriving and arriving[-1].arrival <= self.now:
            self.scheduler.add(arriving.pop())
        while cancelled and cancelled[-1].cancelled_at <= self.now:
            request = cancelled.pop()
            if request in arriving:
                arriving.remove(request)
            self.remove(request)

    def make_way(self) -> None:
        request = self.scheduler.make_way()
        if request is not None:
            assert request not in self.scheduler.running
            self.release(request)

    def state(self) -> object:
        """What no plan changes."""
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        return running, waiting, [(r.computed, r.blocks, r.underway) for r in running + waiting]

    def planned(self) -> list[Share[Request]]:
        """The rows of a step, after all have begun that it admits."""
        admits = True
        while True:
            watermark, before = self.watermark if self.scheduler.running else 0, self.state()
            plan = self.scheduler.plan([self.free - watermark], admits=admits)
            assert self.state() == before
            if not plan.admitted:
                return plan.shares
            assert admits
            admits = all(self.begin(request, first) for request, first in plan.admitted.items())

    def begin(self, request: Request, first: bool) -> bool:
        """Whether it has begun or failed; who finds no room while others run goes on waiting."""
        self.begins += 1
        while request.needed[0] > self.free or (self.surprises and self.begins % 3 == 0):
            if self.scheduler.running:
                self.scheduler.refuse(request, first=first)
                return False
            if request.needed[0] <= self.free:
                break
            holder = self.scheduler.preempt(but=request)  # that waits
            if holder is None:
                self.fail(request)
                return True
            self.release(holder)
        needed = request.needed[0]
        self.free -= needed
        request.blocks += needed
        request.computed = self.found(request)
        self.scheduler.admitted(request)
        return True

    def found(self, request: Request) -> int:
        """Tokens of a prompt that are computed already, for it or for others."""
        found = request.computed
        if self.known is not None and not found:
            while found + BLOCK < len(request.tokens):
                if tuple(request.tokens[: found + BLOCK]) not in self.known:
                    break
                found += BLOCK
        return found

    def reserve(self, shares: list[Share[Request]]) -> list[Share[Request]]:
        """Blocks for what is appended; preempts the newest until there are enough."""
        dropped: set[Request] = set()
        for share in shares:
            end = share.start + share.rows
            while share.request not in dropped and share.request.missing(end):
                if self.free:
                    self.free -= 1
                    share.request.blocks += 1
                    continue
                victim = self.scheduler.preempt()
                if victim is None:
                    victim = share.request
                    self.fail(victim)
                self.release(victim)
                dropped.add(victim)
        return [share for share in shares if share.request not in dropped]

    def seconds(self, call: list[Share[Request]]) -> float:
        """What a call takes."""
        part = 1.0
        if call[0].layers is not None:
            part = (call[0].layers.end - call[0].layers.first) / call[0].layers.all
        return self.law(load_of(call)) * part * self.chance.uniform(1, 1 + self.noise)

    def finish(
        self, shares: list[Share[Request]], calls: list[tuple[list[Share[Request]], float]]
    ) -> None:
        self.steps.append((shares, sum(seconds for _, seconds in calls)))
        for share in shares:
            request, layers = share.request, share.layers
            if request not in self.scheduler.running:
                continue  # cancelled while the step ran
            request.underway = None
            if layers is not None and layers.end < layers.all:
                request.underway = Underway(share.rows, layers.end, layers.all)
                continue
            request.computed += share.rows
            request.prefilled += 0 if share.decode else share.rows
            if self.known is not None:
                for end in range(BLOCK, request.computed + 1, BLOCK):
                    self.known.add(tuple(request.tokens[:end]))
            if request.computed == len(request.tokens):
                self.begin_forks(request)
                self.sample(request)
        for call, seconds in calls:
            if call[0].layers is None:
                self.scheduler.done(call, seconds)
            else:
                self.scheduler.passed(call[0], seconds)

    def begin_forks(self, request: Request) -> None:
        """Let other answers begin at the end of its prompt; they wait for their places."""
        if not request.forks:
            return
        request.shared = Shared(request.blocks, 1 + len(request.forks))
        request.blocks = 0
        for fork in request.forks:
            fork.asked, fork.shared = request.asked, request.shared
            fork.computed = len(fork.tokens)
            self.scheduler.add(fork)
            self.sample(fork)
        request.forks = []

    def sample(self, request: Request) -> None:
        request.tokens.append(-1 - request.sampled)
        request.sampled += 1
        request.times.append(self.now)
        if request.sampled == request.answer:
            self.remove(request)

    def fail(self, request: Request) -> None:
        request.failed = True
        self.remove(request)

    def remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.release(request)
        for fork in request.forks:  # they begin by themselves
            fork.asked = request.asked
            self.scheduler.add(fork)
        request.forks = []

    def release(self, request: Request) -> None:
        self.free += request.blocks
        if request.shared is not None:
            request.shared.holders -= 1
            self.free += 0 if request.shared.holders else request.shared.blocks
            request.shared = None
        request.blocks = request.computed = 0
        request.underway = None

    def check(self, shares: Sequence[Share[Request]]) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert len({share.request for share in shares}) == len(shares)
        assert not running & waiting
        assert len(running) <= self.policy.max_running
        assert 0 <= self.free <= self.blocks
        for share in shares:
            assert share.request in running
            assert share.start == share.request.computed
            assert share.decode is share.request.decoding
            assert 1 <= share.rows <= len(share.request.tokens) - share.start
            self.check_layers(share)
        decoding = sum(request.decoding for request in running)
        assert sum(share.decode for share in shares) == min(decoding, self.policy.max_decodes)
        most = self.policy.budget(decodes=1, requests=2).max_rows
        assert all(sum(share.rows for share in call) <= most for call in calls_of(shares))
        assert shares or not running, "somebody runs, and nothing is computed"

    def check_layers(self, share: Share[Request]) -> None:
        """Rows that rest between layers go on from there, and come with no others of theirs."""
        underway, layers = share.request.underway, share.layers
        if underway is not None:
            assert layers is not None
            assert (share.rows, layers.first, layers.all) == underway
        if layers is not None:
            assert not share.decode
            assert (0 if underway is None else underway.layers) == layers.first < layers.end
            assert layers.end <= layers.all
        resting = sum(request.underway is not None for request in self.scheduler.running)
        assert resting <= 4


class Predicting(Engine):
    """Notes what each step was predicted to take, and of it a layer of each prompt, or 36 rows."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        super().__init__(policy)
        self.predicted: list[tuple[list[Share[Request]], float, float]] = []

    def check(self, shares: Sequence[Share[Request]]) -> None:
        super().check(shares)
        costs = self.scheduler.costs
        whole, groups, few = StepLoad(), 0.0, []
        for call in calls_of(shares):
            if call[0].layers is None:
                whole = load_of(call)
            else:
                layers = call[0].layers
                part = (layers.end - layers.first) / layers.all
                groups += costs.seconds(call[0].load) * part
                few.append(costs.seconds(call[0].load) / layers.all)
        few += [costs.seconds(StepLoad().plus(36, s.start)) for s in shares if not s.decode]
        seconds = costs.seconds(whole) + groups
        self.predicted.append((list(shares), seconds, max(few, default=0.0)))


def chosen(scheduler: Scheduler[Request], *, free: int = 10**9) -> list[Share[Request]]:
    """The rows of a step, of which all begin that have room by the plan."""
    scheduler.counts.steps += 1
    while (plan := scheduler.plan([free])).admitted:
        for request in plan.admitted:
            scheduler.admitted(request)
    return plan.shares


def refused(scheduler: Scheduler[Request]) -> list[Share[Request]]:
    """The rows of a step in which none begins that waits."""
    plan = scheduler.plan([0])
    for request, first in plan.admitted.items():
        scheduler.refuse(request, first=first)
    return scheduler.plan([0], admits=False).shares


def load_of(shares: Iterable[Share[Request]]) -> StepLoad:
    load = StepLoad()
    for share in shares:
        load = load.plus(share.rows, share.start)
    return load


def calls_of(shares: Iterable[Share[Request]]) -> list[list[Share[Request]]]:
    """What a step computes in one call each: all that goes through all layers, and each group."""
    whole = [share for share in shares if share.layers is None]
    return [*([whole] if whole else []), *([s] for s in shares if s.layers is not None)]


def taught(law: Callable[[StepLoad], float] = two_cores, *, steps: int = 100) -> StepCosts:
    costs, chance = StepCosts(), random.Random(0)
    for _ in range(steps):
        load = StepLoad()
        for _ in range(chance.choice([0, 1, 5])):
            load = load.plus(1, chance.randrange(4096))
        rows = chance.choice([0, 1, 40, 100, 200, 400])
        load = load.plus(rows, chance.randrange(4096)) if rows else load
        costs.learn(load, law(load))
    return costs


def finished(request: Request) -> bool:
    return request.sampled == request.answer and len(request.times) == request.answer


def forked(request: Request, n: int) -> Request:
    """With answers to its prompt, `n` in all."""
    request.forks = [
        Request(
            list(request.tokens),
            1 + (request.answer + i) % 40,
            request.arrival,
            request.priority,
            owner=request.owner,
        )
        for i in range(1, n)
    ]
    return request


def with_forks(requests: Iterable[Request]) -> list[Request]:
    """All answers."""
    return [each for request in requests for each in (request, *request.forks)]


requests_strategy = st.lists(
    st.builds(
        lambda prompt, answer, arrival, priority, cancelled, owner, n: forked(
            Request(numbers(prompt), answer, arrival, priority, cancelled, owner=owner), n
        ),
        prompt=st.integers(1, 2000),
        answer=st.integers(1, 40),
        arrival=st.floats(0, 3),
        priority=st.integers(-1, 1),
        cancelled=st.just(float("inf")) | st.floats(0, 4),
        owner=st.sampled_from(["", "", "a", "b"]),
        n=st.sampled_from([1, 1, 1, 2, 5]),
    ),
    max_size=12,
)


def streams(count: int) -> list[Request]:
    return [Request(numbers(100, start=i), 400) for i in range(count)]
