"""Exceptions of signal handlers, such as Ctrl-C's, in the middle of an answer."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType

import pytest
from loop_checks import AlarmError

from edgellm.llm import LLM
from edgellm.named_prefix import kept_prefixes

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer signal"),
    pytest.mark.usefixtures("alarm"),
]
TEXT = "One two three four five six seven eight nine ten. " * 320


@pytest.fixture(params=["chosen", "portable"])
def llm(request: pytest.FixtureRequest) -> LLM:
    llm: LLM = request.getfixturevalue(f"{request.param}_llm")
    # Imports at the first use are over then: C code in them drops exceptions.
    llm.generate("Hello", max_tokens=2, seed=1)
    return llm


@pytest.mark.parametrize("delay", [0.005, 0.03, 0.07, 0.15])
def test_in_prefill_the_exception_reaches_the_caller(llm: LLM, delay: float) -> None:
    with llm.session() as session:
        session.append(f"{delay} {TEXT}")  # nothing of it is cached
        signal.setitimer(signal.ITIMER_REAL, delay)
        start = time.perf_counter()
        with pytest.raises(AlarmError):
            session.generate(max_tokens=1)
        assert time.perf_counter() - start < 30  # a whole prompt would go on for long after it
        assert session.cached < len(session.tokens)
    answer = llm.generate("The capital of France is", temperature=0, max_tokens=4)
    assert "Paris" in answer.text


def test_an_interrupted_prefix_is_not_kept(chosen_llm: LLM, edgellm_home: Path) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(AlarmError):
        chosen_llm.prefix("docs", f"interrupted {TEXT}")
    assert kept_prefixes() == []
    assert [path for path in edgellm_home.rglob("*") if path.name.startswith("docs")] == []


def test_in_decode_the_exception_reaches_the_caller(llm: LLM) -> None:
    for delay in (0.02, 0.05, 0.11):
        signal.setitimer(signal.ITIMER_REAL, delay)
        with pytest.raises(AlarmError):
            llm.generate("Count: one, two,", temperature=0, max_tokens=3000, ignore_eos=True)
    with llm.engine.lock:
        assert llm.engine.cache.used_blocks == 0


# Python itself drops what is raised while a generator that nobody needs any more is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_moment_of_an_interrupt_leaves_the_lock_taken(llm: LLM) -> None:
    """Raised at the Nth call of a Python function during an answer, where signals are handled."""

    class Interrupts:
        def __init__(self, at: int) -> None:
            self.left = at

        def __call__(self, frame: FrameType, event: str, argument: object) -> None:
            self.left -= event == "call"
            if self.left == 0 and event == "call":
                sys.setprofile(None)
                raise AlarmError

    for at in (*range(1, 300, 7), *range(300, 1500, 61)):
        sys.setprofile(Interrupts(at))
        try:
            llm.generate("One two three", temperature=0, max_tokens=3)
        except AlarmError:
            pass
        finally:
            sys.setprofile(None)
        assert llm.engine.lock.acquire(timeout=10), f"after the interrupt at event {at}"
        llm.engine.lock.release()
    assert llm.generate("The capital of France is", temperature=0, max_tokens=4).text
