"""Answers with asyncio: the same ones, in a loop that nothing blocks, and nothing left behind."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import Chat, Completion, OptionError, Piece, Session
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 900, "ignore_eos": True}


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


# Of each answer: its prompt's tokens, and how they are answered.
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (
        prompt(i % 23, (5, 60, 130, 300, 513, 40)[i % 6] + i),
        {"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 4 + 5 * (i % 7)},
    )
    for i in range(30)
]


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    llm = load(str(tiny_model), ctx_size=8 * BLOCK, cache_size=64 * BLOCK)
    if not llm.engine.decoder.exact_rows:
        pytest.skip("needs the native kernels")
    return llm


@pytest.fixture(autouse=True)
def nothing_is_left(tiny: LLM) -> Iterator[None]:
    """No test leaves a thread, an answer that is on its way, or a block that somebody holds."""
    threads = set(threading.enumerate())
    yield
    assert_no_thread_is_left(threads)
    assert live_requests(tiny) == 0
    assert used_blocks(tiny) == 0


def assert_no_thread_is_left(before: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)  # the pump may be in its last step
        assert not thread.is_alive(), thread


def used_blocks(llm: LLM) -> int:
    with llm.engine.lock, llm.engine.cache.change():
        return llm.engine.cache.used_blocks


def live_requests(llm: LLM) -> int:
    return len(llm.engine.loop._batcher._live)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> bool:
    return [(a.tokens, a.logprobs, a.text, a.finish_reason) for a in ours] == [
        (a.tokens, a.logprobs, a.text, a.finish_reason) for a in theirs
    ]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (LLM, "generate"),
        (LLM, "stream"),
        (LLM, "batch"),
        (Session, "generate"),
        (Session, "stream"),
        (Chat, "send"),
        (Chat, "stream"),
        (Chat, "regenerate"),
    ],
)
def test_the_twins_take_the_same(owner: type, name: str) -> None:
    sync, twin = (inspect.signature(getattr(owner, n)) for n in (name, f"a{name}"))
    assert list(sync.parameters.values()) == list(twin.parameters.values())


def test_thirty_answers_together_are_as_alone(tiny: LLM) -> None:
    expected = [tiny.generate(tokens, **options) for tokens, options in REQUESTS]
    steps = tiny.engine.loop.counts.steps

    async def together() -> list[Completion]:
        return await asyncio.gather(*(tiny.agenerate(t, **options) for t, options in REQUESTS))

    assert same(asyncio.run(together()), expected)
    alone = sum(len(answer.tokens) for answer in expected)
    assert tiny.engine.loop.counts.steps - steps < alone / 2
    assert same(asyncio.run(together()), expected)  # in an event loop of its own


def test_lists_and_several_answers(tiny: LLM) -> None:
    options: dict[str, Any] = {"seed": 5, "max_tokens": 9}
    texts = ["One two", "Three", "Four five six"]

    async def answers() -> None:
        assert same(await tiny.agenerate(texts, **options), tiny.generate(texts, **options))
        three = await tiny.agenerate("One two", n=3, **options)
        assert same(three, tiny.generate("One two", n=3, **options))
        (only,) = await tiny.agenerate("One two", n=1, **options)
        assert same([only], [await tiny.agenerate("One two", **options)])

    asyncio.run(answers())


def test_a_batch_comes_as_it_finishes(tiny: LLM) -> None:
    prompts = ("Count" if i else [1, 2, 10**6] for i in range(300))

    async def answers() -> list[tuple[int, bool]]:
        batch = tiny.abatch(prompts, max_tokens=3, temperature=0)
        return [(answer.index, answer.error is None) async for answer in batch]

    indices = asyncio.run(answers())
    assert sorted(indices) == [(0, False), *((i, True) for i in range(1, 300))]


def test_a_chat_has_the_same_turns(tiny_chat: LLM) -> None:
    chats = [tiny_chat.chat(temperature=0, max_tokens=20, ignore_eos=True) for _ in range(2)]

    async def turns() -> list[Completion]:
        chat = chats[0]
        pieces = [piece async for piece in chat.astream("Hello")]
        again = [piece async for piece in chat.aregenerate()]
        assert [p.token for p in again] == [p.token for p in pieces]
        return [await chat.asend("And you?"), await chat.asend("Why?")]

    found = asyncio.run(turns())
    chats[1].send("Hello")
    assert same(found, [chats[1].send("And you?"), chats[1].send("Why?")])
    assert chats[0].messages == chats[1].messages
    assert chats[0].stats is not None
    for chat in chats:
        chat.close()


@pytest.fixture(scope="module")
def tiny_chat(tiny: LLM) -> LLM:
    from edgellm.text.template import ChatTemplate

    if tiny.engine.template is None:
        source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        tiny.engine.template = ChatTemplate(source, bos=None, eos=None)
    return tiny


def test_a_chat_keeps_what_was_taken_of_an_answer(tiny_chat: LLM) -> None:
    chat = tiny_chat.chat(**LONG)

    async def stop_early() -> list[Piece]:
        taken = []
        async with aclosing(chat.astream("Hello")) as pieces:
            async for piece in pieces:
                taken.append(piece)
                if len(taken) == 5:
                    await asyncio.sleep(0.05)  # the answer goes on meanwhile
                    break
        assert live_requests(tiny_chat) <= 1
        assert (await chat.asend("Go on", max_tokens=3)).finish_reason == "length"
        return taken

    taken = asyncio.run(stop_early())
    assert chat.messages[1].content == "".join(piece.text for piece in taken)
    assert [message.role for message in chat.messages] == ["user", "assistant"] * 2
    chat.close()


def test_two_questions_at_once_are_one_too_many(tiny_chat: LLM) -> None:
    chat = tiny_chat.chat(**LONG)

    async def both() -> list[Completion | BaseException]:
        sends = (chat.asend(text, max_tokens=20) for text in ("One", "Two"))
        return await asyncio.gather(*sends, return_exceptions=True)

    answers = asyncio.run(both())
    (refused,) = [answer for answer in answers if isinstance(answer, BaseException)]
    assert isinstance(refused, OptionError)
    assert "already answering" in str(refused)
    assert [message.role for message in chat.messages] == ["user", "assistant"]
    chat.close()


def test_a_session_goes_on(tiny: LLM) -> None:
    async def answers() -> tuple[int, ...]:
        with tiny.session() as session:
            session.append(prompt(1, 50))
            first = await session.agenerate(temperature=0, max_tokens=5, ignore_eos=True)
            rest = [p.token async for p in session.astream(**{**LONG, "max_tokens": 7})]
            return (*first.tokens, *(token for token in rest if token is not None))

    expected = tiny.generate(prompt(1, 50), temperature=0, max_tokens=12, ignore_eos=True)
    assert asyncio.run(answers()) == expected.tokens


def test_errors_reach_whoever_waits(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wrong() -> None:
        for text, options, words in (
            ("Hello", {"temperature": -1}, "temperature"),
            ("Hello", {"progress": 3}, "progress"),
            ([], {}, "empty"),
            ([10**6], {}, "vocabulary"),
        ):
            with pytest.raises(OptionError, match=words):
                await tiny.agenerate(text, **options)
            with pytest.raises(OptionError, match=words):
                async for _ in tiny.astream(text, **options):
                    pass

    asyncio.run(wrong())

    def broken(*arguments: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a step that cannot be")

    monkeypatch.setattr(tiny.engine.loop._batcher, "_take_in", broken)
    with pytest.raises(RuntimeError, match="cannot be"):
        asyncio.run(tiny.agenerate("Hello", **LONG))
    assert tiny.generate("Hello", max_tokens=1).tokens


class Gate:
    """A function in front of another, which waits until the event loop has opened it.

    If it is called in the event loop's own thread, that is not before the timeout.
    """

    def __init__(self, owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._called, self._open = threading.Event(), threading.Event()
        inner = getattr(owner, name)

        def gated(*arguments: Any, **options: Any) -> Any:
            self._called.set()
            assert self._open.wait(timeout=20), f"{name} blocked the event loop"
            return inner(*arguments, **options)

        monkeypatch.setattr(owner, name, gated)

    async def pass_one(self) -> None:
        await until(self._called.is_set)
        self._open.set()


@pytest.mark.parametrize("what", ["encode", "step", "prompts", "end"])
def test_nothing_blocks_the_event_loop(
    tiny: LLM, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Prompts:
        def next(self) -> str:
            return "Hello"

    source, engine = Prompts(), tiny.engine
    owner, name = {
        "encode": (engine.tokenizer, "encode"),
        "step": (engine.decoder, "run"),
        "prompts": (source, "next"),
        "end": (engine.cache, "keep"),
    }[what]

    async def answer() -> None:
        gate = Gate(owner, name, monkeypatch)
        batch = tiny.abatch((source.next() for _ in range(2)), max_tokens=2, temperature=0)
        passed = asyncio.create_task(gate.pass_one())
        assert len([answer async for answer in batch]) == 2
        await passed

    asyncio.run(answer())


def test_the_end_of_a_session_s_answer_waits_for_the_lock_elsewhere(tiny: LLM) -> None:
    async def answer() -> None:
        session = tiny.session()
        session.append(prompt(5, 20))
        pieces = session.astream(temperature=0, max_tokens=2, ignore_eos=True)
        last = [await anext(pieces) for _ in range(3)][-1]
        assert last.finish_reason == "length"
        tiny.engine.lock.acquire()  # as a long step would
        released = threading.Timer(5, tiny.engine.lock.release)
        released.start()
        end = asyncio.create_task(anext(pieces, None))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert not end.done()
        released.cancel()
        tiny.engine.lock.release()
        assert await end is None
        session.close()

    asyncio.run(answer())


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


def test_two_event_loops_and_a_thread_share_steps(tiny: LLM) -> None:
    expected = [tiny.generate(tokens, **options) for tokens, options in REQUESTS]

    async def together(part: slice) -> list[Completion]:
        return await asyncio.gather(*(tiny.agenerate(t, **o) for t, o in REQUESTS[part]))

    with ThreadPoolExecutor(3) as pool:
        parts = [
            pool.submit(lambda: asyncio.run(together(slice(0, 12)))),
            pool.submit(lambda: asyncio.run(together(slice(12, 24)))),
            pool.submit(lambda: [tiny.generate(t, **o) for t, o in REQUESTS[24:]]),
        ]
        answers = [answer for part in parts for answer in part.result(timeout=60)]
    assert same(answers, expected)


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
