"""Prompts whose whole blocks read the part of their context that has most of the attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inspection import draft_always
from loops import together

from edgellm import Completion, OptionError
from edgellm.kernels.kv_blocks import BLOCK, DENSE_POSITIONS
from edgellm.kernels.native import library
from edgellm.llm import LLM, load

pytestmark = pytest.mark.skipif(library() is None, reason="installed without a compiler")

# Two whole blocks that read a part, and a part of a block.
LENGTH = DENSE_POSITIONS + 2 * BLOCK + 30
TOKENS = [7, *((7 * i + i // 11 + i * i // 97) % 250 for i in range(LENGTH - 1))]
ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def bundle(long_model: Path) -> str:
    return str(load(str(long_model)).engine.bundle.path)


def start(bundle: str, prefill_mass: float | None = 0.3, **options: Any) -> LLM:
    return load(bundle, prefill_mass=prefill_mass, **{"ctx_size": 5120, **options})


@pytest.fixture(scope="module")
def expected(bundle: str) -> Completion:
    return start(bundle).generate(TOKENS, **ANSWER)


def same(found: Completion, expected: Completion) -> None:
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs


def test_the_whole_mass_reads_all(bundle: str, expected: Completion) -> None:
    dense = start(bundle, None).generate(TOKENS, **ANSWER)
    same(start(bundle, 1).generate(TOKENS, **ANSWER), dense)
    assert expected.logprobs != dense.logprobs


@pytest.mark.slow
def test_cut_anywhere_and_in_company(bundle: str, expected: Completion) -> None:
    for options in ({"time_target_ms": 1}, {"scheduling": "layered"}, {"scheduling": "serial"}):
        llm = start(bundle, cache_size=12_000, **options)
        calls = [(TOKENS, ANSWER), ([9, *TOKENS[: DENSE_POSITIONS + 50]], ANSWER)]
        calls += [([i, 5, 3], ANSWER) for i in range(20)]
        same(together(llm, calls)[0], expected)


@pytest.mark.slow
def test_prefixes_forks_rewinds_and_files(
    bundle: str, expected: Completion, tmp_path: Path
) -> None:
    """Whole blocks of a prompt are found again, and nothing of an answer."""
    llm = start(bundle)
    session = llm.session()
    session.append(TOKENS)
    same(session.generate(**ANSWER), expected)
    again = llm.generate(TOKENS, **ANSWER)
    same(again, expected)
    assert again.stats.cached_tokens == LENGTH // BLOCK * BLOCK
    for cut in (
        DENSE_POSITIONS + 60,
        DENSE_POSITIONS + BLOCK,
    ):  # within a block, and where one ends
        tokens = [*TOKENS[:cut], *expected.tokens]
        same(llm.generate(tokens, **ANSWER), start(bundle).generate(tokens, **ANSWER))
    answer = llm.generate(TOKENS, **{**ANSWER, "max_tokens": 120})  # to the end of a block
    tokens = [*TOKENS, *answer.tokens, *TOKENS[:9]]
    same(llm.generate(tokens, **ANSWER), start(bundle).generate(tokens, **ANSWER))
    session.append(TOKENS[:90])
    branch = session.fork()
    behind = session.generate(**ANSWER)
    same(branch.generate(**ANSWER), behind)
    session.save(tmp_path / "saved")
    restored = start(bundle).load_session(tmp_path / "saved")
    restored.rewind(LENGTH)
    same(restored.generate(**ANSWER), expected)
    session.rewind(LENGTH - 100)
    cut = start(bundle).generate(TOKENS[: LENGTH - 100], **ANSWER)
    same(session.generate(**ANSWER), cut)


@pytest.mark.slow
def test_answers_that_give_their_blocks_away(bundle: str) -> None:
    options = {**ANSWER, "max_tokens": 120}
    calls = [([i, *TOKENS[: DENSE_POSITIONS + 20 + 90 * i]], options) for i in range(2)]
    found = together(start(bundle, cache_size=8448), calls)
    assert sum(answer.stats.preempted for answer in found) > 0
    for each, (prompt, _) in zip(found, calls, strict=True):
        same(each, start(bundle).generate(prompt, **options))


def test_drafts(bundle: str, expected: Completion, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch, [expected.tokens[0], 3, expected.tokens[1], 7, 9, 2, 1])
    found = start(bundle).generate(TOKENS, **ANSWER)
    assert found.stats.drafted_tokens > 0
    same(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_format": "k8v4"}, "take that without `kv_budget`"),
        ({"kv_budget": 1024}, "take that without `kv_budget`"),
        ({"prefill_mass": 0}, "`prefill_mass` is 0"),
        ({"prefill_mass": 1.5}, "`prefill_mass` is 1.5"),
        ({"decode": "portable"}, "take native for both"),
    ],
)
def test_what_cannot_choose_is_refused(bundle: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(bundle, **{"prefill_mass": 0.9, **options})
