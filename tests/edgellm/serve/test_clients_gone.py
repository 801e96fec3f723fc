"""Clients that go away while their requests wait, in their prompts and in their answers: what those
held is there for others after one step, and nothing of them stays."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import inspection
import pytest
from remains import remains, until_remains
from requirements import unavailable
from serving import LONG, PATH, Running, chat, running, served, words
from stepping import Turnstile, asking, blocks_of
from waiting import CEILING_S, until

from edgellm.backends.batch import Rows, Span
from edgellm.engine.request import Request
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import load
from edgellm.serve import ModelPool, ServeOptions

CTX = 8 * BLOCK
FULL = words(1, 896)  # takes the room of a whole context
Serve = Callable[..., tuple[Running, Turnstile]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serves a model with a pool of so many blocks; a prompt alone has 150 rows of each step."""
    if library() is None:
        unavailable("native", "needs the native kernels")
    with ExitStack() as stack:

        def start(
            folder: Path, *, blocks: int = 8, scheduling: Any = "stall_free", **options: Any
        ) -> tuple[Running, Turnstile]:
            cache = {"ctx_size": CTX, "cache_size": blocks * BLOCK}
            native = {"prefill": "native", "decode": "native"}
            llm = load(str(folder), scheduling=scheduling, **cache, **native)  # type: ignore[arg-type]
            inspection.set_costs(llm, 1e-3)
            chosen = ServeOptions(port=0, grace_s=1, **options)
            server = stack.enter_context(running(ModelPool([served(llm)]), llm, chosen))
            turnstile = Turnstile(llm, monkeypatch)
            stack.callback(assert_nothing_is_left, server)
            stack.callback(turnstile.open)
            return server, turnstile

        yield start


def assert_nothing_is_left(server: Running) -> None:
    llm, metrics = server.llm, server.answering.metrics
    until(lambda: server.deserted)
    assert inspection.running(llm) == inspection.waiting(llm) == []
    for group in llm.engine.cache.groups:
        assert group.pool.available == group.blocks.count
    assert metrics.waiting == metrics.running == server.limits.tokens == 0


def until_gone(requests: Sequence[Request]) -> None:
    """Wait until the server has noticed that their clients are."""
    until(lambda: all(request.withdrawn for request in requests))


# One step.


@pytest.mark.parametrize("taken_in", [True, False])
def test_in_the_queue_without_room(tiny_model: Path, serve: Serve, taken_in: bool) -> None:
    """Its place in the queue is free at once, and the one that has the room goes on."""
    server, turnstile = serve(tiny_model, max_waiting=1)
    metrics = server.answering.metrics
    with asking(server, PATH, [chat(FULL, stream=True, **LONG)]):
        turnstile.step_until(lambda: turnstile.places() == ["answer"])
        (first,) = turnstile.requests
        with asking(server, PATH, [chat(words(2, 300), **LONG)]):
            until(lambda: len(turnstile.submitted) == 1)
            gone = turnstile.submitted[0]
            if taken_in:
                turnstile.take_in(1)
                assert turnstile.places() == ["answer", "queue"]
            assert metrics.waiting == 1
            assert server.post(PATH, chat("hi", max_tokens=1)).status_code == 503
        until_gone([gone])
        until(lambda: metrics.waiting == 0)
        assert turnstile.step() == (1, blocks_of(first))
        assert not first.withdrawn
        with asking(server, PATH, [chat("hi", **LONG)]):
            until(lambda: len(turnstile.submitted) == 1)  # no 503


def test_in_the_queue_after_a_preemption(tiny_model: Path, serve: Serve) -> None:
    """It has begun to answer, and has given its blocks back."""
    server, turnstile = serve(tiny_model)
    long = [chat(words(seed, 440), stream=True, **LONG) for seed in (1, 2)]
    with asking(server, PATH, long[:1]):
        (first,) = turnstile.take_in(1)
        with asking(server, PATH, long[1:]):
            (gone,) = turnstile.take_in(1)
            turnstile.step_until(
                lambda: len(gone.tokens) > 500 and turnstile.places() == ["answer", "queue"]
            )
            assert gone.stats().preempted == 1
        until_gone([gone])
        assert turnstile.step() == (1, blocks_of(first))


def test_in_the_queue_for_a_prefix_that_another_one_computes(
    tiny_model: Path, serve: Serve
) -> None:
    server, turnstile = serve(tiny_model, blocks=32)
    with asking(server, PATH, [chat(FULL, **LONG)]):
        (first,) = turnstile.take_in(1)
        with asking(server, PATH, [chat(FULL, priority=1, **LONG)]):
            (gone,) = turnstile.take_in(1)
            assert turnstile.places() == ["prompt", "queue"]
            assert server.llm.engine.loop.counts.waited_for_prefix == 1
        until_gone([gone])
        assert turnstile.step() == (1, blocks_of(first))


@pytest.mark.parametrize(
    ("place", "stream", "n"),
    [("prompt", True, 3), ("prompt", False, 1), ("answer", True, 1), ("answer", False, 3)],
)
def test_in_a_prompt_or_an_answer(
    tiny_model: Path, serve: Serve, place: str, stream: bool, n: int
) -> None:
    server, turnstile = serve(tiny_model, blocks=32)
    places = [place] * (n if place == "answer" else 1)  # the others begin where the prompt ends
    with asking(server, PATH, [chat(FULL, n=n, stream=stream, **LONG)]):
        (first,) = turnstile.take_in(1)
        turnstile.step_until(lambda: first.computed > 300 and turnstile.places() == places)
        gone = [*turnstile.requests, *first.forks]
        assert len(gone) == n
        assert server.llm.engine.cache.used_blocks > 2
    until_gone(gone)
    assert turnstile.step() == (0, 0)


def test_while_rows_rest_between_two_layers(deep_model: Path, serve: Serve) -> None:
    server, turnstile = serve(deep_model, blocks=32, scheduling="layered")
    with asking(server, PATH, [chat("hi", stream=True, **LONG)]):
        (first,) = turnstile.take_in(1)
        turnstile.step_until(lambda: turnstile.places() == ["answer"])
        with asking(server, PATH, [chat(FULL, **LONG)]):
            (gone,) = turnstile.take_in(1)
            turnstile.step_until(lambda: gone.underway is not None)
            assert blocks_of(gone) > 2
        until_gone([gone])
        assert turnstile.step() == (1, blocks_of(first))


def test_in_the_middle_of_a_step(
    tiny_model: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before its next layer, and no step follows."""
    server, turnstile = serve(tiny_model)
    backend, counts = server.llm.engine.prefill, server.llm.engine.loop.counts
    run, in_step = backend.run, threading.Event()
    with asking(server, PATH, [chat(FULL, stream=True, **LONG)]):
        (gone,) = turnstile.take_in(1)
        computed = counts.prefill_rows
        assert computed == gone.computed > 100

        def held(spans: Sequence[Span], **options: Any) -> list[Rows]:
            in_step.set()
            until_gone([gone])
            return run(spans, **options)

        monkeypatch.setattr(backend, "run", held)
        turnstile.let()
        assert in_step.wait(CEILING_S)
    until(lambda: not turnstile.requests)
    assert inspection.used_blocks(server.llm) == 0
    assert counts.prefill_rows == computed


# A thousand times.


def gone_from_the_queue(server: Running, turnstile: Turnstile, *, count: int, seed: int) -> None:
    """Twenty at once, while another one has all the room; a token of its answer for each step."""
    with asking(server, PATH, [chat(words(seed, 896), stream=True, **LONG)]):
        turnstile.step_until(lambda: turnstile.places() == ["answer"])
        (first,) = turnstile.requests
        for round_ in range(count // 20):
            bodies = [
                chat(words(seed + 20 * round_ + i, 5 + 40 * i), stream=i % 3 > 0, **LONG)
                for i in range(20)
            ]
            with asking(server, PATH, bodies):
                gone = turnstile.take_in(20)
                assert turnstile.places() == ["answer"] + ["queue"] * 20
            until_gone(gone)
            assert turnstile.step() == (1, blocks_of(first))
        until(lambda: turnstile.waits)  # else it may leave between two steps, and none follows
    until_gone([first])
    assert turnstile.step() == (0, 0)


def gone_from_a_prompt(server: Running, turnstile: Turnstile, *, count: int, seed: int) -> None:
    for i in range(count):
        with asking(server, PATH, [chat(words(seed + i, 890), stream=i % 3 > 0, **LONG)]):
            gone = turnstile.take_in(1)
            for _ in range(i % 5):
                turnstile.step()
            until(lambda: turnstile.waits)
            assert turnstile.places() == ["prompt"]
            assert gone[0].computed >= 100 * (1 + i % 5)
        until_gone(gone)
        assert turnstile.step() == (0, 0)


def gone_from_an_answer(server: Running, turnstile: Turnstile, *, count: int, seed: int) -> None:
    """Eight at once."""
    for round_ in range(count // 8):
        bodies = [
            chat(words(seed + 8 * round_ + i, 5 + 9 * i), stream=i % 3 > 0, **LONG)
            for i in range(8)
        ]
        with asking(server, PATH, bodies):
            gone = turnstile.take_in(8)
            turnstile.step_until(lambda: turnstile.places() == ["answer"] * 8)
        until_gone(gone)
        assert turnstile.step() == (0, 0)


GONE = {
    "queue": gone_from_the_queue,
    "prompt": gone_from_a_prompt,
    "answer": gone_from_an_answer,
}


def left(server: Running, turnstile: Turnstile) -> Counter[str]:
    """What there is once no request is known any more."""

    def forgotten() -> bool:
        if turnstile.waits:
            turnstile.step()
        gc.collect()
        return server.connections == inspection.sequences(server.llm) == 0

    until(forgotten)
    return remains()


@pytest.mark.parametrize(
    ("count", "place"),
    [
        (4, "answer"),
        *(pytest.param(40, place, marks=pytest.mark.slow) for place in GONE),
        pytest.param(1000, "answer", marks=pytest.mark.slow),
    ],
)
def test_many_leave_nothing(tiny_model: Path, serve: Serve, place: str, count: int) -> None:
    server, turnstile = serve(tiny_model)
    GONE[place](server, turnstile, count=max(4, count // 5), seed=0)
    before = left(server, turnstile)
    GONE[place](server, turnstile, count=count, seed=10_000)
    left(server, turnstile)
    until_remains(before)
