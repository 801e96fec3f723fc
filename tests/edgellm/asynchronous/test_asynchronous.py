"""Answers with asyncio: the same ones, in a loop that nothing blocks."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import pytest
from asynchronous_checks import LONG, REQUESTS, until
from inspection import fail_next_step, live, paused, submitted
from loops import Gate, alone, assert_same, prompt

from edgellm import Chat, Completion, OptionError, Piece, Session
from edgellm.llm import LLM


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
    expected = alone(tiny, REQUESTS)
    steps = tiny.engine.loop.counts.steps

    async def together() -> list[Completion]:
        with paused(tiny):
            asked = [asyncio.create_task(tiny.agenerate(t, **o)) for t, o in REQUESTS]
            await until(lambda: len(submitted(tiny)) == len(REQUESTS))
        return await asyncio.gather(*asked)

    assert_same(asyncio.run(together()), expected)
    tokens = sum(len(answer.tokens) for answer in expected)
    assert tiny.engine.loop.counts.steps - steps < tokens / 2
    assert_same(asyncio.run(together()), expected)  # in an event loop of its own


def test_lists_and_several_answers(tiny: LLM) -> None:
    options: dict[str, Any] = {"seed": 5, "max_tokens": 9}
    texts = ["One two", "Three", "Four five six"]

    async def answers() -> None:
        assert_same(await tiny.agenerate(texts, **options), tiny.generate(texts, **options))
        three = await tiny.agenerate("One two", n=3, **options)
        assert_same(three, tiny.generate("One two", n=3, **options))
        (only,) = await tiny.agenerate("One two", n=1, **options)
        assert_same([only], [await tiny.agenerate("One two", **options)])

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
    assert_same(found, [chats[1].send("And you?"), chats[1].send("Why?")])
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
                    (request,) = live(tiny_chat)
                    await until(lambda: len(request.pieces) > 9)  # noqa: B023
                    break
        tiny_chat.engine.thread.catch_up()
        assert live(tiny_chat) == []
        assert (await chat.asend("Go on", max_tokens=3)).finish_reason == "length"
        return taken

    taken = asyncio.run(stop_early())
    assert chat.messages[1].content == "".join(piece.text for piece in taken)
    assert [message.role for message in chat.messages] == ["user", "assistant"] * 2
    chat.close()


def test_two_questions_at_once_are_one_too_many(tiny_chat: LLM) -> None:
    chat = tiny_chat.chat(**LONG)

    async def both() -> None:
        async with aclosing(chat.astream("One")) as pieces:
            await anext(pieces)
            with pytest.raises(OptionError, match="already answering"):
                await chat.asend("Two", max_tokens=20)

    asyncio.run(both())
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

    fail_next_step(tiny, monkeypatch, RuntimeError("a step that cannot be"))
    with pytest.raises(RuntimeError, match="cannot be"):
        asyncio.run(tiny.agenerate("Hello", **LONG))
    assert tiny.generate("Hello", max_tokens=1).tokens


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

        async def open_gate() -> None:
            await until(gate.reached.is_set)
            gate.opened.set()

        opening = asyncio.create_task(open_gate())
        batch = tiny.abatch((source.next() for _ in range(2)), max_tokens=2, temperature=0)
        assert len([answer async for answer in batch]) == 2
        await opening

    asyncio.run(answer())


def test_the_end_of_a_session_s_answer_waits_for_no_step_elsewhere(tiny: LLM) -> None:
    async def answer() -> None:
        session = tiny.session()
        session.append(prompt(5, 20))
        pieces = session.astream(temperature=0, max_tokens=2, ignore_eos=True)
        last = [await anext(pieces) for _ in range(3)][-1]
        assert last.finish_reason == "length"
        with paused(tiny):  # as a long step would
            assert await anext(pieces, None) is None
        assert len(session.tokens) == 22
        session.close()

    asyncio.run(answer())


def test_two_event_loops_and_a_thread_share_steps(tiny: LLM) -> None:
    expected = alone(tiny, REQUESTS)

    async def together(part: slice) -> list[Completion]:
        return await asyncio.gather(*(tiny.agenerate(t, **o) for t, o in REQUESTS[part]))

    with ThreadPoolExecutor(3) as pool:
        parts = [
            pool.submit(lambda: asyncio.run(together(slice(0, 12)))),
            pool.submit(lambda: asyncio.run(together(slice(12, 24)))),
            pool.submit(lambda: [tiny.generate(t, **o) for t, o in REQUESTS[24:]]),
        ]
        answers = [answer for part in parts for answer in part.result()]
    assert_same(answers, expected)
