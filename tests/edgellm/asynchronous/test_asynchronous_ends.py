"""Answers with asyncio that end early: cancelled, out of time, left, interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import waiting
from asynchronous_checks import LONG, REQUESTS, is_idle, turns, until
from inspection import is_resting, live, readers, used_blocks, watch_steps
from loops import Gate, alone, assert_same, prompt

from edgellm import BatchRequest, Completion
from edgellm.llm import LLM


def test_cancelled_at_any_step(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they wait, are in prefill, or decode; the others do not notice."""
    expected, cancelled = alone(tiny, REQUESTS[:5]), dict[int, asyncio.Task[Completion]]()

    async def all_of_them() -> None:
        event_loop, steps = asyncio.get_running_loop(), iter(range(1, 10**9))

        def around(step: Callable[[], None]) -> None:
            task = cancelled.get(next(steps))
            if task is not None:
                event_loop.call_soon_threadsafe(task.cancel)
                event_loop.call_soon_threadsafe(task.cancel)  # which changes nothing
            step()

        watch_steps(tiny, monkeypatch, around)
        for i, at in enumerate((1, 2, 3, 5, 8, 13, 21)):
            tokens = prompt(100 + at, (5, 400, 130)[i % 3])
            cancelled[at] = asyncio.create_task(tiny.agenerate(tokens, **LONG))
        answers = asyncio.gather(*(tiny.agenerate(t, **o) for t, o in REQUESTS[:5]))
        assert_same(await answers, expected)
        await asyncio.wait(cancelled.values())
        await until(lambda: is_idle(tiny))

    asyncio.run(all_of_them())
    assert all(task.cancelled() for task in cancelled.values())


@pytest.mark.slow
def test_fifty_cancelled_at_random(tiny: LLM) -> None:
    rng, expected = random.Random(1), alone(tiny, REQUESTS[:5])

    async def one(i: int) -> None:
        task = asyncio.create_task(tiny.agenerate(prompt(100 + i, rng.randint(2, 900)), **LONG))
        await asyncio.sleep(rng.random() * 0.2)
        task.cancel()
        if i % 5 == 0:
            task.cancel("again")
        with contextlib.suppress(asyncio.CancelledError):
            assert (await task).finish_reason == "length"  # it was over

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for i in range(50):
                group.create_task(one(i))
            answers = [group.create_task(tiny.agenerate(t, **o)) for t, o in REQUESTS[:5]]
        assert_same([answer.result() for answer in answers], expected)
        await until(lambda: is_idle(tiny))

    asyncio.run(all_of_them())


def test_cancelled_while_a_text_is_encoded(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(tiny.engine.tokenizer, "encode", monkeypatch)

    async def cancelled() -> None:
        task = asyncio.create_task(tiny.agenerate("Hello", **LONG))
        await until(gate.reached.is_set)
        task.cancel()
        await turns()
        task.cancel()
        await turns()
        assert not task.done()  # the context is not left to a thread that still changes it
        gate.opened.set()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(cancelled())


def test_a_timeout_ends_a_long_prompt(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tiny.engine.loop.counts.prefill_rows

    async def answer() -> None:
        event_loop = asyncio.get_running_loop()

        def around(step: Callable[[], None]) -> None:
            if tiny.engine.loop.counts.prefill_rows > rows and live(tiny):
                event_loop.call_soon_threadsafe(timeout.reschedule, event_loop.time())
                waiting.until(lambda: all(each.withdrawn for each in live(tiny)))
            step()

        watch_steps(tiny, monkeypatch, around)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as timeout:
                await tiny.agenerate(prompt(77, 900), max_tokens=1)
        await until(lambda: is_idle(tiny))

    asyncio.run(answer())
    assert readers(tiny) == 0
    assert 0 < tiny.engine.loop.counts.prefill_rows - rows <= 150  # of a step


def test_leaving_a_loop_withdraws_the_answer(tiny: LLM) -> None:
    counts = tiny.engine.loop.counts

    async def leave_a_stream() -> None:
        async for _ in tiny.astream(prompt(1, 40), **LONG):
            break
        await until(lambda: is_idle(tiny))

    async def leave_a_batch() -> None:
        last = BatchRequest(prompt=prompt(9, 40), options=tiny.generation_options(max_tokens=1))
        prompts = [*(prompt(i, 40) for i in range(8)), last]
        answers = tiny.abatch(prompts, **LONG)
        async for answer in answers:
            assert answer.index == 8
            break
        await answers.aclose()
        await until(lambda: is_idle(tiny))

    # a reader has at most 64 pieces that it has not taken, and took some
    for leave, most in ((leave_a_stream, 100), (leave_a_batch, 8 * 200)):
        rows = counts.decode_rows
        asyncio.run(leave())
        assert counts.decode_rows - rows < most


def test_a_stopped_reader_holds_nobody_up_and_no_memory(tiny: LLM) -> None:
    async def readers() -> int:
        rows = tiny.engine.loop.counts.decode_rows
        stopped = tiny.astream(prompt(1, 40), **LONG)
        await anext(stopped)
        await until(lambda: is_resting(tiny))  # unread, but for 64 pieces
        assert tiny.engine.loop.counts.decode_rows - rows < 100
        other = await tiny.agenerate(prompt(2, 40), **{**LONG, "max_tokens": 300})
        assert len(other.tokens) == 300
        assert tiny.engine.loop.counts.decode_rows - rows < 500
        return len([piece async for piece in stopped])

    assert asyncio.run(readers()) >= 899


def test_an_event_loop_that_was_closed(tiny: LLM) -> None:
    event_loop = asyncio.new_event_loop()
    stream = tiny.astream(prompt(1, 40), **LONG)
    assert event_loop.run_until_complete(anext(stream)).token is not None
    event_loop.run_until_complete(event_loop.shutdown_default_executor())
    event_loop.close()
    del stream
    assert tiny.generate(prompt(2, 40), max_tokens=3, ignore_eos=True).tokens


def test_an_event_loop_whose_thread_has_ended(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can cancel what it waited for, so nothing is computed for it."""
    event_loop, asked = asyncio.new_event_loop(), list[asyncio.Task[Completion]]()
    rows = tiny.engine.loop.counts.prefill_rows

    def begin() -> None:
        asked.append(event_loop.create_task(tiny.agenerate(prompt(78, 900), max_tokens=1)))
        event_loop.run_forever()

    def around(step: Callable[[], None]) -> None:
        if thread.is_alive():
            waiting.until(lambda: readers(tiny) == 1)
            event_loop.call_soon_threadsafe(event_loop.stop)
            thread.join()
        step()

    watch_steps(tiny, monkeypatch, around)
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    asyncio.run(until(lambda: is_idle(tiny)))
    assert readers(tiny) == 0
    assert tiny.engine.loop.counts.prefill_rows == rows
    asked[0].cancel()
    event_loop.run_until_complete(asyncio.wait(asked))
    event_loop.run_until_complete(event_loop.shutdown_default_executor())
    event_loop.close()


@pytest.mark.skipif(os.name != "posix", reason="sends a signal to itself")
def test_ctrl_c_leaves_the_model_usable(tiny: LLM) -> None:
    async def interrupted() -> None:
        count = 0
        async for _ in tiny.astream(prompt(1, 40), **LONG):
            count += 1
            if count == 5:
                os.kill(os.getpid(), signal.SIGINT)

    expected = tiny.generate(prompt(2, 40), temperature=0, max_tokens=9)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    assert used_blocks(tiny) == 0
    assert_same([tiny.generate(prompt(2, 40), temperature=0, max_tokens=9)], [expected])


def test_no_thread_but_the_engine_s_and_none_that_outlives_the_program(tiny: LLM) -> None:
    """The second stream is never closed, and its event loop neither."""
    code = f"""
import asyncio, sys, threading
import edgellm
assert "asyncio" not in sys.modules
llm = edgellm.load({str(tiny.engine.bundle.path)!r})
llm.generate("Hello", max_tokens=2)
assert [t.name for t in threading.enumerate()] == ["MainThread", "edgellm-engine"]
assert not {{"jinja2", "multiprocessing", "onnxruntime"}} & set(sys.modules)
asyncio.run(llm.agenerate("Hello", max_tokens=2))
event_loop = asyncio.new_event_loop()
stream = llm.astream("Hello", max_tokens=400, ignore_eos=True)
print(event_loop.run_until_complete(anext(stream)).token is not None)
"""
    code = code.replace("import asyncio, sys", "import sys").replace(
        "\nasyncio.run", "\nimport asyncio\nasyncio.run"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
