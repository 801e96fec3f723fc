"""Contexts composed of documents that were computed alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from inspection import context, used_blocks

from edgellm import (
    BatchRequest,
    CacheFullError,
    ContextOverflowError,
    GenerationOptions,
    OptionError,
    UnsupportedModelError,
)
from edgellm.kernels.hadamard import reference as hadamard
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.session import Session

GREEDY = GenerationOptions(temperature=0, max_tokens=6, repeat_penalty=1.0)
LENGTHS = (37, 150, 128, 219, 9)  # the ends of documents fall anywhere in a block


def opened(folder: str, *, cache_size: int = 32 * BLOCK, kv_format: str = "f32") -> LLM:
    return load(folder, ctx_size=6 * BLOCK, cache_size=cache_size, kv_format=kv_format)


def parts_of(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 320, length).tolist() for length in LENGTHS]


def first_layer(session: Session) -> tuple[np.ndarray, np.ndarray]:
    """K and V of the first layer, which depend on tokens and positions alone."""
    held = context(session).sequence
    view, slot = held.view(0)
    rows = [divmod(position, BLOCK) for position in range(len(held))]
    k = np.stack([view.blocks.key_rows(view.table[b], slot, r) for b, r in rows]).astype(float)
    v = np.stack([view.blocks.value_rows(view.table[b], slot, r) for b, r in rows]).astype(float)
    if view.blocks.k_scale is not None and view.blocks.v_scale is not None:
        scales = [[a[view.table[b], slot, :, r] for b, r in rows] for a in view.blocks.arrays[2:]]
        k, v = (x * np.stack(scale)[..., None] for x, scale in zip((k, v), scales, strict=True))
        k = hadamard.transform(k)
    return k, v


@pytest.mark.parametrize(("kv_format", "tolerance"), [("f32", 1e-5), ("int8", 0.02)])
@pytest.mark.parametrize("recompute", [0, 0.1])
def test_k_and_v_are_those_of_their_positions(
    folder: str, kv_format: str, tolerance: float, recompute: float
) -> None:
    parts = parts_of()
    plain = opened(folder, kv_format=kv_format).session()
    plain.append([token for part in parts for token in part])
    plain.generate(max_tokens=0)
    composed = opened(folder, kv_format=kv_format).compose(parts, recompute=recompute)
    answer = composed.generate(max_tokens=0)
    counts = composed.composed
    assert counts is not None
    assert composed.tokens == plain.tokens
    assert counts.copied_tokens + counts.computed_tokens == sum(LENGTHS)
    again = {0: 0, 0.1: 15 + 13 + 22}[recompute]
    assert counts.computed_tokens == LENGTHS[0] + LENGTHS[-1] + again
    assert counts.alone_tokens == sum(LENGTHS[1:-1]) + 1  # the begin token
    assert answer.stats.prompt_tokens - answer.stats.cached_tokens == LENGTHS[-1]
    for found, expected in zip(first_layer(composed), first_layer(plain), strict=True):
        assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_all_computed_in_place_is_the_plain_session(folder: str) -> None:
    llm, parts = opened(folder), parts_of()
    session = llm.compose(parts, recompute=1)
    plain = opened(folder).session()
    plain.append([token for part in parts for token in part])
    found, expected = session.generate(options=GREEDY), plain.generate(options=GREEDY)
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
    assert session.composed is not None
    assert session.composed.copied_tokens == session.composed.alone_tokens == 0


def test_asyncio_composes_the_same_and_a_cancelled_one_holds_nothing(folder: str) -> None:
    llm, parts = opened(folder), parts_of()

    async def composed() -> Session:
        begun = asyncio.create_task(llm.acompose(parts))
        await asyncio.sleep(0)  # it waits for its first request now
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun
        assert used_blocks(llm) == 0
        return await llm.acompose(parts)

    session, expected = asyncio.run(composed()), opened(folder).compose(parts)
    assert session.composed is not None
    assert session.composed == replace(
        expected.composed or session.composed, alone_tokens=session.composed.alone_tokens
    )
    found, answer = session.generate(options=GREEDY), expected.generate(options=GREEDY)
    assert (found.tokens, found.logprobs) == (answer.tokens, answer.logprobs)


def test_requests_that_go_on_from_it_keep_the_copies(folder: str) -> None:
    llm = opened(folder)
    session = llm.compose(parts_of())
    session.generate(max_tokens=0)
    with session.fork() as fork:
        fork.append([5, 6])
        expected = fork.generate(options=GREEDY)
    request = BatchRequest(prompt=[*session.tokens, 5, 6], session=session)
    [answer] = llm.batch([request], options=GREEDY)
    assert answer.result().stats.cached_tokens == len(session.tokens)
    assert answer.result().logprobs == expected.logprobs


def test_documents_are_found_in_another_order_and_no_plain_text_begins_with_copies(
    folder: str,
) -> None:
    llm, (first, *documents, question) = opened(folder), parts_of()
    llm.compose([first, *documents, question]).generate(options=GREEDY)
    other = llm.compose([first, *documents[::-1], question])
    assert other.composed is not None
    assert other.composed.alone_tokens == 0
    other.generate(options=GREEDY)
    text = [token for part in (first, *documents[::-1], question) for token in part]
    alone = opened(folder).generate(text, options=GREEDY)
    found = llm.generate(text, options=GREEDY)
    assert found.stats.cached_tokens <= BLOCK  # the first part, and what is the same by chance
    assert (found.tokens, found.logprobs) == (alone.tokens, alone.logprobs)
    # now the plain text is cached, and goes before the copies
    exact = llm.compose([first, *documents[::-1], question]).generate(options=GREEDY)
    assert exact.logprobs == alone.logprobs


def test_copies_stay_where_others_need_the_cache(folder: str) -> None:
    llm, parts = opened(folder, cache_size=8 * BLOCK), parts_of()
    session, untouched = llm.compose(parts), opened(folder).compose(parts)
    text = np.random.default_rng(1).integers(4, 320, 5 * BLOCK).tolist()
    with pytest.raises(CacheFullError, match="cannot be computed again"):
        llm.generate(text, options=GREEDY)
    llm.generate(text[: 2 * BLOCK], options=GREEDY)
    found, expected = session.generate(options=GREEDY), untouched.generate(options=GREEDY)
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


def test_what_cannot_be_composed_is_refused(folder: str, windowed_deep_model: Path) -> None:
    llm, parts = opened(folder), parts_of()
    for recompute in (-0.1, 1.5, float("nan")):
        with pytest.raises(OptionError, match="recompute"):
            llm.compose(parts, recompute=recompute)
    for wrong in ("text", []):
        with pytest.raises(OptionError, match="list of texts"):
            llm.compose(wrong)  # type: ignore[arg-type]
    with pytest.raises(ContextOverflowError, match="leave some out"):
        llm.compose([*parts, *parts])
    windowed, sealed = load(str(windowed_deep_model)), opened(folder, kv_format="k4v4")
    for each in (windowed, sealed):
        with pytest.raises(UnsupportedModelError, match="`recompute` 1"):
            each.compose(parts)
        session = each.compose([part[:20] for part in parts], recompute=1)
        assert len(session.generate(options=GREEDY).tokens) > 0


TEXT = np.random.default_rng(7).integers(4, 320, 500).tolist()
CHANGES = {
    "inserted": (200, 200, [9] * 37),
    "removed": (90, 130, []),
    "in place": (131, 133, [7, 8]),
    "at the beginning": (0, 3, [5]),
}


def computed(llm: LLM, tokens: list[int]) -> Session:
    session = llm.session()
    session.append(tokens)
    session.generate(max_tokens=0)
    return session


def changed(tokens: list[int], start: int, end: int, other: list[int]) -> list[int]:
    return [*tokens[:start], *other, *tokens[end:]]


@pytest.mark.parametrize(("kv_format", "tolerance"), [("f32", 1e-5), ("int8", 0.02)])
@pytest.mark.parametrize("recompute", [0, 0.1])
@pytest.mark.parametrize("change", CHANGES)
def test_an_end_behind_a_change_is_kept(
    folder: str, kv_format: str, tolerance: float, recompute: float, change: str
) -> None:
    start, end, other = CHANGES[change]
    tokens, kept = changed(TEXT, start, end, other), len(TEXT) - end
    session = computed(opened(folder, kv_format=kv_format), TEXT)
    session.replace(tokens, recompute=recompute)
    counts = session.composed
    assert counts is not None
    assert counts.copied_tokens == kept - max(1, int(np.ceil(recompute * kept)))
    assert counts.copied_tokens + counts.computed_tokens == len(tokens) == len(session.tokens)
    assert session.cached == len(tokens)
    plain = computed(opened(folder, kv_format=kv_format), tokens)
    for found, expected in zip(first_layer(session), first_layer(plain), strict=True):
        assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    session.close()
    plain.close()


def test_changes_follow_each_other_and_no_other_prompt_begins_with_copies(folder: str) -> None:
    llm, tokens = opened(folder), TEXT
    session = computed(llm, tokens)
    for start, end, other, whole in (
        (200, 210, [5] * 4, False),
        (290, 291, [7], False),
        (100, 100, [6] * 9, False),  # less of the end is left than behind the others
        (3, 4, [], True),  # and now less than half
        (5, 6, [9, 9], False),
    ):
        tokens = changed(tokens, start, end, other)
        session.replace(tokens, recompute=0.1)
        assert session.composed is not None
        assert (session.composed.copied_tokens == 0) == whole
        assert session.tokens == tuple(tokens)
        session.generate(max_tokens=0)
        plain = computed(opened(folder), tokens)
        for found, expected in zip(first_layer(session), first_layer(plain), strict=True):
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    exact = llm.generate(tokens, options=GREEDY)
    assert exact.stats.cached_tokens <= BLOCK
    assert exact.logprobs == opened(folder).generate(tokens, options=GREEDY).logprobs
    session.replace(tokens)  # without copies
    assert session.generate(options=GREEDY).logprobs == exact.logprobs


def test_keys_are_turned_once_however_many_changes_there_are(folder: str) -> None:
    """In int8 each turn would round them again."""
    session = computed(opened(folder, kv_format="int8"), TEXT)
    for length in (*range(1, 60), *range(60, 0, -1)):
        tokens = changed(TEXT, 40, 41, [length] * length)
        session.replace(tokens, recompute=0)
    assert session.composed is not None
    assert session.composed.copied_tokens == len(TEXT) - 42
    plain = computed(opened(folder, kv_format="int8"), tokens)
    keys, expected = first_layer(session)[0], first_layer(plain)[0]
    assert np.abs(keys - expected).max() <= 0.02 * np.abs(expected).max()
    once = computed(opened(folder, kv_format="int8"), TEXT)
    once.replace(tokens, recompute=0)
    np.testing.assert_array_equal(keys, first_layer(once)[0])


def test_forks_have_the_source_of_the_session(folder: str) -> None:
    session = computed(opened(folder, kv_format="int8"), TEXT)
    session.replace(TEXT[:50] + TEXT[51:], recompute=0)
    chain = session
    for word in (5, 6, 7):
        chain = chain.fork()
        chain.replace([*TEXT[:50], word, *TEXT[51:]], recompute=0)
    once = computed(opened(folder, kv_format="int8"), TEXT)
    once.replace([*TEXT[:50], word, *TEXT[51:]], recompute=0)
    np.testing.assert_array_equal(first_layer(chain)[0], first_layer(once)[0])


def test_what_is_not_there_is_not_copied(folder: str) -> None:
    llm = opened(folder)
    session = llm.session()
    session.append(TEXT)  # and nothing is computed
    session.replace(TEXT[1:], recompute=0.1)
    assert session.composed is not None
    assert (session.composed.copied_tokens, session.composed.computed_tokens) == (0, 499)
    session.generate(max_tokens=0)
    for other in (TEXT[:300], [3] * 40):
        session.replace(other, recompute=0)
        assert session.composed.copied_tokens == 0
        assert session.tokens == tuple(other)
    session.replace(TEXT, recompute=0)
    assert session.composed.copied_tokens == 498  # of the tokens that were computed last
    session.replace(TEXT)
    assert session.generate(options=GREEDY).tokens == llm.generate(TEXT, options=GREEDY).tokens


def test_what_others_took_of_an_end_is_computed_again(folder: str) -> None:
    llm = opened(folder, cache_size=8 * BLOCK)
    session = computed(llm, TEXT)
    other = np.random.default_rng(1).integers(4, 320, 6 * BLOCK - 8).tolist()
    llm.generate(other, options=GREEDY)
    tokens = changed(TEXT, 10, 12, [5])
    session.replace(tokens, recompute=0.1)
    assert session.composed is not None
    assert session.composed.copied_tokens < 0.8 * len(TEXT)
    session.generate(max_tokens=0)
    for found, expected in zip(
        first_layer(session), first_layer(computed(opened(folder), tokens)), strict=True
    ):
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_change_that_is_refused_or_has_no_room(folder: str, windowed_deep_model: Path) -> None:
    session = computed(opened(folder, cache_size=6 * BLOCK), TEXT)
    for recompute in (-0.1, 1.5, float("nan")):
        with pytest.raises(OptionError, match="recompute"):
            session.replace(TEXT[1:], recompute=recompute)
    with pytest.raises(OptionError, match="tokens"):
        session.replace([4, -1], recompute=0.5)
    assert session.tokens == tuple(TEXT)
    assert session.cached == len(TEXT)
    for wrong in (load(str(windowed_deep_model)), opened(folder, kv_format="k4v4")):
        with pytest.raises(UnsupportedModelError, match="`recompute` 1"):
            wrong.session().replace(TEXT, recompute=0.5)
    session.replace(TEXT[5:], recompute=0.1)
    assert session.composed is not None
    assert session.composed.copied_tokens == 0
    assert session.tokens == tuple(TEXT[5:])
    alone = opened(folder).generate(TEXT[5:], options=GREEDY)
    assert session.generate(options=GREEDY).logprobs == alone.logprobs
