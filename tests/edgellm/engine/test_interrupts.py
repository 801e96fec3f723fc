"""Exceptions of signal handlers, such as Ctrl-C's, in the middle of an answer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from inspection import set_costs, used_blocks
from loop_checks import AlarmError, alarm_after, assert_interrupted, calls_of, interrupted
from loops import GREEDY, SHORT, prompt
from waiting import until

from edgellm.backends.batch import Backend, Rows, Span
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.named_prefix import kept_prefixes

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer signal"),
    pytest.mark.usefixtures("alarm"),
]
LONG = prompt(9, 900)
TEXT = "One two three four five six seven eight nine ten. " * 320


@pytest.fixture(params=["native", "portable"])
def tiny(request: pytest.FixtureRequest, tiny_model: Path) -> LLM:
    portable = {"prefill": "cpu", "decode": "portable"} if request.param == "portable" else {}
    options: dict[str, Any] = {"ctx_size": 8 * BLOCK, "cache_size": 16 * BLOCK, **portable}
    llm = load(str(tiny_model), **options)
    set_costs(llm, 1e-3)
    llm.generate("Hello", max_tokens=2, seed=1)  # C code in imports would drop the exception
    return llm


def alarm_at_layer(backend: Backend, monkeypatch: pytest.MonkeyPatch, *, at: int) -> None:
    """A signal at the n-th time that a prompt asks whether to go on, which is before each layer; it
    goes on once the main thread has withdrawn it."""
    run, asked = backend.run, iter(range(1, 10**9))

    def signalled(
        spans: Sequence[Span], *, should_stop: Callable[[], bool] | None, **options: Any
    ) -> list[Rows]:
        def ask() -> bool:
            assert should_stop is not None
            if next(asked) == at:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
                until(should_stop)
            return should_stop()

        return run(spans, should_stop=should_stop and ask, **options)

    monkeypatch.setattr(backend, "run", signalled)


@pytest.mark.parametrize("at", [1, 2, 9])
def test_in_prefill_the_exception_reaches_the_caller(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    expected = tiny.generate(LONG, **SHORT).tokens
    other = prompt(100 + at, 900)  # nothing of it is cached
    with tiny.session() as session:
        session.append(other)
        with monkeypatch.context() as patch:
            alarm_at_layer(tiny.engine.prefill, patch, at=at)
            with pytest.raises(AlarmError):
                session.generate(max_tokens=1)
        assert session.cached < len(session.tokens)
        assert session.generate(max_tokens=1).stats.prompt_tokens == 900
    assert tiny.generate(LONG, **SHORT).tokens == expected
    assert used_blocks(tiny) == 0


def test_an_interrupted_prefix_is_not_kept(
    tiny: LLM, edgellm_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        alarm_at_layer(tiny.engine.prefill, patch, at=3)
        with pytest.raises(AlarmError):
            tiny.prefix("docs", "interrupted " * 60)
    assert kept_prefixes() == []
    assert [path for path in edgellm_home.rglob("*") if path.name.startswith("docs")] == []


@pytest.mark.parametrize("at", [2, 3, 20])
def test_in_decode_the_exception_reaches_the_caller(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    run, steps = tiny.engine.decoder.run, iter(range(1, 10**9))
    expected = tiny.generate(LONG[:40], **SHORT).tokens

    def signalled(spans: Sequence[Span], **options: Any) -> list[Rows]:
        if next(steps) == at:
            signal.raise_signal(signal.SIGALRM)
        return run(spans, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine.decoder, "run", signalled)
        with pytest.raises(AlarmError):
            tiny.generate(LONG[:40], speculate=False, **{**GREEDY, "max_tokens": 300})
    assert used_blocks(tiny) == 0
    assert tiny.generate(LONG[:40], **SHORT).tokens == expected


# Python itself drops what is raised while a generator that nobody needs any more is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_moment_of_an_interrupt_leaves_anything_behind(tiny: LLM) -> None:
    """Raised at the Nth call of a Python function during an answer, where signals are handled."""
    expected = tiny.generate(LONG[:40], **SHORT).tokens

    def answer() -> None:
        tiny.generate("One two three", temperature=0, max_tokens=3)

    answer()
    calls = calls_of(answer)
    moments = range(1, calls, max(1, calls // 60))
    assert_interrupted([interrupted(answer, at=at) for at in moments])
    assert used_blocks(tiny) == 0
    assert tiny.generate(LONG[:40], **SHORT).tokens == expected


# The same on a clock, with the default model.


@pytest.fixture(params=["chosen", "portable"])
def llm(request: pytest.FixtureRequest) -> LLM:
    llm: LLM = request.getfixturevalue(f"{request.param}_llm")
    llm.generate("Hello", max_tokens=2, seed=1)
    return llm


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.005, 0.03, 0.07])
def test_an_alarm_in_prefill(llm: LLM, delay: float) -> None:
    with llm.session() as session:
        session.append(f"{delay} {TEXT}")  # nothing of it is cached
        with pytest.raises(AlarmError), alarm_after(delay):
            session.generate(max_tokens=1)
        assert session.cached < len(session.tokens)
    assert "Paris" in llm.generate("The capital of France is", temperature=0, max_tokens=4).text


@pytest.mark.slow
def test_an_alarm_in_decode(llm: LLM) -> None:
    for delay in (0.02, 0.05, 0.11):
        with pytest.raises(AlarmError), alarm_after(delay):
            llm.generate("Count: one, two,", temperature=0, max_tokens=3000, ignore_eos=True)
    assert used_blocks(llm) == 0
