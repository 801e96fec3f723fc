"""A draft model by itself: the token after a token is the next larger one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine_without_model import VOCABULARY, Backend, start
from inspection import used_blocks

from edgellm.backends.batch import Rows, Span
from edgellm.engine.draft_model import DraftModel, ModelDrafter
from edgellm.errors import CacheFullError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.sampling import Logits

CTX = 256


class Counting(Backend):
    """Notes the tokens of each step; from `unsure` on all tokens are as likely."""

    def __init__(self, unsure: int = VOCABULARY) -> None:
        self.steps: list[list[int]] = []
        self._unsure = unsure

    def _rows(self, span: Span) -> Rows:
        self.steps.append(list(span.tokens))
        rows = super()._rows(span)
        if span.tokens[-1] < self._unsure:
            return rows
        even = np.zeros(VOCABULARY, np.float32)
        return Rows(rows.hidden, [Logits(even, float(np.log(VOCABULARY))) for _ in rows.logits])


def draft_model(backend: Backend, *, blocks: int = 8, **changes: Any) -> tuple[Any, DraftModel]:
    """A model whose cache it may have, and the draft model."""
    llm = start(CTX, blocks=blocks)
    values: dict[str, Any] = {"rows": VOCABULARY, "tokens": 3, "p_min": 0.5, "ctx_size": CTX}
    values |= changes
    return llm, DraftModel(decoder=backend, cache=llm.engine.cache, token_steps=0.4, **values)


def guess(drafter: ModelDrafter, tokens: Sequence[int], count: int = 3) -> list[int]:
    assert drafter.evidence(tokens) is not None
    return drafter.propose(tokens, count)


def caught_up(drafter: ModelDrafter, tokens: Sequence[int]) -> list[int]:
    """Its guess when it has all tokens."""
    while behind(drafter, tokens) > 1:
        found = guess(drafter, tokens)
    return found


def behind(drafter: ModelDrafter, tokens: Sequence[int]) -> int:
    evidence = drafter.evidence(tokens)
    assert evidence is not None
    return evidence.behind


def test_it_computes_what_it_lacks_in_one_step() -> None:
    backend = Counting()
    _, model = draft_model(backend)
    drafter = model.drafter("")
    assert guess(drafter, [5, 7, 9]) == [10, 11, 12]
    assert backend.steps == [[5, 7, 9], [10], [11]]
    assert guess(drafter, [5, 7, 9, 10, 11, 12, 13]) == [14, 15, 16]  # all were right
    assert backend.steps[3:] == [[12, 13], [14], [15]]
    assert guess(drafter, [5, 7, 9, 10, 11, 12, 13, 14, 40]) == [41, 42, 43]  # one was right
    assert backend.steps[6:] == [[40], [41], [42]]
    assert guess(drafter, [5, 7, 8]) == [9, 10, 11]  # somebody went back
    assert backend.steps[9:] == [[8], [9], [10]]


def test_it_stops_where_it_is_not_sure() -> None:
    _, model = draft_model(Counting(unsure=11))
    assert guess(model.drafter(""), [5, 9]) == [10, 11]
    assert guess(model.drafter(""), [5, 30]) == []


def test_it_stops_at_the_end_of_its_context() -> None:
    _, model = draft_model(Counting(), ctx_size=5)
    drafter = model.drafter("")
    assert guess(drafter, [1, 2, 3, 4]) == [5, 6]
    assert drafter.evidence([1, 2, 3, 4, 5]) is None


def test_it_knows_no_rows_that_one_of_the_models_lacks() -> None:
    _, model = draft_model(Counting(), rows=20)
    drafter = model.drafter("")
    assert guess(drafter, [17]) == [18, 19]
    assert drafter.evidence([17, 18, 25]) is None


def test_it_catches_up_a_few_tokens_at_a_time() -> None:
    backend = Counting()
    _, model = draft_model(backend)
    drafter = model.drafter("")
    tokens = [i % 50 for i in range(150)]
    assert [behind(drafter, tokens), guess(drafter, tokens)] == [150, []]
    assert [behind(drafter, tokens), guess(drafter, tokens)] == [86, []]
    assert [behind(drafter, tokens), guess(drafter, tokens)] == [22, [50, 51, 52]]
    assert [len(step) for step in backend.steps] == [64, 64, 22, 1, 1]


def test_tokens_that_a_full_context_forgets() -> None:
    _, model = draft_model(Counting())
    drafter = model.drafter("")
    tokens = list(range(40))
    assert guess(drafter, tokens) == [40, 41, 42]
    assert behind(drafter, tokens[:4] + tokens[20:]) == 20
    assert guess(drafter, tokens[:4] + tokens[20:]) == [40, 41, 42]


def test_what_was_closed_is_found_again_by_those_of_the_same_salt() -> None:
    llm, model = draft_model(Counting())
    drafter, tokens = model.drafter("a"), list(range(40))
    assert guess(drafter, tokens) == [40, 41, 42]
    drafter.close()
    assert used_blocks(llm) == 0
    assert behind(drafter, tokens) == 1
    assert behind(model.drafter("a"), [*tokens, 40, 9]) == 1  # 40 was a guess
    assert behind(model.drafter("a"), [*tokens, 50, 9]) == 2
    assert behind(model.drafter("b"), tokens) == 40


def test_answers_that_fill_its_cache() -> None:
    _, model = draft_model(Counting(), blocks=3)
    first = model.drafter("")
    tokens = [i % 50 for i in range(BLOCK + 20)]
    caught_up(first, tokens)
    other = [49 - token for token in tokens]
    second = model.drafter("")
    assert guess(second, other) == []
    with pytest.raises(CacheFullError):
        caught_up(second, other)
    first.close()
    assert caught_up(second, other)
