"""The tests' only way to what the engine keeps private. When the engine changes, this file does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from waiting import until

from edgellm.engine.policies import SchedulingPolicy
from edgellm.engine.request import Request
from edgellm.engine.step_costs import StepCosts, StepLoad
from edgellm.llm import LLM


class FixedCosts(StepCosts):
    """Predicts for ever that a row takes so many seconds, so steps have the same rows anywhere."""

    def __init__(self, row: float) -> None:
        super().__init__()
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
    batcher(llm)._scheduler.costs = FixedCosts(row)


def used_blocks(llm: LLM) -> int:
    """KV blocks that requests and sessions hold."""
    with llm.engine.lock, llm.engine.cache.change():
        return llm.engine.cache.used_blocks


def until_kept(llm: LLM) -> None:
    """Wait until all blocks of `kv_cache_dir` that there are to write have been written."""
    disk: Any = llm.engine.cache.disk
    until(lambda: not disk.busy)


def sequences(llm: LLM) -> int:
    """Sequences that the cache knows."""
    return len(llm.engine.cache._changes._sequences)


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
