"""The tests' only way to what the engine keeps private. When the engine changes, this file does."""

from __future__ import annotations

import gc
import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from waiting import until

from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.engine import auto_backend, prompt_rows
from edgellm.engine.context import Context
from edgellm.engine.draft_policy import Choice, DraftPolicy, Evidence, Kind
from edgellm.engine.prompt_rows import SchedulingPolicy
from edgellm.engine.request import Request
from edgellm.engine.scheduler import OwnerCounters
from edgellm.engine.speculation import Speculation
from edgellm.engine.step_costs import StepCosts, StepLoad
from edgellm.engine.two_lanes import PrefillLane, TwoLaneBatcher
from edgellm.llm import LLM
from edgellm.options import EngineOptions
from edgellm.session import Session
from edgellm.store.bundle import Bundle


class FixedCosts(StepCosts):
    """Predicts for ever that a row takes so many seconds, so steps have the same rows anywhere."""

    def __init__(self, row: float, *, row_multiple: int = 1) -> None:
        super().__init__(row_multiple=row_multiple)
        self._row = row

    def seconds(self, load: StepLoad) -> float:
        return self._row * load.rows

    seconds_at_most = seconds

    def learn(self, load: StepLoad, seconds: float) -> None:
        pass


def batcher(llm: LLM) -> Any:
    """The object whose `step` computes; for helpers that wrap its methods."""
    return llm.engine.loop._batcher


def live(llm: LLM) -> list[Request]:
    """Requests in the hands of the loop, in the order in which they came."""
    return list(batcher(llm)._live.values())


def submitted(llm: LLM) -> list[Request]:
    """Requests that the next step takes in."""
    return list(batcher(llm)._submitted)


def running(llm: LLM) -> list[Request]:
    """Admitted requests, the last one admitted last."""
    return list(batcher(llm)._scheduler.running)


def waiting(llm: LLM) -> list[Request]:
    """Requests that are taken in and not admitted."""
    return list(batcher(llm)._scheduler.waiting)


def policy(llm: LLM) -> SchedulingPolicy:
    """The policy that the scheduler follows."""
    chosen: SchedulingPolicy = batcher(llm)._scheduler.policy
    return chosen


def set_costs(llm: LLM, row: float) -> None:
    """Have the scheduler believe that a row takes so many seconds, whatever is measured."""
    multiple = batcher(llm)._row_multiple
    batcher(llm)._scheduler.costs = FixedCosts(row, row_multiple=multiple)


def used_blocks(llm: LLM) -> int:
    """KV blocks that requests and sessions hold."""

    def count() -> int:
        llm.engine.cache.close_dropped()  # the command for it may be behind this one
        return llm.engine.cache.used_blocks

    return llm.engine.thread.call(count)


def cached_prefix(llm: LLM, tokens: Sequence[int]) -> int:
    """Tokens of a prompt that the KV cache holds, once all that was closed has been."""
    return llm.engine.thread.call(lambda: llm.engine.cache.cached_prefix(tokens))


def until_kept(llm: LLM) -> None:
    """Wait until all blocks of `kv_cache_dir` that there are to write have been written."""
    assert llm.engine.written is not None
    llm.engine.thread.catch_up()
    llm.engine.written.wait()


def sequences(llm: LLM) -> int:
    """Sequences of the cache."""
    return len(known_sequences(llm))


def known_sequences(llm: LLM) -> list[CachedSequence]:
    """Sequences of the cache, which are all that may hold blocks."""
    cache = llm.engine.cache
    # by type: `isinstance` asks each object, and some of them warn
    found = (each for each in gc.get_objects() if issubclass(type(each), CachedSequence))
    # without those whose making was interrupted
    return [each for each in found if getattr(each, "_cache", None) is cache]


def context(session: Session) -> Context:
    """Tokens of a session, and its place in the cache."""
    return session._context


def free_blocks(pool: Any) -> tuple[list[int], list[int]]:
    """Blocks of a pool that hold nothing, and those that only the prefix index knows."""
    return list(pool._free), list(pool._idle)


def most_siblings(index: Any) -> int:
    """Most blocks of a prefix index that go on from the same one."""
    return max(len(entries) for entries in index._children.values())


def watch_leaving(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, note: Callable[[Request], object]
) -> None:
    """Call `note` with each request that leaves the loop, in the order in which they end."""
    leave = batcher(llm).leave

    def leaving(request: Request) -> None:
        note(request)
        leave(request)

    monkeypatch.setattr(batcher(llm), "leave", leaving)


def watch_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, around: Callable[[Callable[[], None]], object]
) -> None:
    """Have `around(step)` called in the place of each step; it calls `step` itself.

    Readers have heard of the steps before, so that `around` may wait.
    """
    step = batcher(llm).step

    def watched(*, wake: Callable[[], object]) -> None:
        wake()
        around(partial(step, wake=wake))

    monkeypatch.setattr(batcher(llm), "step", watched)


def preempt_at(llm: LLM, monkeypatch: pytest.MonkeyPatch, which: Callable[[int], bool]) -> None:
    """Preempt all running requests after the steps whose numbers, from 0 on, `which` names."""
    steps = itertools.count()

    def preempting(step: Callable[[], None]) -> None:
        step()
        if which(next(steps)):
            for request in running(llm):
                request.preempt()

    watch_steps(llm, monkeypatch, preempting)


@contextmanager
def all_submitted(llm: LLM, count: int) -> Iterator[None]:
    """No step begins within the block, which ends when so many requests are submitted.

    Answers that threads ask for within are together in the loop for certain:

        with ThreadPoolExecutor(4) as pool:
            with all_submitted(llm, 4):
                answers = [pool.submit(llm.generate, text) for text in texts]
    """
    with paused(llm):
        yield
        until(lambda: len(submitted(llm)) == count)


def results(answers: Sequence[Future[Any]]) -> list[Any]:
    """What futures give; a hang ends at the tests' ceiling, not at one of its own."""
    return [answer.result() for answer in answers]


# What a test has the engine do.


def commands(llm: LLM) -> int:
    """Commands that the engine's thread has not run."""
    return len(llm.engine.thread._body.commands)


class Pause:
    """The engine's thread, in the hands of a test."""

    def __init__(self, llm: LLM) -> None:
        self._loop = llm.engine.loop
        self._turns: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        """Hold the thread up until `end`."""
        self._done.put(None)
        while self._turns.get():
            self._loop.step()
            self._loop.pause()
            self._done.put(None)

    def wait(self) -> None:
        """Wait until the thread is held up."""
        self._done.get()

    def step(self) -> None:
        """Have the thread make a step."""
        self._turns.put(True)
        self._done.get()

    def end(self) -> None:
        self._turns.put(False)


@contextmanager
def paused(llm: LLM) -> Iterator[Pause]:
    """No step begins within the block but by `Pause.step`, and no command runs."""
    pause = Pause(llm)
    llm.engine.thread.soon(pause.run)
    pause.wait()
    try:
        yield pause
    finally:
        pause.end()


def step_in_readers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a step made only while a reader waits, so that none runs ahead of its reader."""
    loop = llm.engine.loop
    has_work = type(loop).has_work.fget  # type: ignore[attr-defined]

    def waits(each: Any) -> bool:
        # readers with news are woken later
        watched = (reader.requests for reader in [*each._readers.values()])
        return any(not any(request.has_news for request in requests) for requests in watched)

    monkeypatch.setattr(
        type(loop),
        "has_work",
        property(lambda self: has_work(self) and (self is not loop or waits(self))),
    )


def readers(llm: LLM) -> int:
    """Readers that wait."""
    return len(llm.engine.loop._readers)


def end_thread(llm: LLM) -> None:
    """Have the engine's thread end, as no exception of a step does."""
    thread = llm.engine.thread
    thread._body.stopped = True
    thread.poke()
    thread._thread.join()


def is_resting(llm: LLM) -> bool:
    """Whether the engine's thread has nothing to do."""
    body = llm.engine.thread._body
    return not (body.busy or body.commands) and body.pokes.empty()


def fail_next_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Have the next step end in its middle, with an error that is no request's own."""

    take_in = batcher(llm)._take_in

    def broken() -> None:
        monkeypatch.setattr(batcher(llm), "_take_in", take_in)
        raise error

    monkeypatch.setattr(batcher(llm), "_take_in", broken)


def fail_last_text(request: Request, error: Exception) -> None:
    """Have an answer fail where its held back text is asked for."""
    request._answer.rest = Mock(side_effect=error)  # type: ignore[method-assign]


def draft_always(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Have every answer guess these tokens at every step."""
    choice = Choice(Evidence(Kind("lookup", 0.5, most=len(tokens))), len(tokens))
    monkeypatch.setattr(DraftPolicy, "choose", lambda *_, **__: choice)
    monkeypatch.setattr(Speculation, "_guess", lambda *_: list(tokens))


def draft_as(
    monkeypatch: pytest.MonkeyPatch, guess: Callable[[Sequence[int]], Sequence[int]]
) -> None:
    """Have every answer guess at every step, as many tokens as it may of what `guess` returns."""

    def choose(_: DraftPolicy, offers: object, *, most: int, company: int) -> Choice | None:
        kind = Kind("lookup", 0.5, most=63)
        return Choice(Evidence(kind), most, company) if most > 0 else None

    monkeypatch.setattr(DraftPolicy, "choose", choose)
    monkeypatch.setattr(Speculation, "_guess", lambda *given: [*guess(given[3])][: given[2]])


def draft_with(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """Have one drafter guess at every step, as many tokens as it may, whatever is measured."""

    def choose(
        _: DraftPolicy, offers: Sequence[Evidence], *, most: int, company: int
    ) -> Choice | None:
        named = (each for each in offers if each.kind.drafter == drafter)
        offer = next(named, None)
        return None if offer is None else Choice(offer, min(offer.kind.most, most), company)

    monkeypatch.setattr(DraftPolicy, "choose", choose)
    monkeypatch.setattr(DraftPolicy, "drafted", lambda *_, **__: None)


def drafts_of(llm: LLM) -> Any:
    """A loaded model's draft model, in the place of a model for `used_blocks`."""
    draft = llm.engine.draft_model
    assert draft is not None
    return SimpleNamespace(engine=SimpleNamespace(cache=draft.cache, thread=llm.engine.thread))


def lane(llm: LLM) -> PrefillLane:
    """The lane of a model whose prompts are computed beside decode."""
    two_lanes = batcher(llm)
    assert isinstance(two_lanes, TwoLaneBatcher)
    return two_lanes._lane


def lane_is_empty(llm: LLM) -> bool:
    """Whether no prompt is in the lane."""
    return lane(llm)._run is None


# Parts of the engine by themselves.


def remembered(owners: OwnerCounters) -> dict[str, float]:
    """Owners that have a count, and how much each was served."""
    return dict(owners._served)


def ignore_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all requests ranked by the policy alone."""
    monkeypatch.setattr(prompt_rows, "_in_turns", lambda ranked, _: ranked)
    monkeypatch.setattr(OwnerCounters, "of", lambda *_: 0.0)


def play_provider(
    monkeypatch: pytest.MonkeyPatch, name: str, *, like: str, bundle: Bundle, options: EngineOptions
) -> None:
    """Have a provider been measured, and found as fast as another one that was."""
    measured = dict(auto_backend._known(bundle, options))[like]
    monkeypatch.setattr(auto_backend, "_known", lambda *_: [(name, measured)])
