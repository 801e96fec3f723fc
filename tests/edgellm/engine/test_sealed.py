"""An engine whose cache seals blocks: whatever happens, answers are those of an empty cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import draft_always
from loops import together
from spill import needs_spill, on_disk
from tiny_models import make, save_tokenizer

from edgellm import Completion, OptionError
from edgellm.backends.host_attention import rope_tables
from edgellm.cache.groups import cache_bytes
from edgellm.engine.one_sequence import compute_prompt, compute_tokens
from edgellm.kernels.kv_blocks import BLOCK, KV_FORMATS, SealedBlocks
from edgellm.kernels.native import library
from edgellm.llm import LLM, load

pytestmark = pytest.mark.skipif(library() is None, reason="installed without a compiler")

# Up to past the place where the fourth block is sealed.
TOKENS = [7, *((7 * i + i // 11) % 250 for i in range(780))]
ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def bundle(tiny_model: Path) -> str:
    return str(load(str(tiny_model)).engine.bundle.path)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model five of whose six layers see 100 positions, and keep int8."""
    folder = tmp_path_factory.mktemp("windowed")
    sizes = {"sliding_window": 100, "max_position_embeddings": 1024, "vocab_size": 320}
    make("gemma3_text", folder, **sizes)
    save_tokenizer(folder)
    return str(load(str(folder)).engine.bundle.path)


@pytest.fixture(
    params=["k4v4", "of layers", "windows", pytest.param("in a file", marks=needs_spill)]
)
def llm(bundle: str, tmp_path: Path, request: pytest.FixtureRequest) -> LLM:
    if request.param == "of layers":
        return load(bundle, kv_format=("k4v2", "k8v4"), ctx_size=1024)
    if request.param == "windows":
        return load(request.getfixturevalue("windowed"), kv_format="k4v4", ctx_size=1024)
    return load(bundle, kv_format="k4v4", ctx_size=1024, kv_spill=on_disk(tmp_path))


def same(found: Completion, expected: Completion) -> None:
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs


def test_cuts_make_no_difference(llm: LLM) -> None:
    engine = llm.engine
    sequence = engine.cache.sequence()
    expected = compute_tokens(engine.decoder, TOKENS[:500], sequence)
    sequence.close()
    for cuts in ([383, 384, 385, 386, 500], [100, 127, 129, 499, 500]):
        other = load(str(engine.bundle.path), kv_format=engine.options.kv_format, ctx_size=1024)
        sequence, rows = other.engine.cache.sequence(), []
        for start, end in zip([0, *cuts], cuts, strict=False):
            rows.append(compute_tokens(other.engine.decoder, TOKENS[start:end], sequence))
        np.testing.assert_array_equal(np.concatenate(rows), expected)


def test_near_int8(llm: LLM) -> None:
    """The same weights: the answer of a random model hangs on little more than the cache, whose
    random values lose a third of themselves with 2 bits."""
    plain = load(str(llm.engine.bundle.path), ctx_size=1024)
    logits = []
    for each in (llm, plain):
        sequence = each.engine.cache.sequence()
        logits.append(compute_prompt(each.engine.prefill, TOKENS, sequence))
    error = np.abs(logits[0] - logits[1]).mean() / np.abs(logits[1]).mean()
    assert 0 < error < (0.34 if "k4v2" in llm.options.kv_format else 0.1)


def test_prefixes_forks_rewinds_and_files(llm: LLM, tmp_path: Path) -> None:
    bundle = str(llm.engine.bundle.path)
    expected = llm.generate(TOKENS, **ANSWER)
    again = llm.generate(TOKENS, **ANSWER)  # which is found
    assert again.stats.cached_tokens == len(TOKENS) - 1
    same(again, expected)
    fresh = load(bundle, kv_format=llm.options.kv_format, ctx_size=1024)
    for length in (300, 384, 640):  # a part is found
        found = fresh.generate(TOKENS[:length], **ANSWER)
        same(llm.generate(TOKENS[:length], **ANSWER), found)
    same(fresh.generate(TOKENS, **ANSWER), expected)
    session = fresh.session()
    session.append([*TOKENS, *TOKENS[:150]])
    session.generate(temperature=0, max_tokens=3)
    branch = session.fork()
    for each in (session, branch):
        each.rewind(len(TOKENS))
    same(session.generate(**ANSWER), expected)
    same(branch.generate(**ANSWER), expected)
    session.rewind(700)
    session.save(tmp_path / "saved")
    read = load(bundle, kv_format=llm.options.kv_format, ctx_size=1024)
    restored = read.load_session(tmp_path / "saved")
    assert restored.cached == session.cached
    # a rewind past what a window still holds begins anew
    windows = any(group.group.part == "all" for group in llm.engine.cache.groups)
    assert (restored.cached >= 384) == (not windows)
    restored.append(TOKENS[700:])
    same(restored.generate(**ANSWER), expected)


def test_drafts_over_the_end_of_a_block(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = TOKENS[: 4 * BLOCK - 5]
    plain = llm.generate(prompt, speculate=False, **ANSWER)
    draft_always(monkeypatch, [plain.tokens[0], 3, plain.tokens[1], 7, 9, 2, 1])
    found = llm.generate(prompt, **ANSWER)
    assert found.stats.drafted_tokens > 0
    same(found, plain)


def test_answers_that_give_their_blocks_away(bundle: str) -> None:
    """Preempted in a cache that holds one of them, and computed again."""
    small = load(bundle, kv_format="k4v4", ctx_size=1024, cache_size=1024)
    options = {**ANSWER, "max_tokens": 200}
    calls = [([i, *TOKENS[:250]], options) for i in range(4)]
    found = together(small, calls)
    assert sum(answer.stats.preempted for answer in found) > 0
    large = load(bundle, kv_format="k4v4", ctx_size=1024)
    for each, (prompt, _) in zip(found, calls, strict=True):
        same(each, large.generate(prompt, **options))


def test_blocks_outlive_the_process(bundle: str, tmp_path: Path) -> None:
    first = load(bundle, kv_format="k4v4", ctx_size=1024, kv_cache_dir=tmp_path)
    expected = first.generate(TOKENS, **ANSWER)
    first.close()
    second = load(bundle, kv_format="k4v4", ctx_size=1024, kv_cache_dir=tmp_path)
    found = second.generate(TOKENS, **ANSWER)
    assert found.stats.cached_tokens == len(TOKENS) // BLOCK * BLOCK
    same(found, expected)


def test_memory_counts_both_pools(llm: LLM) -> None:
    cache, memory = llm.engine.cache, llm.engine.memory
    each = [group.blocks.nbytes // group.blocks.count for group in cache.groups]
    tables = sum(table.nbytes for rope in rope_tables(llm.engine.config, 1024) for table in rope)
    pools = sum(size * group.pool.resident for size, group in zip(each, cache.groups, strict=True))
    assert memory.kv_cache + memory.spilled == pools + tables
    sealed = sum(g.blocks.nbytes for g in cache.groups if isinstance(g.blocks, SealedBlocks))
    assert memory.spilled == (0 if llm.options.kv_spill is None else sealed)
    sizes = {
        format: cache_bytes(llm.engine.config, format=format, ctx_size=1 << 17, blocks=1025)
        for format in KV_FORMATS
    }
    assert sizes["k4v2"] < sizes["k4v4"] < sizes["k8v4"] < sizes["int8"]


@pytest.mark.parametrize("options", [{"decode": "portable"}, {"prefill": "cpu"}])
def test_other_back_ends_are_refused(bundle: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="take native for both"):
        load(bundle, kv_format="k4v4", **options)
