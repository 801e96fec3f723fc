"""Contexts composed of documents that were computed alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from inspection import context

from edgellm import (
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
