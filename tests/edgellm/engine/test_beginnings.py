"""What a step computes where a request begins otherwise than its plan supposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine_without_model import GREEDY, ask, finish, start, step, tokens
from inspection import waiting

from edgellm.backends.batch import Rows, Span
from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.embedding import EmbeddingRequest, Pooling
from edgellm.engine.request import Request


def test_a_prompt_goes_on_beside_one_that_cannot_begin() -> None:
    """A fork of a full session is to shift its context, and would copy more blocks than are free.

    It has been served less than the prompt's owner, and would be first in every step.
    """
    llm = start(4096, blocks=52)
    full = Context(llm.engine, tokens(1, 4096))

    def fill() -> None:
        with full.sequence.reserved(4096):
            full.sequence.commit(full.tokens)

    llm.engine.thread.call(fill)
    (prompt,) = ask(llm, tokens(3, 2000), max_tokens=4, owner="p")
    while prompt.computed < 1000:
        step(llm, [prompt])
    fork = full.fork()
    fork.tokens += tokens(2, 300)
    options = replace(GREEDY, max_tokens=4, owner="a", context_policy="shift")
    shifting = Request(fork, Call(options=options), closes=True)
    llm.engine.loop.submit(shifting)
    for _ in range(4):
        before = prompt.computed
        step(llm, [prompt, shifting])
        assert prompt.computed > before
        assert len(shifting.tokens) == 4396
    while not prompt.finished:
        step(llm, [prompt, shifting])
    full.close()
    finish(llm, [prompt, shifting])


def steps_to_first_token(llm: Any, request: Request, others: Sequence[Request]) -> int:
    steps = 0
    while not request.stats().generation_tokens:
        step(llm, [request, *others])
        steps += 1
    return steps


def test_a_prompt_that_is_cached_does_not_wait_for_a_long_one() -> None:
    """It waits for what is left to compute of it, not for its length."""
    llm = start(16384, blocks=400)
    talk = tokens(1, 6000)
    finish(llm, ask(llm, talk, max_tokens=4))
    (long,) = ask(llm, tokens(2, 12000), max_tokens=2)
    while long.computed < 500:
        step(llm, [long])
    (follows,) = ask(llm, [*talk, *tokens(3, 20)], max_tokens=2)
    assert steps_to_first_token(llm, follows, [long]) <= 4
    finish(llm, [long, follows])


def test_a_cached_prompt_without_room_lets_others_pass() -> None:
    """What it shares with a running request is counted as if it needed room of its own."""
    llm = start(16384, blocks=100)
    talk = tokens(1, 60 * 128)
    (first,) = ask(llm, talk, max_tokens=300)
    while not first.stats().generation_tokens:
        step(llm, [first])
    (follows,) = ask(llm, [*talk, *tokens(3, 20)], max_tokens=2)
    (short,) = ask(llm, tokens(2, 50), max_tokens=2)
    assert steps_to_first_token(llm, short, [first, follows]) <= 4
    finish(llm, [first, follows, short])


def test_what_becomes_cached_while_a_prompt_waits_counts() -> None:
    llm = start(16384, blocks=400)
    (long,) = ask(llm, tokens(2, 12000), max_tokens=2)
    while long.computed < 500:
        step(llm, [long])
    talk = tokens(1, 14000)
    (follows,) = ask(llm, talk, max_tokens=2)
    step(llm, [long, follows])
    assert waiting(llm) == [follows]
    assert follows.findable == 0
    context = Context(llm.engine, talk[:13900])

    def computed_elsewhere() -> None:
        with context.sequence.reserved(13900):
            context.sequence.commit(context.tokens)
        context.sequence.close()

    llm.engine.thread.call(computed_elsewhere)
    assert steps_to_first_token(llm, follows, [long]) <= 4
    finish(llm, [long, follows])


@pytest.mark.parametrize(("pooling", "expected"), [("mean", None), ("last", [(400, 1)])])
def test_an_embedding_is_cut_into_the_same_steps(
    pooling: Pooling, expected: list[tuple[int, int]] | None
) -> None:
    """Also where its beginning is in the KV cache, which a mean makes no use of."""
    llm = start(4096, blocks=64)
    run = llm.engine.decoder.run

    def embedded() -> list[tuple[int, int]]:
        """First positions and numbers of the rows of its steps."""
        rows = []

        def noted(spans: Sequence[Span], **options: Any) -> list[Rows]:
            rows.extend((len(span.sequence), len(span.tokens)) for span in spans)
            return run(spans, **options)

        llm.engine.decoder.run = noted
        context = Context(llm.engine, tokens(5, 401))
        request = EmbeddingRequest(context, pooling=pooling)
        llm.engine.loop.submit(request)
        while not request.finished:
            step(llm, [request])
        return rows

    first = embedded()
    assert [start for start, _ in first] == [0, 150, 300]
    assert embedded() == (expected or first)
