"""Options of an answer: by keyword, as one object, over the model's or the chat's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from edgellm import GenerationOptions, OptionError
from edgellm.llm import LLM, load

PROMPT = [5, 9, 14, 22, 31, 5, 9]


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    return load(str(tiny_model), ctx_size=512)


def test_keywords_and_an_object_are_the_same(tiny: LLM) -> None:
    whole = GenerationOptions(temperature=1.3, seed=7, max_tokens=9, ignore_eos=True)
    expected = tiny.generate(PROMPT, temperature=1.3, seed=7, max_tokens=9, ignore_eos=True)
    assert len(expected.tokens) == 9
    assert tiny.generate(PROMPT, options=whole).tokens == expected.tokens
    with tiny.session() as session:
        session.append(PROMPT)
        found = session.generate(temperature=1.3, seed=7, max_tokens=9, ignore_eos=True)
        assert found.tokens == expected.tokens
        session.rewind(len(PROMPT))
        assert session.generate(options=whole).tokens == expected.tokens
        session.rewind(len(PROMPT))
        pieces = list(session.stream(options=whole, max_tokens=4))
        assert tuple(p.token for p in pieces if p.token is not None) == expected.tokens[:4]


def test_nothing_given_is_what_is_usual_for_the_model(tiny: LLM) -> None:
    with tiny.session() as session:
        session.append(PROMPT)
        found = session.generate(seed=3, max_tokens=12)
    usual = tiny.generation_options(seed=3, max_tokens=12)
    assert usual.temperature == GenerationOptions().temperature
    assert found.tokens == tiny.generate(PROMPT, options=usual).tokens


def test_a_chat_has_options_and_an_answer_may_have_others(tiny: LLM) -> None:
    with tiny.chat(temperature=0, max_tokens=6, ignore_eos=True) as chat:
        assert len(chat.send("a").tokens) == 6
        assert len(chat.send("b", max_tokens=2).tokens) == 2
        assert len(list(chat.stream("c", options=chat.options, max_tokens=3))) >= 3
        assert len(chat.send("d").tokens) == 6
        assert chat.options.max_tokens == 6
        pieces = list(chat.regenerate(max_tokens=4))
        assert len([piece for piece in pieces if piece.token is not None]) == 4
        assert len(chat.messages) == 8


def test_an_answer_generated_again_takes_a_filter(tiny: LLM) -> None:
    def only_seventeen(logits: np.ndarray, _: Sequence[int]) -> None:
        logits[:17] = logits[18:] = -np.inf

    with tiny.chat(temperature=0, max_tokens=3, ignore_eos=True) as chat:
        first = chat.send("a").tokens
        again = [piece.token for piece in chat.regenerate(logit_filter=only_seventeen)]
        assert [token for token in again if token is not None] == [17] * 3 != list(first)


def test_the_policy_of_one_answer(tiny: LLM) -> None:
    with tiny.chat(temperature=0, max_tokens=4, ignore_eos=True) as chat:
        for text in "abc":
            chat.send(text * 150)
        answer = chat.send("d" * 150, context_policy="shift")
        assert answer.stats.dropped_tokens > 0


def test_options_that_are_something_else(tiny: LLM) -> None:
    wrong = {"temperature": 0}
    with tiny.session() as session, tiny.chat() as chat:
        session.append(PROMPT)
        for answer in (
            lambda: session.generate(options=wrong),  # type: ignore[arg-type]
            lambda: chat.send("a", options=wrong),  # type: ignore[arg-type]
            lambda: tiny.chat(options=wrong),  # type: ignore[arg-type]
        ):
            with pytest.raises(OptionError, match=r"`options`.*GenerationOptions"):
                answer()
        with pytest.raises(OptionError, match="`max_tokens` is -3"):
            chat.send("a", max_tokens=-3)
        assert chat.messages == []


def test_no_end_token_comes_before_the_least(tiny: LLM) -> None:
    (end,) = tiny.engine.tokenizer.eos_ids
    ending = {"logit_bias": {end: 1000.0}, "max_tokens": 9, "seed": 3}
    for temperature in (0.0, 1.0):
        answers = [
            tiny.generate(PROMPT, temperature=temperature, min_tokens=least, **ending)
            for least in (0, 1, 4, 9, 50)
        ]
        assert [len(answer.tokens) for answer in answers] == [1, 2, 5, 9, 9]
        assert [end in answer.tokens for answer in answers] == [True, True, True, False, False]
