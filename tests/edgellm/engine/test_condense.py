"""Sessions whose context is condensed: they go on, are forked, saved, cut back and moved aside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import used_blocks
from tiny_models import make, save_tokenizer

from edgellm import (
    CacheFullError,
    Completion,
    ContextOverflowError,
    OptionError,
    SessionFileError,
    UnsupportedModelError,
)
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.session import Session

pytestmark = pytest.mark.skipif(library() is None, reason="installed without a compiler")

TOKENS = [7, *((7 * i + i // 11) % 250 for i in range(699))]
BEHIND = [(5 * i) % 250 for i in range(20)]
ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def bundle(tiny_model: Path) -> str:
    return str(load(str(tiny_model)).engine.bundle.path)


def start(bundle: str, **options: Any) -> LLM:
    return load(bundle, **{"ctx_size": 1024, **options})


def session_of(llm: LLM, keep: float | None) -> Session:
    """A session of all tokens, condensed unless `keep` is None."""
    session = llm.session()
    session.append(TOKENS)
    if keep is not None:
        session.condense(keep)
    return session


def answer(session: Session) -> Completion:
    """What comes behind more tokens; the session is left as it was."""
    length = len(session.tokens)
    session.append(BEHIND)
    completion = session.generate(**ANSWER)
    session.rewind(length)
    return completion


def same(found: Completion, expected: Completion) -> None:
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs


@pytest.fixture(scope="module")
def of_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A bundle of a tiny model of a family."""

    @cache
    def make_bundle(family: str) -> str:
        folder = tmp_path_factory.mktemp(family)
        sizes = {"max_position_embeddings": 1024, "vocab_size": 320}
        make(family, folder, **sizes, **({"sliding_window": 100} if "gemma" in family else {}))
        save_tokenizer(folder)
        return str(load(str(folder)).engine.bundle.path)

    return make_bundle


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_layers_with_windows_or_states_stay_as_they_are(
    of_family: Callable[[str], str], family: str, tmp_path: Path
) -> None:
    llm = start(of_family(family))
    expected = answer(session_of(llm, None))
    same(answer(session_of(llm, 1)), expected)
    with session_of(llm, None) as session:
        session.generate(max_tokens=0)
        before = used_blocks(llm)
        session.condense(0.3)
        assert used_blocks(llm) < before
        session.save(tmp_path / "saved")
        expected = answer(session)
    restored = start(of_family(family)).load_session(tmp_path / "saved")
    assert restored.cached == len(TOKENS)
    same(answer(restored), expected)


@pytest.mark.parametrize("kv_format", ["int8", "f32"])
def test_all_rows_are_the_whole_context(bundle: str, kv_format: str) -> None:
    llm = start(bundle, kv_format=kv_format)
    expected = answer(session_of(llm, None))
    found = answer(session_of(llm, 1))
    same(found, expected)
    assert found.stats.cached_tokens == len(TOKENS)


def test_a_part_of_the_rows_takes_a_part_of_the_cache(bundle: str) -> None:
    llm = start(bundle)
    session = session_of(llm, None)
    expected, whole = answer(session), used_blocks(llm)
    told = session.condense(0.3)
    assert told.tokens == len(TOKENS) // BLOCK * BLOCK
    assert 0.25 < told.keep < 0.35
    # two blocks of heads' blocks, and the last block, in place of six
    assert (whole, used_blocks(llm)) == (6, 3)
    assert list(session.tokens) == TOKENS
    assert session.cached == len(TOKENS)
    found = answer(session)
    assert found.stats.cached_tokens == len(TOKENS)
    assert found.logprobs is not None
    assert expected.logprobs is not None
    assert found.logprobs[0] != expected.logprobs[0]
    session.close()
    assert used_blocks(llm) == 0


def test_asyncio_condenses_the_same(bundle: str) -> None:
    llm = start(bundle)
    session, expected = session_of(llm, None), session_of(start(bundle), 0.4)
    condensed = asyncio.run(session.acondense(0.4))
    assert condensed.keep < 1
    same(answer(session), answer(expected))


def test_what_is_dropped_is_not_read(bundle: str) -> None:
    """Blocks that are free hold NaN: none of them is read again."""
    llm = start(bundle)
    session = session_of(llm, 0.3)
    expected = answer(session)
    [group] = llm.engine.cache.groups
    for block in range(group.blocks.count):
        if group.pool.references(block) == 0:
            for array in group.blocks.block(block):
                array[...] = np.nan if array.dtype.kind == "f" else 77
    same(answer(session), expected)


def test_other_prompts_find_no_condensed_block(bundle: str) -> None:
    llm = start(bundle)
    expected = start(bundle).generate([*TOKENS, *BEHIND], **ANSWER)
    session = session_of(llm, 0.3)
    answer(session)
    same(llm.generate([*TOKENS, *BEHIND], **ANSWER), expected)
    # what was computed to condense it has seen a part
    repeated = [*TOKENS, *llm.tokenize("\n\nRepeat the previous context:\n\n"), *TOKENS[:200]]
    found = llm.generate(repeated, **ANSWER)
    same(found, start(bundle).generate(repeated, **ANSWER))
    assert found.stats.cached_tokens <= len(TOKENS)
    # and the session stays as it is where others have computed its text
    assert answer(session).logprobs != expected.logprobs


def test_an_answer_begins_behind_whole_blocks(bundle: str) -> None:
    """With its last token, whose block is not condensed."""
    llm = start(bundle)
    session = llm.session()
    session.append(TOKENS[:640])
    assert session.condense(0.3).tokens == 512
    before = used_blocks(llm)
    assert session.generate(**ANSWER).stats.cached_tokens == 639
    assert used_blocks(llm) == before + 1


def test_what_is_not_exact_is_computed_first(bundle: str) -> None:
    """Copies, and what stands behind forgotten tokens."""
    llm = start(bundle)
    session = session_of(llm, None)
    session.generate(max_tokens=0)
    changed = [*TOKENS[:50], 3, *TOKENS[50:]]
    session.replace(changed, recompute=0.1)
    session.condense(1)
    plain = start(bundle).session()
    plain.append(changed)
    same(answer(session), answer(plain))
    session.replace([*changed, 5])
    assert session.cached == len(changed)
    session.close()
    assert used_blocks(llm) == 0


def test_forks_rewinds_and_files(bundle: str, tiny_model: Path, tmp_path: Path) -> None:
    llm = start(bundle)
    session = session_of(llm, 0.3)
    expected = answer(session)
    branch = session.fork()
    session.save(tmp_path / "saved")
    session.close()
    same(answer(branch), expected)
    restored = start(bundle).load_session(tmp_path / "saved")
    assert restored.cached == len(TOKENS)
    same(answer(restored), expected)
    with pytest.raises(OptionError, match="condensed already"):
        restored.condense(0.2)
    other = load(str(tiny_model), ctx_size=1024, decode="portable", prefill="cpu")
    with pytest.raises(SessionFileError, match="`decode` native"):
        other.load_session(tmp_path / "saved")
    whole = start(bundle)
    for length in (650, 300):  # behind what was condensed, and into it
        for each, other in ((branch, restored), (session_of(whole, None), None)):
            each.rewind(length)
            if other is not None:
                other.rewind(length)
                same(answer(each), answer(other))
    assert branch.cached <= 300
    plain = whole.session()
    plain.append(TOKENS[:300])
    same(answer(branch), answer(plain))


def test_it_is_moved_aside_and_put_back(bundle: str) -> None:
    """As answers are that give their place away: copied to memory, with the layout of its heads."""
    llm = start(bundle)
    session = session_of(llm, 0.3)
    expected, context = answer(session), session._context
    llm.engine.thread.call(context.give_back)
    assert (session.cached, used_blocks(llm)) == (0, 0)
    assert context.needed == [4]  # and of a whole one 7
    same(answer(session), expected)
    assert used_blocks(llm) == 3
    llm.engine.thread.call(context.give_back)
    session.replace([*TOKENS, 9])  # as a chat does
    session.rewind(len(TOKENS))
    same(answer(session), expected)


def test_others_do_not_take_its_blocks(bundle: str) -> None:
    llm = start(bundle, cache_size=1024)
    session = llm.session()
    session.append(TOKENS[:600])
    session.condense(0.3)
    expected = answer(session)
    with pytest.raises(CacheFullError, match="sessions that cannot be computed again"):
        llm.generate([3, *TOKENS, *TOKENS[:200]], **ANSWER)
    same(answer(session), expected)


def test_a_full_context_computes_the_rest_again(bundle: str) -> None:
    llm = start(bundle)
    session = session_of(llm, 0.3)
    options = {**ANSWER, "max_tokens": 400}
    found = session.generate(context_policy="shift", **options)
    assert found.stats.generation_tokens == 400
    assert len(session.tokens) < 1024


def test_changes_in_the_middle_copy_nothing_of_it(bundle: str) -> None:
    llm = start(bundle)
    session = session_of(llm, 0.3)
    changed = [*TOKENS[:50], 3, *TOKENS[50:]]
    session.replace(changed, recompute=0.1)
    assert session.composed is not None
    plain = start(bundle).session()
    plain.append(changed)
    assert session.composed.copied_tokens == 0
    same(answer(session), answer(plain))


def test_what_cannot_be_condensed_is_refused(bundle: str, tiny_model: Path) -> None:
    def refused(
        error: type[Exception], problem: str, *, model: str = bundle, **options: Any
    ) -> None:
        with start(model, **options) as llm, pytest.raises(error, match=problem):
            session_of(llm, 0.3)

    refused(OptionError, "take native for both", model=str(tiny_model), decode="portable")
    refused(OptionError, "leave them out", kv_budget=768)
    refused(UnsupportedModelError, "packs no blocks, such as int8", kv_format="k4v4")
    refused(ContextOverflowError, "raise `ctx_size` to 8", ctx_size=768)
    with start(bundle) as llm:
        session = llm.session()
        session.append(TOKENS[:256])
        with pytest.raises(OptionError, match="256 tokens; 257 are the fewest"):
            session.condense()
        with pytest.raises(OptionError, match=r"`keep` is 1\.5"):
            session.condense(1.5)
