"""Answers that read the best blocks of their context alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from inspection import draft_always, draft_as, set_costs
from loops import together

from edgellm import Completion, OptionError
from edgellm.cache import groups
from edgellm.engine.one_sequence import compute_tokens
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.kernels.sealed_blocks import allocate_shortlists
from edgellm.llm import LLM, load

pytestmark = pytest.mark.skipif(library() is None, reason="installed without a compiler")

TOKENS = [7, *((7 * i + i // 11) % 250 for i in range(780))]
ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}
READ = 4 * BLOCK


@pytest.fixture(scope="module")
def bundle(deep_model: Path) -> str:
    return str(load(str(deep_model)).engine.bundle.path)


@pytest.fixture(autouse=True)
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks on a shortlist, of the four that are sealed behind 768 tokens."""
    monkeypatch.setattr(groups, "allocate_shortlists", partial(allocate_shortlists, least=2))


def start(bundle: str, kv_read: int | None = READ, **options: Any) -> LLM:
    return load(bundle, kv_format="k4v4", kv_read=kv_read, **{"ctx_size": 1024, **options})


def same(found: Completion, expected: Completion) -> None:
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs


def test_a_number_as_large_as_the_context_reads_all(bundle: str) -> None:
    expected = start(bundle, None).generate(TOKENS, **ANSWER)
    same(start(bundle, 1024).generate(TOKENS, **ANSWER), expected)
    found = start(bundle).generate(TOKENS, **ANSWER)
    assert found.logprobs is not None
    assert expected.logprobs is not None
    assert found.logprobs[0] == expected.logprobs[0]  # of the prompt's last row
    assert found.logprobs[1] != expected.logprobs[1]


def test_prefixes_forks_rewinds_and_files(bundle: str, tmp_path: Path) -> None:
    """A session goes on with what its answers have computed; others find what prompts have."""
    llm = start(bundle)
    session = llm.session()
    session.append(TOKENS)
    first = session.generate(**ANSWER)
    session.append(TOKENS[:9])
    expected = session.generate(**ANSWER)
    # the same tokens as a prompt alone
    tokens = [*TOKENS, *first.tokens, *TOKENS[:9]]
    again = llm.generate(tokens, **ANSWER)
    assert again.stats.cached_tokens <= len(TOKENS)
    same(again, start(bundle).generate(tokens, **ANSWER))
    branch = session.fork()
    for each in (session, branch):
        each.rewind(len(TOKENS) + len(first.tokens) + 9)
        same(each.generate(**ANSWER), expected)
    session.rewind(len(TOKENS) + len(first.tokens) + 9)
    session.save(tmp_path / "saved")
    restored = start(bundle).load_session(tmp_path / "saved")
    assert restored.cached == session.cached > len(TOKENS)
    same(restored.generate(**ANSWER), expected)
    session.rewind(len(TOKENS))
    same(session.generate(**ANSWER), first)


def test_rows_choose_among_shortlists(bundle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = start(bundle).generate(TOKENS, **ANSWER)
    monkeypatch.setattr(groups, "allocate_shortlists", allocate_shortlists)
    assert start(bundle).generate(TOKENS, **ANSWER).logprobs != short.logprobs


@pytest.mark.parametrize("right", [0, 1, 3, 7])
def test_drafts_that_are_rejected_behind_a_shortlist(
    bundle: str, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = start(bundle).generate(TOKENS, speculate=False, **ANSWER)

    def draft(tokens: list[int]) -> list[int]:
        at = len(tokens) - len(TOKENS)
        return [*plain.tokens[at : at + right], *[3] * 20]

    draft_as(monkeypatch, draft)
    found = start(bundle).generate(TOKENS, **ANSWER)
    assert found.stats.drafted_tokens > 0
    same(found, plain)


def test_drafts(bundle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = start(bundle)
    for length in (READ - 2, 6 * BLOCK - 5):
        plain = llm.generate(TOKENS[:length], speculate=False, **ANSWER)
        draft_always(monkeypatch, [plain.tokens[0], 3, plain.tokens[1], 7, 9, 2, 1])
        found = llm.generate(TOKENS[:length], **ANSWER)
        assert found.stats.drafted_tokens > 0
        same(found, plain)


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", ["stall_free", "layered"])
def test_answers_that_give_their_blocks_away(bundle: str, scheduling: str) -> None:
    """Before and behind the place from which on they choose."""
    options = {**ANSWER, "max_tokens": 300}
    calls = [([i, *TOKENS[: 250 + 60 * (i % 2)]], options) for i in range(4)]
    small = start(bundle, cache_size=1024, scheduling=scheduling)
    found = together(small, calls)
    assert sum(answer.stats.preempted for answer in found) > 0
    for each, (prompt, _) in zip(found, calls, strict=True):
        same(each, start(bundle).generate(prompt, **options))


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", ["stall_free", "layered"])
def test_a_context_that_shifts_is_computed_again(bundle: str, scheduling: str) -> None:
    options = {**ANSWER, "max_tokens": 400, "context_policy": "shift", "speculate": False}
    expected = start(bundle).generate(TOKENS, **options)
    assert expected.stats.dropped_tokens > 0
    assert len(expected.tokens) == 400
    llm = start(bundle, cache_size=4096, scheduling=scheduling)
    set_costs(llm, 1e-3)  # few rows in a step
    found, _ = together(llm, [(TOKENS, options), ([9, *TOKENS[:40]], options)])
    same(found, expected)


def test_rows_before_the_place_are_found_by_all(bundle: str) -> None:
    llm = start(bundle)
    sequence = llm.engine.cache.sequence()
    compute_tokens(llm.engine.decoder, TOKENS[: READ - 3], sequence, answers=True)
    assert sequence.shareable is None
    compute_tokens(llm.engine.decoder, TOKENS[READ - 3 : READ + 2], sequence, answers=True)
    assert sequence.shareable == READ
    sequence.truncate(READ)
    assert sequence.shareable is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_format": "int8"}, "take one of them, or leave out"),
        ({"kv_read": 511}, "`kv_read` is 511"),
        ({"kv_read": 512.5}, "`kv_read` is 512.5"),
        ({"kv_read": 1 << 31}, "`kv_read` is 2147483648"),
        ({"decode": "portable"}, "take native for both"),
    ],
)
def test_what_cannot_choose_is_refused(bundle: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(bundle, **{"kv_format": "k4v4", "kv_read": 512, **options})
