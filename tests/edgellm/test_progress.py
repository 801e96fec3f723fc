"""What callers are told while they wait, and answers that they do not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm import Completion, OptionError, Progress
from edgellm.backends.selection import select
from edgellm.llm import LLM, load
from edgellm.measure.benchmark import bench
from edgellm.measure.perplexity import perplexity
from edgellm.options import EngineOptions

LONG = "a b c d e f g h " * 50
Caller = Callable[..., Completion]


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    return load(str(tiny_model))


def test_everything_that_takes_time_tells_it_the_same_way(
    tiny_model: Path, edgellm_home: Path
) -> None:
    news: list[Progress] = []
    llm = load(str(tiny_model), progress=news.append)
    exporting = {progress.label.partition(":")[0] for progress in news}
    precisions = select(EngineOptions()).precisions(llm.engine.bundle.config)
    rounded = {"computing in float32", "comparing w8a8"} if "w8a8" in precisions else set()
    assert exporting == {f"exporting {precision}" for precision in precisions} | rounded
    assert {progress.unit for progress in news} == {"steps"}
    for expected, act in {
        "prefill": lambda: llm.generate(LONG, max_tokens=1, progress=news.append),
        "windows": lambda: perplexity(llm.engine, LONG, window=64, progress=news.append),
        "pp16": lambda: bench(
            llm.engine, prompts=[16], generations=[], repetitions=1, progress=news.append
        ),
    }.items():
        news.clear()
        act()
        assert {progress.label for progress in news} == {expected}
        assert [progress.done for progress in news] == sorted({p.done for p in news})
        assert news[-1].done == news[-1].total
        assert news[-1].unit == ("tokens" if expected == "prefill" else "steps")


@pytest.mark.parametrize("n", [1, 2])
def test_answers_together_are_counted(tiny: LLM, n: int) -> None:
    """In the thread that asks, whatever is computed of their prompts meanwhile."""
    news: list[tuple[Progress, threading.Thread]] = []
    tiny.generate(
        [LONG[::-1], "One two"],
        n=n,
        max_tokens=2,
        progress=lambda progress: news.append((progress, threading.current_thread())),
    )
    assert [progress for progress, _ in news] == [
        Progress("answers", done, 2 * n) for done in range(1, 2 * n + 1)
    ]
    assert {thread for _, thread in news} == {threading.current_thread()}


def test_a_kept_prefix_is_computed_with_progress(tiny: LLM, edgellm_home: Path) -> None:
    news: list[Progress] = []
    with tiny.prefix("text", LONG, progress=news.append) as session:
        assert news[-1] == Progress("prefill", session.cached, session.cached, "tokens")


def test_progress_must_be_a_function(tiny_model: Path) -> None:
    with pytest.raises(OptionError, match="`progress` is 3"):
        load(str(tiny_model), progress=3)  # type: ignore[arg-type]


def generate_in_session(llm: LLM, **options: Any) -> Completion:
    with llm.session() as session:
        session.append(LONG)
        return session.generate(**options)


CALLERS: list[Caller] = [
    lambda llm, **options: llm.generate(LONG, **options),
    generate_in_session,
    lambda llm, **options: llm.chat().send(LONG, **options),
    lambda llm, **options: llm.infill(LONG, "z", template=True, **options),
]


@pytest.mark.parametrize("caller", CALLERS)
def test_an_answer_that_was_stopped_is_an_answer(tiny: LLM, caller: Caller) -> None:
    cancelled = threading.Event()
    cancelled.set()
    for options, reason in (({"cancel": cancelled}, "cancelled"), ({"max_tokens": 0}, "length")):
        answer = caller(tiny, **options)
        assert (answer.finish_reason, answer.text, answer.tokens) == (reason, "", ())
        assert answer.stats.prompt_tokens >= 200
    assert caller(tiny, time_limit_ms=1, ignore_eos=True).finish_reason == "time"
