"""A KV cache with a budget: the first block and the last ones stay, and answers are exact in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import draft_always
from loops import together

from edgellm import Completion, OptionError, SessionFileError
from edgellm.backends import selection
from edgellm.cache.eviction import LEAST_BUDGET, Sinks
from edgellm.cache.groups import CacheGroup, cache_bytes, context_blocks
from edgellm.cache.kv_cache import KVCache
from edgellm.engine import auto_backend
from edgellm.engine.one_sequence import compute_tokens
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import LLM, load

pytestmark = pytest.mark.skipif(library() is None, reason="installed without a compiler")

TOKENS = [7, *((7 * i + i // 11) % 250 for i in range(880))]
ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def bundle(tiny_model: Path) -> str:
    return str(load(str(tiny_model)).engine.bundle.path)


def start(bundle: str, kv_budget: int | None = LEAST_BUDGET, **options: Any) -> LLM:
    return load(bundle, kv_budget=kv_budget, **{"ctx_size": 1024, **options})


def same(found: Completion, expected: Completion) -> None:
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs


def test_a_budget_as_large_as_the_context_forgets_nothing(bundle: str) -> None:
    expected = start(bundle, None).generate(TOKENS, **ANSWER)
    found = start(bundle, 1024 + 256).generate(TOKENS, **ANSWER)
    same(found, expected)
    assert found.stats.evicted_tokens == 0
    found = start(bundle).generate(TOKENS, **ANSWER)
    assert found.logprobs != expected.logprobs
    # of 8 blocks the first and the last two stay
    assert found.stats.evicted_tokens == 5 * BLOCK


@pytest.mark.parametrize("kv_format", ["int8", "f32"])
def test_cuts_make_no_difference_and_no_cut_takes_more(bundle: str, kv_format: str) -> None:
    cuts = ([256, 300, 301, 511, 513, 768, 880], [*range(250, 880, 250), 880])
    found = []
    for ends in cuts:
        engine = start(bundle, kv_format=kv_format).engine
        sequence, rows = engine.cache.sequence(), []
        (table,) = sequence.tables
        for begin, end in zip([0, *ends], ends, strict=False):
            with sequence.reserved(end - begin):
                assert len(table.held) * BLOCK <= LEAST_BUDGET
            rows.append(compute_tokens(engine.decoder, TOKENS[begin:end], sequence))
        found.append(np.concatenate(rows))
    np.testing.assert_array_equal(*found)


def test_prefixes_forks_rewinds_and_files(bundle: str, tmp_path: Path) -> None:
    llm = start(bundle)
    expected = llm.generate(TOKENS, **ANSWER)
    again = llm.generate(TOKENS, **ANSWER)  # which is found
    assert again.stats.cached_tokens == len(TOKENS) - 1
    same(again, expected)
    for length in (300, 640, 800):  # its last blocks are gone, or still there
        fresh = start(bundle)
        found = fresh.generate(TOKENS[:length], **ANSWER)
        same(llm.generate(TOKENS[:length], **ANSWER), found)
        same(fresh.generate(TOKENS, **ANSWER), expected)
    session = llm.session()
    session.append([*TOKENS, *TOKENS[:120]])
    session.generate(temperature=0, max_tokens=3)
    branch = session.fork()
    for each in (session, branch):
        each.rewind(len(TOKENS))
        same(each.generate(**ANSWER), expected)
    session.rewind(len(TOKENS))
    session.save(tmp_path / "saved")
    restored = start(bundle).load_session(tmp_path / "saved")
    assert restored.cached == session.cached > 0
    same(restored.generate(**ANSWER), expected)
    with pytest.raises(SessionFileError):
        start(bundle, 768).load_session(tmp_path / "saved")


def test_drafts_over_the_end_of_a_block(bundle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, prompt = start(bundle), TOKENS[: 7 * BLOCK - 5]
    plain = llm.generate(prompt, speculate=False, **ANSWER)
    draft_always(monkeypatch, [plain.tokens[0], 3, plain.tokens[1], 7, 9, 2, 1])
    found = llm.generate(prompt, **ANSWER)
    assert found.stats.drafted_tokens > 0
    same(found, plain)


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", ["stall_free", "layered"])
def test_answers_that_give_their_blocks_away(bundle: str, scheduling: str) -> None:
    options = {**ANSWER, "max_tokens": 150}
    calls = [([i, *TOKENS[: 600 + 40 * i]], options) for i in range(3)]
    small = start(bundle, cache_size=1024, scheduling=scheduling)
    found = together(small, calls)
    for each, (prompt, _) in zip(found, calls, strict=True):
        same(each, start(bundle).generate(prompt, **options))


def test_a_context_that_shifts_is_computed_again(bundle: str) -> None:
    options = {**ANSWER, "max_tokens": 300, "context_policy": "shift"}
    found = start(bundle).generate(TOKENS, **options)
    assert found.stats.dropped_tokens > 0
    assert len(found.tokens) == 300
    same(start(bundle).generate(TOKENS, **options), found)


def test_blocks_outlive_the_process(bundle: str, tmp_path: Path) -> None:
    first = start(bundle, kv_cache_dir=tmp_path)
    expected = first.generate(TOKENS, **ANSWER)
    first.close()
    second = start(bundle, kv_cache_dir=tmp_path)
    found = second.generate(TOKENS, **ANSWER)
    assert found.stats.cached_tokens > 0
    same(found, expected)
    other = start(bundle, None, kv_cache_dir=tmp_path)  # another attention, other K and V
    assert other.generate(TOKENS, **ANSWER).stats.cached_tokens == 0


def test_memory_does_not_grow_with_the_context(bundle: str) -> None:
    config, options = start(bundle).engine.config, start(bundle).options
    sizes = []
    for policy in (options.eviction, None):
        for n in (4096, 1 << 17):
            blocks = context_blocks(config, n, format="int8", policy=policy)
            sizes.append(
                cache_bytes(config, format="int8", ctx_size=n, blocks=blocks, policy=policy)
            )
    assert sizes[0] == sizes[1] < sizes[2] / 3 < sizes[3] / 64


def test_a_pool_of_a_budget_keeps_as_many_prefixes_as_asked_for(bundle: str) -> None:
    llm = start(bundle, cache_size=4096)
    (group,) = llm.engine.cache.groups
    assert group.pool.resident == group.blocks.count  # as the estimate has them
    prompts = [[i, *TOKENS[:400]] for i in range(6)]
    for prompt in prompts:
        llm.generate(prompt, temperature=0, max_tokens=1)
    found = [llm.generate(prompt, temperature=0, max_tokens=1) for prompt in prompts]
    assert [each.stats.cached_tokens for each in found] == [400] * 6


def test_a_pool_of_one_budget_is_enough_for_a_longer_context(bundle: str) -> None:
    llm = start(bundle, cache_size=LEAST_BUDGET)
    assert llm.engine.ctx_size == 1024
    same(llm.generate(TOKENS, **ANSWER), start(bundle).generate(TOKENS, **ANSWER))
    assert start(bundle, cache_size=LEAST_BUDGET, ctx_size=None).engine.ctx_size > LEAST_BUDGET
    with pytest.raises(OptionError, match=f"it must hold {LEAST_BUDGET} tokens of one session"):
        start(bundle, cache_size=LEAST_BUDGET - 1)


def test_auto_is_what_has_a_budget(bundle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_usual_decode", lambda: "triton")
    monkeypatch.setattr(auto_backend, "auto_choice", lambda *_: pytest.fail("asked for another"))
    for options in ({"kv_budget": LEAST_BUDGET}, {"kv_budget": None, "kv_format": "k4v4"}):
        engine = start(bundle, **options).engine
        assert (engine.selection.prefill, engine.selection.decode) == ("native", "native")


def test_a_budget_without_effect_counts_nothing() -> None:
    group = CacheGroup((0, 1), 256, 2, 32)
    cache = KVCache(
        [group], format="int8", ctx_size=2048, blocks=32, fingerprint=b"", policy=Sinks(2)
    )
    assert cache.policy is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_budget": LEAST_BUDGET - 1}, "`kv_budget` is 639"),
        ({"kv_format": "k4v4"}, "take one of int8, f16, f32"),
        ({"kv_policy": "oldest"}, "sinks"),
        ({"decode": "portable"}, "take native for both"),
        ({"prefill": "cpu"}, "take native for both"),
    ],
)
def test_what_has_no_budget_is_refused(bundle: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        start(bundle, **options)
