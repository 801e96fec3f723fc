"""A model that drafts for another one: the answers are the same, and errors say what to do."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from inspection import draft_with, drafts_of, is_resting, live, preempt_at, used_blocks
from loops import GREEDY, alone, prompt, short, together, tokens_of
from waiting import until

from edgellm import MemoryEstimateError, OptionError, SourceError
from edgellm.engine.draft_model import ModelDrafter
from edgellm.engine.draft_opening import first_difference
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import LLM, load

pytestmark = pytest.mark.skipif(library() is None, reason="drafts need the native kernels")
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "ignore_eos": True, "repeat_penalty": 1.1}


@pytest.fixture(scope="module")
def same(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model in several files, which are not those of the tiny model."""
    return str(write_model(tmp_path_factory.mktemp("same"), max_shard_size="100KB"))


@pytest.fixture(scope="module")
def other(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with other weights, a shorter context, and rows for tokens that there are not."""
    folder = tmp_path_factory.mktemp("other")
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 256, "vocab_size": 336}
    return str(write_model(folder, **changes))


@pytest.fixture(params=["same", "other"])
def pair(
    request: pytest.FixtureRequest, folder: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    """A model that drafts at every step, however unsure it is; nothing is left behind."""
    draft = request.getfixturevalue(request.param)
    draft_with(monkeypatch, "model")
    llm = load(folder, ctx_size=4 * BLOCK, cache_size=16 * BLOCK, draft=draft, draft_p_min=0)
    yield llm
    until(lambda: is_resting(llm))
    assert used_blocks(drafts_of(llm)) == used_blocks(llm) == 0


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_answer_is_the_same(pair: LLM, options: dict[str, Any]) -> None:
    tokens = prompt(1, 240)  # behind the end of the other model's context
    for begin in (tokens[:20], tokens):
        drafted, plain = (
            pair.generate(begin, max_tokens=30, logprobs=2, speculate=speculate, **options)
            for speculate in (True, False)
        )
        assert drafted.tokens == plain.tokens
        assert drafted.logprobs == plain.logprobs
        assert plain.stats.drafts == {}


def test_the_same_weights_are_always_right(folder: str, same: str) -> None:
    llm = load(folder, draft=same, draft_p_min=0)
    with pytest.MonkeyPatch.context() as patch:
        draft_with(patch, "model")
        counts = llm.generate(prompt(1, 20), max_tokens=41, **GREEDY).stats
    assert counts.drafts["model"].accepted == counts.drafts["model"].drafted == 30
    assert counts.accepted_tokens == counts.drafted_tokens == 30


def test_other_weights_are_hardly_ever_right(folder: str, other: str) -> None:
    llm = load(folder, draft=other, draft_p_min=0)
    with pytest.MonkeyPatch.context() as patch:
        draft_with(patch, "model")
        counts = llm.generate(prompt(1, 20), max_tokens=41, **GREEDY).stats.drafts["model"]
    assert counts.drafted > 60 > 8 * counts.accepted


@pytest.mark.parametrize("most", [0, 1, 2])
def test_an_answer_may_limit_its_drafts(pair: LLM, most: int) -> None:
    lengths = set()
    with pytest.MonkeyPatch.context() as patch:
        propose = ModelDrafter.propose

        def noting(self: ModelDrafter, tokens: Any, count: int) -> list[int]:
            lengths.add(count)
            return propose(self, tokens, count)

        patch.setattr(ModelDrafter, "propose", noting)
        stats = pair.generate(prompt(1, 20), max_tokens=20, speculate_most=most, **GREEDY).stats
    assert max(lengths, default=0) == most
    assert bool(stats.drafts) == bool(most)


def test_answers_at_once(pair: LLM) -> None:
    calls = short([prompt(seed, 30) for seed in range(2)], max_tokens=20)
    expected = tokens_of(alone(pair, calls))
    found = together(pair, calls)
    assert tokens_of(found) == expected
    assert any(answer.stats.drafts["model"].drafted for answer in found)


def test_a_session_that_goes_back(pair: LLM) -> None:
    with pair.session() as session:
        session.append(prompt(1, 40))
        list(itertools.islice(session.stream(max_tokens=30, **GREEDY), 7))
        session.rewind(20)
        session.append(prompt(2, 10))
        tokens = list(session.tokens)
        found = session.generate(max_tokens=12, **GREEDY).tokens
    assert found == pair.generate(tokens, max_tokens=12, speculate=False, **GREEDY).tokens


def test_a_cancelled_answer(pair: LLM) -> None:
    cancel = threading.Event()
    stream = pair.stream(prompt(1, 40), cancel=cancel, max_tokens=200, **GREEDY)
    list(itertools.islice(stream, 5))
    cancel.set()
    assert list(stream)[-1].finish_reason == "cancelled"


def test_a_preempted_answer(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pair.generate(prompt(1, 40), max_tokens=30, speculate=False, **GREEDY).tokens
    preempt_at(pair, monkeypatch, lambda step: step % 3 == 2)
    found = pair.generate(prompt(1, 40), max_tokens=30, **GREEDY)
    assert found.tokens == expected
    assert found.stats.preempted > 0
    assert found.stats.drafts["model"].drafted > 0


def test_a_full_context_that_shifts(pair: LLM) -> None:
    options = {**GREEDY, "context_policy": "shift", "repetition_limit": 0, "max_tokens": 300}
    drafted, plain = (
        pair.generate(prompt(1, 400), speculate=speculate, **options) for speculate in (True, False)
    )
    assert drafted.stats.dropped_tokens > 0
    assert drafted.tokens == plain.tokens


def test_a_draft_model_that_fails_in_the_middle(
    pair: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = pair.generate(prompt(1, 40), max_tokens=30, speculate=False, **GREEDY).tokens
    propose, calls = ModelDrafter.propose, itertools.count()

    def failing(self: ModelDrafter, tokens: Any, count: int) -> list[int]:
        if next(calls) == 4:
            raise RuntimeError("no luck\nat all")
        return propose(self, tokens, count)

    monkeypatch.setattr(ModelDrafter, "propose", failing)
    with caplog.at_level(logging.WARNING):
        found = pair.generate(prompt(1, 40), max_tokens=30, **GREEDY)
    assert found.tokens == expected
    assert found.stats.draft_failure == "model: no luck"
    assert found.stats.drafts["model"].drafted > 0
    assert [each.message for each in caplog.records] == [
        "an answer goes on without drafts of the model: no luck"
    ]
    assert pair.generate(prompt(2, 40), max_tokens=5, **GREEDY).stats.draft_failure == ""


def test_measured_times_decide_nothing_but_the_speed(folder: str, same: str) -> None:
    llm = load(folder, draft=same)
    for seed in range(3):
        drafted, plain = (
            llm.generate(prompt(seed, 60), max_tokens=60, speculate=speculate, **GREEDY)
            for speculate in (True, False)
        )
        assert drafted.tokens == plain.tokens


def test_another_vocabulary(folder: str, make_model: Callable[..., Path]) -> None:
    draft = make_model(num_hidden_layers=1)
    described = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(OptionError, match=r"`draft` is .*another vocabulary.*: token 5 is"):
        load(folder, draft=str(draft))


def test_vocabularies_may_differ_in_length() -> None:
    words = {"a": 0, "b": 1}
    assert first_difference(words, {**words, "[PAD2]": 2}) is None
    assert first_difference({**words, "<extra>": 2}, words) is None
    assert first_difference(words, {"a": 0, "c": 1}) == (1, "b", "c")


def test_the_model_itself(folder: str, tiny_model: Path) -> None:
    for name in (folder, str(tiny_model)):
        with pytest.raises(OptionError, match=r"`draft` is .*the model itself.*smaller"):
            load(folder, draft=name)


def test_a_larger_model(folder: str, write_model: Callable[..., Path], tmp_path: Path) -> None:
    larger = str(write_model(tmp_path, num_hidden_layers=5))
    with pytest.raises(OptionError, match=r"`draft` is .*could never be faster; name a smaller"):
        load(folder, draft=larger)


def test_a_draft_model_that_does_not_exist(folder: str) -> None:
    with pytest.raises(SourceError, match=r"`draft` is 'nowhere.gguf': nowhere.gguf: no such file"):
        load(folder, draft="nowhere.gguf")


def test_a_decode_that_checks_no_drafts(tiny_model: Path, other: str) -> None:
    with pytest.raises(OptionError, match=r"`draft` is .* `decode` portable.*take that, or leave"):
        load(str(tiny_model), decode="portable", prefill="cpu", draft=other)


def test_more_memory_than_there_is(
    folder: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = load(folder, ctx_size=4 * BLOCK).engine.memory
    needed = load(folder, ctx_size=4 * BLOCK, draft=other).engine.memory
    assert needed.total == alone.total + needed.draft > alone.total
    memory = SimpleNamespace(available=needed.total - 1, total=1 << 40)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    load(folder, ctx_size=4 * BLOCK)
    with pytest.raises(MemoryEstimateError, match=r"`draft` \d+\), but .* leave out `draft`"):
        load(folder, ctx_size=4 * BLOCK, draft=other)


def test_a_limit_that_is_none(folder: str) -> None:
    for wrong in ({"draft_tokens": 0}, {"draft_p_min": 1.5}, {"draft": 3}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            load(folder, **wrong)  # type: ignore[arg-type]


def test_blocks_of_an_answer_on_its_way(pair: LLM) -> None:
    stream = pair.stream(prompt(1, 40), max_tokens=200, **GREEDY)
    list(itertools.islice(stream, 9))
    assert len(live(pair)) == 1
    stream.close()
