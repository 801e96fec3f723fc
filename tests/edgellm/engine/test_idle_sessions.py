"""Sessions without an answer on its way give their blocks away, and go on as if they had not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine.context import Context
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.session import Session

CTX = 3 * BLOCK
give_back = Context.give_back


def opened(folder: Path, *, cache_size: int, **options: Any) -> LLM:
    return load(str(folder), ctx_size=CTX, cache_size=cache_size, **options)


class Course:
    """A course of events with many sessions, the same one in a cache of any size."""

    def __init__(self, llm: LLM, folder: Path, *, shift: bool) -> None:
        self._llm, self._folder = llm, folder
        self._policy = "shift" if shift else "error"
        self.sessions: list[Session] = []
        self.answers: list[tuple[int, ...]] = []

    def run(self, random: random.Random, *, events: int) -> None:
        for event in range(events):
            if len(self.sessions) < 3 or random.random() < 0.15:
                self._open(random)
            at = random.randrange(len(self.sessions))
            session = self.sessions[at]
            kind = random.choice(("turn", "turn", "turn", "fork", "rewind", "save", "replace"))
            if kind == "fork":
                self.sessions.append(session.fork())
            elif kind == "rewind":
                session.rewind(random.randint(1, len(session.tokens)))
            elif kind == "replace":
                session.replace([*session.tokens[: random.randint(1, 200)], 7, 8])
            elif kind == "save":
                session.save(self._folder / f"{event}")
                self.sessions[at] = self._llm.load_session(self._folder / f"{event}")
            else:
                self._turn(session, random)

    def _open(self, random: random.Random) -> None:
        session = self._llm.session()
        session.append([random.randrange(3, 300) for _ in range(random.randint(20, 2 * BLOCK))])
        self.sessions.append(session)

    def _turn(self, session: Session, random: random.Random) -> None:
        more = [random.randrange(3, 300) for _ in range(random.randint(1, 60))]
        if self._policy == "error" and len(session.tokens) + len(more) + 12 > CTX:
            session.rewind(5)
        session.append(more)
        answer = session.generate(
            max_tokens=10, temperature=0, ignore_eos=True, context_policy=self._policy
        )
        self.answers.append(tuple(answer.tokens))


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_a_large_cache(
    tiny_model: Path, tmp_path: Path, seed: int, shift: bool
) -> None:
    courses = []
    for cache_size in (3 * BLOCK, 100 * BLOCK):
        folder = tmp_path / str(cache_size)
        folder.mkdir()
        course = Course(opened(tiny_model, cache_size=cache_size), folder, shift=shift)
        course.run(random.Random(seed), events=40)
        courses.append(course)
    small, large = courses
    assert small.answers == large.answers
    assert [s.tokens for s in small.sessions] == [s.tokens for s in large.sessions]
    held = [session.cached for session in small.sessions]
    assert sum(count > 0 for count in held) <= 4 < len(held)


def test_the_one_that_rested_longest_goes_first(tiny_model: Path) -> None:
    llm = opened(tiny_model, cache_size=3 * BLOCK)
    sessions = [llm.session() for _ in range(5)]  # of a block each, and the cache has four
    for i, session in enumerate(sessions[:4]):
        session.append([i + 3] * 9)
        session.generate(max_tokens=2, ignore_eos=True)
    sessions[0].generate(max_tokens=2, ignore_eos=True)
    sessions[4].append([9] * 9)
    answer = sessions[4].generate(max_tokens=2, ignore_eos=True)
    assert [session.cached > 0 for session in sessions] == [True, False, True, True, True]
    assert answer.stats.preempted == 0
    again = sessions[1].generate(max_tokens=2, ignore_eos=True)
    assert again.stats.cached_tokens in (0, 10)  # found, if its block was not needed


def test_an_open_stream_keeps_its_blocks(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Context] = []
    monkeypatch.setattr(Context, "give_back", lambda self: (given.append(self), give_back(self)))
    llm = opened(tiny_model, cache_size=3 * BLOCK)
    idle, busy = llm.session(), llm.session()
    for session in (busy, idle):  # busy rested longer, before its answer
        session.append([5 + (session is idle)] * 20)
        session.generate(max_tokens=2, ignore_eos=True)
    stream = busy.stream(max_tokens=BLOCK, ignore_eos=True)
    next(stream)
    llm.generate([9] * (BLOCK + 9), max_tokens=2, ignore_eos=True)
    assert len(list(stream)) > 1
    assert given == [idle._context]
