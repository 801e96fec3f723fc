"""What goes wrong around a loop: hooks that raise, sessions used twice, forks."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from inspection import fail_last_text, is_resting, live, paused, results, set_costs, watch_steps
from loop_checks import assert_idle, forked
from loops import GREEDY, prompt
from waiting import until

from edgellm import EdgeLLMError, OptionError, Session, TokenizerError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load


def test_text_that_cannot_be_made_is_an_error_of_its_own_answer(tiny: LLM) -> None:
    """Also where the answer ends by itself in somebody else's step."""

    cancel = threading.Event()
    with tiny.session() as session:
        session.append(prompt(1, 40))
        stream = session.stream(cancel=cancel, **GREEDY)
        next(stream)
        (request,) = live(tiny)
        fail_last_text(request, TokenizerError("no text"))
        cancel.set()
        assert len(tiny.generate(prompt(2, 20), max_tokens=9, **GREEDY).tokens) == 9
        with pytest.raises(TokenizerError, match="no text"):
            list(stream)
    assert_idle(tiny)


def test_a_beginning_that_fails_is_an_error_of_its_own_answer(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokens = tiny.engine.cache, prompt(1, 40)
    cached_prefix = cache.cached_prefix

    def unreadable(asked: Sequence[int], *, root: bytes | None = None) -> int:
        if list(asked) == tokens[:-1]:
            raise OSError("no disk")
        return cached_prefix(asked, root=root)

    monkeypatch.setattr(cache, "cached_prefix", unreadable)
    failing = tiny.batch([tokens, prompt(2, 30)], max_tokens=5)
    answers = {answer.index: answer for answer in failing}
    assert isinstance(answers[0].error, OSError)
    assert answers[1].result().tokens
    assert_idle(tiny)


def test_what_nobody_has_read_of_a_closed_stream_is_no_part_of_the_session(tiny: LLM) -> None:
    """Also where others have computed more of it."""
    for company in (False, True):
        with tiny.session() as session:
            session.append(prompt(1, 40))
            stream = session.stream(**GREEDY)
            read = [next(stream).token for _ in range(3)]
            if company:
                tiny.generate(prompt(2, 40), max_tokens=20, **GREEDY)
            stream.close()
            assert session.tokens == (*prompt(1, 40), *read)
            assert session.cached <= len(session.tokens)
            rest = session.generate(max_tokens=4, **GREEDY).tokens
        whole = tiny.generate(prompt(1, 40), max_tokens=7, **GREEDY).tokens
        assert (*read, *rest) == whole
    assert_idle(tiny)


def test_two_threads_on_one_session(tiny: LLM) -> None:
    """One of them answers, or is told; tokens are those of whole answers."""
    for turn in range(20):
        with tiny.session() as session:
            session.append(prompt(turn, 40))
            barrier = threading.Barrier(2)

            def answer(session: Session = session, barrier: Any = barrier) -> object:
                barrier.wait()
                try:
                    return session.generate(max_tokens=6, **GREEDY).tokens
                except OptionError as error:
                    return str(error)

            with ThreadPoolExecutor(2) as pool:
                found = results([pool.submit(answer) for _ in range(2)])
            answers = [each for each in found if isinstance(each, tuple)]
            assert all(a in session.tokens for answer in answers for a in answer)
            told = [each for each in found if isinstance(each, str)]
            assert all("already answering" in each or "changed" in each for each in told)
            assert session.tokens[:40] == tuple(prompt(turn, 40))
    assert_idle(tiny)


@pytest.mark.parametrize("before", [True, False], ids=["before a step", "after a step"])
def test_closed_while_its_answer_is_on_its_way(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """From another thread, which does not wait for the step: the session is empty all the same."""
    set_costs(tiny, 1e-3)
    for at in (1, 2, 3, 5, 8, 13):
        session, steps = tiny.session(), iter(range(1, 1000))

        def around(
            step: Callable[[], None], session: Session = session, steps: Any = steps, at: int = at
        ) -> None:
            closing = threading.Thread(target=session.close)
            if not before:
                step()
            if next(steps) == at:
                closing.start()
                closing.join()
            if before:
                step()

        session.append(prompt(at, 150))
        with monkeypatch.context() as patch:
            watch_steps(tiny, patch, around)
            with pytest.raises(OptionError, match="changed"):
                session.generate(max_tokens=20, **GREEDY)
        assert session.tokens == ()
        session.append([5, 6])
        assert session.tokens == (5, 6)
        session.close()
    del session
    assert_idle(tiny)


@pytest.mark.slow
def test_closed_at_random(tiny: LLM) -> None:
    rng, told = random.Random(1), list[str]()
    for turn in range(40):
        session = tiny.session()
        session.append(prompt(turn, 150))
        timer = threading.Timer(rng.uniform(0, 0.01), session.close)
        timer.start()
        try:
            session.generate(max_tokens=20, **GREEDY)
        except EdgeLLMError as error:
            told.append(str(error))
        timer.join()
        assert session.tokens == ()
        session.append([5, 6])
        assert session.tokens == (5, 6)
        session.close()
    del session
    assert [each for each in told if "changed" not in each and "empty" not in each] == []
    assert_idle(tiny)


def test_given_back_and_then_another_text(tiny_model: Path) -> None:
    """What was kept of a preempted answer is not taken for the tokens that came after."""
    small = load(
        str(tiny_model), ctx_size=4 * BLOCK, cache_size=4 * BLOCK, prefill="cpu", decode="portable"
    )
    expected = small.generate(prompt(7, 200), max_tokens=5, **GREEDY).tokens
    with small.session() as session:
        session.append(prompt(1, 2 * BLOCK))
        stream = session.stream(**GREEDY)
        next(stream)
        small.generate(prompt(2, 3 * BLOCK), max_tokens=4, **GREEDY)  # takes its place
        stream.close()
        session.replace(prompt(7, 200))
        assert session.generate(max_tokens=5, **GREEDY).tokens == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_answers_or_refuses(tiny: LLM) -> None:
    expected = tiny.generate(prompt(1, 40), max_tokens=5, **GREEDY).tokens

    def in_child() -> str:
        try:
            same = tiny.generate(prompt(1, 40), max_tokens=5, **GREEDY).tokens == expected
            return "same" if same else "other"
        except OptionError as error:
            return str(error)

    def in_threads() -> str:
        with ThreadPoolExecutor(4) as pool:
            found = set(results([pool.submit(in_child) for _ in range(4)]))
        engines = [each for each in threading.enumerate() if each.name == "edgellm-engine"]
        return f"{found} with {len(engines)} threads"

    until(lambda: is_resting(tiny))  # its last commands have run
    assert forked(in_child) == "same"
    assert forked(in_threads) == "{'same'} with 1 threads"
    with paused(tiny):
        assert "forked while the model computed" in forked(in_child)
    assert tiny.generate(prompt(1, 40), max_tokens=5, **GREEDY).tokens == expected
