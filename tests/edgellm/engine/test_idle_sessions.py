"""Sessions without an answer on its way give their blocks away, and go on as if they had not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from edgellm import CacheFullError, Piece
from edgellm.engine.context import Context
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.session import Session

CTX = 3 * BLOCK
give_back = Context.give_back


def opened(folder: Path, *, cache_size: int, ctx_size: int = CTX, **options: Any) -> LLM:
    return load(str(folder), ctx_size=ctx_size, cache_size=cache_size, **options)


class Course:
    """A course of events with many sessions, the same one in a cache of any size."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        self._llm, self._folder, self._ctx = llm, folder, llm.engine.ctx_size
        self.sessions: list[Session] = []
        self.answers: list[tuple[int, ...]] = []
        self.reclaimed = 0

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
        session.append(
            [random.randrange(3, 300) for _ in range(random.randint(20, self._ctx - BLOCK))]
        )
        self.sessions.append(session)

    def _turn(self, session: Session, random: random.Random) -> None:
        more = [random.randrange(3, 300) for _ in range(random.randint(1, self._ctx // 6))]
        if len(session.tokens) + len(more) + 12 > self._ctx:
            session.rewind(random.randint(5, self._ctx // 2))
        session.append(more)
        before = [each for each in self.sessions if each.cached]
        answer = session.generate(max_tokens=10, temperature=0, ignore_eos=True)
        self.answers.append(tuple(answer.tokens))
        self.reclaimed += sum(not each.cached for each in before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "format"), [*((seed, "int8") for seed in range(3)), (3, "k8v4"), (5, "k4v4")]
)
def test_answers_are_those_of_a_large_cache(
    tiny_model: Path, tmp_path: Path, seed: int, format: str
) -> None:
    """With sealed blocks longer sessions, which have some."""
    courses, ctx_size = [], CTX if format == "int8" else 8 * BLOCK
    if format != "int8" and library() is None:
        pytest.skip("C++ alone seals blocks")
    for cache_size in (ctx_size, 40 * ctx_size):
        folder = tmp_path / str(cache_size)
        folder.mkdir()
        llm = opened(tiny_model, cache_size=cache_size, ctx_size=ctx_size, kv_format=format)
        course = Course(llm, folder)
        course.run(random.Random(seed), events=40)
        courses.append(course)
    small, large = courses
    assert small.answers == large.answers
    assert [s.tokens for s in small.sessions] == [s.tokens for s in large.sessions]
    assert small.reclaimed > 2
    assert large.reclaimed == 0


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


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Context]:
    """Contexts whose blocks were taken, in this order."""
    contexts: list[Context] = []

    def giving(self: Context) -> None:
        contexts.append(self)
        give_back(self)

    monkeypatch.setattr(Context, "give_back", giving)
    return contexts


def stream(session: Session, *, max_tokens: int) -> Iterator[Piece]:
    """An answer of so many letters; 64 are computed before they are read, without drafts."""
    (letter,) = session._engine.tokenizer.encode("a", add_bos=False)
    bias = {letter: 100}
    return session.stream(max_tokens=max_tokens, ignore_eos=True, logit_bias=bias, speculate=False)


def computed(session: Session, count: int) -> None:
    until(lambda: len(session._context.tokens) == count)


def test_an_open_stream_keeps_its_blocks(tiny_model: Path, given: list[Context]) -> None:
    llm = opened(tiny_model, cache_size=3 * BLOCK)
    idle, busy = llm.session(), llm.session()
    for session in (busy, idle):  # busy rested longer, before its answer
        session.append([5 + (session is idle)] * 20)
        session.generate(max_tokens=2, ignore_eos=True)
    answer = stream(busy, max_tokens=80)
    next(answer)
    llm.generate([9] * (BLOCK + 9), max_tokens=2, ignore_eos=True)
    assert len(list(answer)) == 80
    assert given == [idle._context]


def test_a_stale_end_leaves_a_busy_session_its_blocks(
    tiny_model: Path, given: list[Context]
) -> None:
    """The first stream of a session is closed after its second one has begun."""
    llm = opened(tiny_model, cache_size=3 * BLOCK)
    busy, *others = (llm.session() for _ in range(3))
    busy.append([5] * 150)
    first = stream(busy, max_tokens=5)
    next(first)
    computed(busy, 155)
    busy.append([7])
    second = stream(busy, max_tokens=130)
    next(second)
    first.close()
    for other in others:
        other.append([8 + (other is others[0])] * 100)
        other.generate(max_tokens=2, ignore_eos=True)
    assert len(list(second)) == 130  # it needs a third block
    assert given == [others[0]._context]


def test_a_session_whose_turn_waits_goes_last(tiny_model: Path, given: list[Context]) -> None:
    llm = opened(tiny_model, cache_size=5 * BLOCK)
    beside, first, second = (llm.session() for _ in range(3))
    for session in (first, second):
        session.append([5 + (session is first)] * (BLOCK + 5))
        session.generate(max_tokens=2, ignore_eos=True)
    beside.append([4] * 150)
    answer = stream(beside, max_tokens=80)  # a lone turn would not wait
    next(answer)
    first.append([8] * BLOCK)  # it needs more blocks than are free
    first.generate(max_tokens=2, ignore_eos=True)
    assert given == [second._context]
    assert len(list(answer)) == 80


def test_a_shift_after_a_rest_is_the_same(tiny_model: Path) -> None:
    """No blocks are taken that a shift would move, if the session may shift."""
    texts = []
    for cache_size in (CTX, 100 * BLOCK):
        llm = opened(tiny_model, cache_size=cache_size)
        session = llm.session()
        session.append([random.Random(1).randrange(3, 300) for _ in range(CTX - 20)])
        options = {"context_policy": "shift", "ignore_eos": True, "temperature": 0}
        session.generate(max_tokens=2, **options)
        if cache_size == CTX:
            with pytest.raises(CacheFullError, match="cannot be computed again"):
                llm.generate([9] * 300, max_tokens=2)
        else:
            llm.generate([9] * 300, max_tokens=2)
        session.append([7] * 40)
        answer = session.generate(max_tokens=20, **options)
        assert answer.stats.cached_tokens > BLOCK
        texts.append(answer.tokens)
    assert texts[0] == texts[1]


def test_what_was_given_back_is_saved(tiny_model: Path, tmp_path: Path) -> None:
    llm = opened(tiny_model, cache_size=100 * BLOCK)
    session = llm.session()
    session.append([5] * 200)
    session.generate(max_tokens=2, ignore_eos=True)
    llm.engine.thread.call(llm.engine.cache.reclaim)
    assert session.cached == 0
    session.save(tmp_path / "saved")
    other = opened(tiny_model, cache_size=100 * BLOCK)
    assert other.load_session(tmp_path / "saved").cached == 201
