"""The tests' only way to what the engine keeps private. When the engine changes, this file does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from waiting import until

from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.engine import auto_prefill
from edgellm.engine.bell import Bell
from edgellm.engine.context import Context
from edgellm.engine.owners import OwnerCounters
from edgellm.engine.policies import SchedulingPolicy
from edgellm.engine.prefill_lane import PrefillLane
from edgellm.engine.prompt_rows import PromptRows
from edgellm.engine.request import Request
from edgellm.engine.speculation import Speculation
from edgellm.engine.step_costs import StepCosts, StepLoad
from edgellm.engine.two_lanes import TwoLaneBatcher
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
    with llm.engine.lock, llm.engine.cache.change():
        return llm.engine.cache.used_blocks


def until_kept(llm: LLM) -> None:
    """Wait until all blocks of `kv_cache_dir` that there are to write have been written."""
    assert llm.engine.written is not None
    llm.engine.written.wait()


def sequences(llm: LLM) -> int:
    """Sequences that the cache knows."""
    return len(llm.engine.cache._changes._sequences)


def known_sequences(llm: LLM) -> list[CachedSequence]:
    """Sequences that the cache knows, which are all that may hold blocks."""
    return list(llm.engine.cache._changes._sequences.values())


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
    """Have `around(step)` called in the place of each step; it calls `step` itself."""
    step = batcher(llm).step
    monkeypatch.setattr(batcher(llm), "step", lambda: around(step))


@contextmanager
def all_submitted(llm: LLM, count: int) -> Iterator[None]:
    """No step begins within the block, which ends when so many requests are submitted.

    Answers that threads ask for within are together in the loop for certain:

        with ThreadPoolExecutor(4) as pool:
            with all_submitted(llm, 4):
                answers = [pool.submit(llm.generate, text) for text in texts]
    """
    with llm.engine.lock:
        yield
        until(lambda: len(submitted(llm)) == count)


def results(answers: Sequence[Future[Any]]) -> list[Any]:
    """What futures give; a hang ends at the tests' ceiling, not at one of its own."""
    return [answer.result() for answer in answers]


# What a test has the engine do.


def step(llm: LLM) -> None:
    """Make a step in this thread, which has the engine's lock and keeps it."""
    loop = llm.engine.loop
    loop._step(lambda: False)
    loop._bell.ring()


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
    monkeypatch.setattr(Speculation, "_guess", lambda *_: list(tokens))


def pump_runs(llm: LLM) -> bool:
    """Whether there is a thread that steps for readers of asyncio."""
    return llm.engine.pump._thread is not None


def lane(llm: LLM) -> PrefillLane:
    """The lane of a model whose prompts are computed beside decode."""
    two_lanes = batcher(llm)
    assert isinstance(two_lanes, TwoLaneBatcher)
    return two_lanes._lane


def lane_is_empty(llm: LLM) -> bool:
    """Whether no prompt is in the lane."""
    return lane(llm)._job is None


# Parts of the engine by themselves.


def set_patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have threads at a bell look by themselves after so many seconds."""
    monkeypatch.setattr("edgellm.engine.bell._PATIENCE", seconds)


def mock_waiters(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The queue that threads at a bell wait with, which has no thread wait."""
    made = Mock()
    monkeypatch.setattr("edgellm.engine.bell._Waiter", lambda: made)
    return made


def threads_at(bell: Bell) -> int:
    return len(bell._waiting)


def bell(llm: LLM) -> Bell:
    """The bell at which readers wait for another one's step."""
    return llm.engine.loop._bell


def remembered(owners: OwnerCounters) -> dict[str, float]:
    """Owners that have a count, and how much each was served."""
    return dict(owners._served)


def ignore_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all requests ranked by the policy alone."""
    monkeypatch.setattr(PromptRows, "_in_turns", lambda _, ranked: ranked)
    monkeypatch.setattr(OwnerCounters, "of", lambda *_: 0.0)


def play_provider(
    monkeypatch: pytest.MonkeyPatch, name: str, *, like: str, bundle: Bundle, options: EngineOptions
) -> None:
    """Have a provider been measured, and found as fast as another one that was."""
    measured = dict(auto_prefill._known(bundle, options))[like]
    monkeypatch.setattr(auto_prefill, "_known", lambda *_: [(name, measured)])
