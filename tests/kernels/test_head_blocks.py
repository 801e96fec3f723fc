"""Condensed contexts: each KV head reads rows of its own in place of the first blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from instruction_sets import in_turn
from model_shapes import SHAPES, Parts, Shape
from random_model import Model

from edgellm.kernels.attention import native
from edgellm.kernels.head_blocks import (
    HeadBlocks,
    blocks_for,
    check_heads,
    choose_rows,
    copy_rows,
    head_blocks,
)
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_blocks import BLOCK, ROW_FORMATS, KVBlocks, allocate
from edgellm.kernels.step import FusedStep, StepSpan, reference

# Blocks that are condensed, and rows behind them.
WHOLE, TAIL = 6, 150
TABLE = [(5 * i + 2) % 13 for i in range(8)]
FREE = [n for n in range(13) if n not in TABLE]


def choose(heads: int, seed: int = 0) -> list[np.ndarray]:
    """Rows that each head keeps: one block of them, or up to all."""
    rng = np.random.default_rng(seed)
    counts = [1, WHOLE, *rng.integers(1, WHOLE, heads)][:heads]
    kept = [rng.permutation(WHOLE * BLOCK)[: n * BLOCK] for n in counts]
    return [np.sort(rows).astype(np.int64) for rows in kept]


def condensed(blocks: KVBlocks, rows: Sequence[np.ndarray]) -> HeadBlocks:
    counts = [len(of) // BLOCK for of in rows]
    into = (FREE * 2)[: blocks_for(blocks, counts)]
    heads = head_blocks(blocks, counts, into, first=WHOLE)
    copy_rows(blocks, TABLE[:WHOLE], rows, heads)
    return heads


@pytest.mark.parametrize(
    ("compiled", "format"),
    in_turn(ROW_FORMATS),
    indirect=["compiled"],
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 40), (5, 1, 80)])
@pytest.mark.usefixtures("poisoned")
def test_each_head_reads_what_it_keeps(
    compiled: ctypes.CDLL, format: Any, heads: int, kv_heads: int, head_dim: int
) -> None:
    """The same bits as from a cache that has its rows alone; what is dropped may be anything."""
    rng = np.random.default_rng(head_dim)
    length = WHOLE * BLOCK + TAIL
    q = rng.standard_normal((TAIL, heads, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, length, kv_heads, head_dim)).astype(np.float32)
    sizes = {"layers": 2, "kv_heads": kv_heads, "head_dim": head_dim}
    blocks = allocate(format=format, blocks=13, **sizes)
    append(blocks, TABLE, 1, 0, k, v)
    rows = choose(2 * kv_heads)
    kept = condensed(blocks, rows)
    for block in TABLE[:WHOLE]:
        for array in blocks.block(block):
            array[...] = np.nan if array.dtype.kind == "f" else 77
    table = [0] * WHOLE + TABLE[WHOLE:]
    found = native.attend(compiled, blocks, table, 1, q, WHOLE * BLOCK, condensed=kept, threads=2)
    group = heads // kv_heads
    for head in range(kv_heads):
        of = np.concatenate([rows[kv_heads + head], np.arange(WHOLE * BLOCK, length)])
        alone = allocate(format=format, blocks=8, layers=1, kv_heads=1, head_dim=head_dim)
        append(alone, range(8), 0, 0, k[of, head : head + 1], v[of, head : head + 1])
        at = slice(head * group, (head + 1) * group)
        expected = native.attend(compiled, alone, range(8), 0, q[:, at], len(of) - TAIL)
        np.testing.assert_array_equal(found[:, at], expected)


def softmax_shares(q: np.ndarray, k: np.ndarray, first: int, rules: dict[str, Any]) -> np.ndarray:
    """Largest share of each key before `first` that a query from there on gives it, `[Hkv, T]`."""
    length, heads, width = q.shape
    group, scale = heads // k.shape[1], rules["scale"] or width**-0.5
    shares = np.zeros((k.shape[1], first))
    for head in range(heads):
        scores = scale * q[first:, head] @ k[:, head // group].T
        if rules["softcap"]:
            scores = rules["softcap"] * np.tanh(scores / rules["softcap"])
        scores[np.arange(length)[None] > np.arange(first, length)[:, None]] = -np.inf
        sink = -np.inf if rules["sinks"] is None else rules["sinks"][head]
        top = np.maximum(scores.max(axis=1, keepdims=True), sink)
        weights = np.exp(scores - top)
        weights /= weights.sum(axis=1, keepdims=True) + np.exp(sink - top)
        of_head = shares[head // group]
        np.maximum(of_head, weights[:, :first].max(axis=0), out=of_head)
    return shares


@pytest.mark.parametrize(
    ("compiled", "case"),
    in_turn(
        [
            (SHAPES[0], "int8"),
            (replace(SHAPES[1], layers=2), "f32"),
            (SHAPES[4], "f16"),
            (Shape(6, 2, 32, parts=Parts(softcap=5.0, sinks=True)), "int8"),
        ]
    ),
    indirect=["compiled"],
    ids=str,
)
def test_shares_are_those_of_the_softmax(
    compiled: ctypes.CDLL, case: tuple[Shape, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest of all queries and heads of a KV head, in spans of more and fewer queries than a
    task has, each with what was there before."""
    (shape, format), first, end = case, 3 * BLOCK, 3 * BLOCK + 70
    model = Model(shape)
    seen: list[np.ndarray] = []
    attend = reference.attention.attend

    def note(q: np.ndarray, k: np.ndarray, *arguments: Any, **rules: Any) -> np.ndarray:
        seen.append(softmax_shares(q, k, first, rules))
        return attend(q, k, *arguments, **rules)

    monkeypatch.setattr(reference.attention, "attend", note)
    model.reference(end, format)
    pools = model.pools(format, blocks=5)
    step = FusedStep(compiled, model.weights, model.ropes, pools)
    table = [3, 0, 4, 1]
    shares = np.zeros((shape.layers, pools[0].kv_heads, first), np.float32)
    for start, stop in (
        (0, first),
        (first, first + 33),
        (first + 33, first + 34),
        (first + 34, end),
    ):
        span = StepSpan(
            tables=[table],
            tokens=model.tokens[start:stop],
            start=start,
            logit_rows=0,
            shares=[shares] if start else [],
        )
        step.run([span], threads=3)
    expected = np.stack(seen)
    assert expected.max() > 0.03
    # inputs of layers behind the first one are rounded to 8 bits
    np.testing.assert_allclose(shares[:1], expected[:1], rtol=0.02, atol=1e-4)
    np.testing.assert_allclose(shares, expected, atol=0.05)


def test_heads_share_what_is_kept() -> None:
    shares = np.zeros((3, 4 * BLOCK), np.float32)
    shares[0, 100:350] = 0.9
    shares[1, ::4] = 0.5
    shares[2] = 0.1
    for keep, blocks in ((0, [1, 1, 1]), (0.34, [2, 1, 1]), (0.5, [2, 1, 3]), (1, [4, 4, 4])):
        rows = choose_rows(shares, keep)
        assert [len(of) // BLOCK for of in rows] == blocks
        assert all((np.diff(of) > 0).all() and of.dtype == np.int64 for of in rows)
        assert set(range(100, 100 + BLOCK)) <= set(rows[0].tolist())
        assert set(range(0, 4 * BLOCK, 4)) <= set(rows[1].tolist())


def test_what_does_not_fit_is_refused(native_library: ctypes.CDLL) -> None:
    blocks = allocate(format="f32", blocks=13, layers=2, kv_heads=2, head_dim=8)
    kept = condensed(blocks, choose(4))
    start = WHOLE * BLOCK
    check_heads(kept, blocks, start=start)
    few, far = replace(kept, starts=kept.starts[:-1]), replace(kept, places=kept.places + 52)
    for wrong, problem in (
        (few, "blocks of 3 heads; needed are those of 4"),
        (far, "a block of a head is from 0 to 51"),
        (replace(kept, first=WHOLE - 1), "1 to 6 blocks of a head in place of 5"),
        (replace(kept, first=WHOLE + 1), "rows from position 768 on"),
    ):
        with pytest.raises(ValueError, match=problem):
            check_heads(wrong, blocks, start=start)
    q = np.zeros((1, 2, 8), np.float32)
    with pytest.raises(ValueError, match="a window of 5 and blocks that are left out"):
        native.attend(native_library, blocks, TABLE, 0, q, start, window=5, condensed=kept)
    with pytest.raises(ValueError, match="a share of the attention on a condensed context"):
        native.attend(native_library, blocks, TABLE, 0, q, start, prefill_mass=0.9, condensed=kept)
    model = Model(SHAPES[0])
    pools = model.pools("int8", blocks=5)
    step = FusedStep(native_library, model.weights, model.ropes, pools)
    for shares, problem in (
        (np.zeros((1, 3, 100), np.float32), r"shares of \[100\] keys of the first 256"),
        (np.zeros((1, 3, 384), np.float32), r"shares of \[384\] keys of the first 256"),
        (np.zeros((1, 2, 256), np.float32), "of 1 layers with 3 heads"),
        (np.zeros((1, 3, 256)), "shares are float64"),
    ):
        span = StepSpan(tables=[[0, 1, 2]], tokens=[1], start=256, logit_rows=1, shares=[shares])
        with pytest.raises(ValueError, match=problem):
            step.run([span])
