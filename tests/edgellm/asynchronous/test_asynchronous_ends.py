"""Answers with asyncio that end early: cancelled, out of time, left, interrupted."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from asynchronous_checks import (
    LONG,
    REQUESTS,
    Gate,
    live_requests,
    prompt,
    same,
    until,
    used_blocks,
)

from edgellm.llm import LLM


def test_fifty_cancelled_at_random(tiny: LLM) -> None:
    """While they are encoded, wait, are in prefill, or decode; the others do not notice."""
    rng = random.Random(1)
    expected = [tiny.generate(tokens, **options) for tokens, options in REQUESTS[:5]]

    async def one(i: int) -> str:
        tokens = prompt(100 + i, rng.randint(2, 900))
        task = asyncio.create_task(tiny.agenerate(tokens, **LONG))
        await asyncio.sleep(rng.random() * 0.2)
        task.cancel()
        if i % 5 == 0:
            task.cancel("again")
        with pytest.raises(asyncio.CancelledError):
            await task
        return "cancelled"

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(i)) for i in range(50)]
            answers = [group.create_task(tiny.agenerate(t, **o)) for t, o in REQUESTS[:5]]
        assert [task.result() for task in tasks] == ["cancelled"] * 50
        assert same([answer.result() for answer in answers], expected)
        await until(lambda: live_requests(tiny) == 0 and used_blocks(tiny) == 0)

    asyncio.run(all_of_them())


def test_cancelled_while_a_text_is_encoded(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(tiny.engine.tokenizer, "encode", monkeypatch)

    async def cancelled() -> None:
        task = asyncio.create_task(tiny.agenerate("Hello", **LONG))
        await until(gate._called.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()  # the context is not left to a thread that still changes it
        gate._open.set()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(cancelled())


def test_a_timeout_ends_a_long_prompt(llm: LLM) -> None:
    text = "One two three four five six seven eight nine ten. " * 350

    async def answer() -> float:
        start = time.perf_counter()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await llm.agenerate(text, max_tokens=1)
        await until(lambda: live_requests(llm) == 0)
        return time.perf_counter() - start

    rows = llm.engine.loop.counts.prefill_rows
    asyncio.run(answer())
    assert llm.engine.loop.counts.prefill_rows - rows < len(llm.engine.tokenizer.encode(text)) / 2


def test_leaving_a_loop_withdraws_the_answer(tiny: LLM) -> None:
    async def leave() -> None:
        async for _ in tiny.astream(prompt(1, 40), **LONG):
            break
        await until(lambda: live_requests(tiny) == 0 and used_blocks(tiny) == 0)
        answers = tiny.abatch([prompt(i, 40) for i in range(9)], **{**LONG, "max_tokens": 300})
        async for answer in answers:
            assert answer.completion is not None
            break
        await answers.aclose()
        await until(lambda: live_requests(tiny) == 0 and used_blocks(tiny) == 0)

    rows = tiny.engine.loop.counts.decode_rows
    asyncio.run(leave())
    assert tiny.engine.loop.counts.decode_rows - rows < 900 + 9 * 300


def test_a_stopped_reader_holds_nobody_up_and_no_memory(tiny: LLM) -> None:
    async def readers() -> int:
        rows = tiny.engine.loop.counts.decode_rows
        stopped = tiny.astream(prompt(1, 40), **LONG)
        await anext(stopped)
        # unread, but for 64 pieces: then there is nothing to do, and so no thread
        await until(lambda: tiny.engine.pump._thread is None)
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


def test_an_event_loop_whose_thread_has_ended(llm: LLM) -> None:
    """Nobody can cancel what it waited for, so nothing is computed for it."""
    event_loop = asyncio.new_event_loop()
    text = "Ten nine eight seven six five four three two one. " * 350
    rows = llm.engine.loop.counts.prefill_rows
    waiting = []

    def begin() -> None:
        waiting.append(event_loop.create_task(llm.agenerate(text, max_tokens=1)))
        event_loop.call_later(0.3, event_loop.stop)
        event_loop.run_forever()

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    asyncio.run(until(lambda: live_requests(llm) == 0))
    assert llm.engine.loop.counts.prefill_rows - rows < len(llm.engine.tokenizer.encode(text)) / 2
    event_loop.run_until_complete(asyncio.wait(waiting, timeout=0))
    waiting[0].cancel()
    event_loop.run_until_complete(asyncio.wait(waiting))
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
    assert same([tiny.generate(prompt(2, 40), temperature=0, max_tokens=9)], [expected])


def test_no_thread_before_it_is_needed_and_none_that_outlives_the_program(tiny: LLM) -> None:
    """The second stream is never closed, and its event loop neither."""
    code = f"""
import asyncio, sys, threading
import edgellm
assert "asyncio" not in sys.modules
llm = edgellm.load({str(tiny.engine.bundle.path)!r})
llm.generate("Hello", max_tokens=2)
assert threading.active_count() == 1
assert not {{"jinja2", "multiprocessing", "onnxruntime"}} & set(sys.modules)
asyncio.run(llm.agenerate("Hello", max_tokens=2))
event_loop = asyncio.new_event_loop()
stream = llm.astream("Hello", max_tokens=400, ignore_eos=True)
print(event_loop.run_until_complete(anext(stream)).token is not None)
"""
    code = code.replace("import asyncio, sys", "import sys").replace(
        "\nasyncio.run", "\nimport asyncio\nasyncio.run"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
