"""Steps whose rows read a part of what they see: the best sealed blocks, or the last blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from instruction_sets import HERE_OR_NONE, UseISA, in_turn
from model_shapes import SHAPES, Shape
from random_model import Model

from edgellm.kernels.kv_blocks import BLOCK, KVBlocks, SealedBlocks
from edgellm.kernels.sealed_blocks import allocate_shortlists
from edgellm.kernels.step import FusedStep, LayerGroup, StepSpan

# Rows of a prompt, and of an answer behind it.
PROMPT, END = 780, 790
READ = 4 * BLOCK


class Run:
    """A model's pools of sealed blocks, with the prompts of three sequences in them.

    The best instruction set computes the prompts, for which scalar code takes two seconds.
    """

    def __init__(self, use_isa: UseISA, isa: str, shape: Shape) -> None:
        library = use_isa(HERE_OR_NONE[0])
        self.model, self.layers = Model(shape), shape.layers
        self.tokens = (self.model.tokens * 2)[:END]
        self.pools = self.model.pools("k4v4", blocks=21)
        self.step = FusedStep(library, self.model.weights, self.model.ropes, self.pools)
        for other in range(3):
            self.step.run([self.span(0, PROMPT, other=other, kv_read=None)])
        use_isa(isa)

    def span(self, start: int, end: int, *, other: int = 0, kv_read: int | None = READ) -> StepSpan:
        tables = [
            [
                7 * other + n
                for n in ((3, 0, 5, 1, 6, 2, 4) if isinstance(pool, KVBlocks) else range(6))
            ]
            for pool in self.pools
        ]
        tokens = self.tokens[start:end]
        rows = end - start
        return StepSpan(tables=tables, tokens=tokens, start=start, logit_rows=rows, kv_read=kv_read)

    def logits(self, *spans: StepSpan, threads: int = 2) -> np.ndarray:
        found = self.step.run(spans, threads=threads)
        assert found is not None
        return found[1]


@pytest.fixture
def run(use_isa: UseISA, isa: str, window: int | None) -> Run:
    """The last layer sees all; with a window in the others, it alone chooses."""
    return Run(use_isa, isa, replace(SHAPES[7], layers=4 if window else 3, window=window))


windows = pytest.mark.parametrize(("isa", "window"), in_turn([None, 200]))


@windows
@pytest.mark.usefixtures("poisoned")
def test_rows_of_answers_have_their_bits_in_any_company(run: Run) -> None:
    """Alone, several at once as a draft has them, beside rows that read all, and in groups of
    layers; the first rows see no more than they may read."""
    assert any(isinstance(pool, SealedBlocks) for pool in run.pools)
    alone = [run.logits(run.span(at, at + 1), threads=1) for at in range(PROMPT, END)]
    expected = np.concatenate(alone)
    np.testing.assert_array_equal(run.logits(run.span(PROMPT, END), threads=3), expected)
    dense = run.span(600, 750, other=2, kv_read=None)
    found = run.logits(dense, run.span(PROMPT, END), run.span(PROMPT, END, other=1))
    np.testing.assert_array_equal(found[150:], np.concatenate([expected] * 2))
    np.testing.assert_array_equal(run.logits(dense), found[:150])
    span, entering = run.span(PROMPT, END), None
    for layers in (range(1), range(1, 2)):
        cut, group = replace(span, logit_rows=0), LayerGroup(layers=layers, entering=entering)
        result = run.step.run([cut], group=group)
        assert result is not None
        entering = result[0]
    last = run.step.run([span], group=LayerGroup(layers=range(2, run.layers), entering=entering))
    assert last is not None
    np.testing.assert_array_equal(last[1], expected)


def shortlists(run: Run, *, least: int) -> list[np.ndarray | None]:
    return [
        allocate_shortlists(run.layers, pool.kv_heads, READ, least=least)
        if isinstance(pool, KVBlocks) and pool.sealed
        else None
        for pool in run.pools
    ]


@windows
@pytest.mark.usefixtures("poisoned")
def test_rows_at_16_positions_choose_among_the_best_of_the_first(run: Run) -> None:
    """However they are cut; a row that was computed and taken back has no say."""

    def rows(lists: list[np.ndarray | None], start: int, end: int) -> np.ndarray:
        dense = run.span(600, 601, other=1, kv_read=None)
        return run.logits(dense, replace(run.span(start, end), shortlists=lists), threads=3)[1:]

    def cut(*ends: int) -> tuple[np.ndarray, list[np.ndarray | None]]:
        lists = shortlists(run, least=2)
        parts = [rows(lists, *each) for each in pairwise((PROMPT, *ends))]
        return np.concatenate(parts), lists

    own = np.concatenate([run.logits(run.span(at, at + 1)) for at in range(PROMPT, END)])
    expected, lists = cut(*range(PROMPT + 1, END + 1))
    alike = (expected == own).all(1)
    assert alike[0]
    assert alike[784 - PROMPT]  # the first of 16
    assert not alike.all()
    for ends in ((END,), (783, END), (784, END), (787, 788, END)):
        found, after = cut(*ends)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_equal(after, lists)
    (held,) = (each for each in lists if each is not None)
    assert {*held[-1, :, 48, 0]} == {PROMPT + 1}
    assert {*held[-1, :, 49, 0]} == {785}
    assert {*held[0].flat} == {0}  # a layer that reads all, or has a window
    # taken back, also to before 784
    for start, end in ((786, END), (782, 783), (783, 787), (784, 785), (785, END)):
        np.testing.assert_array_equal(
            rows(lists, start, end), expected[start - PROMPT : end - PROMPT]
        )
    # others that are on the list are chosen among, by the rows at their 16 positions alone
    others = np.array([rows(listed(lists, block), 786, 787)[0] for block in range(1, 5)])
    assert (others != expected[786 - PROMPT]).any()
    held[-1, :, 49, 0] = 786 + 1
    np.testing.assert_array_equal(rows(lists, 786, 787)[0], own[786 - PROMPT])


def listed(lists: list[np.ndarray | None], block: int) -> list[np.ndarray | None]:
    """The same shortlists with one block alone on them."""
    changed = [None if each is None else each.copy() for each in lists]
    for each in changed:
        if each is not None:
            each[..., 1:] = block
    return changed


@windows
@pytest.mark.usefixtures("poisoned")
def test_shortlists_of_all_blocks_are_not_written(run: Run) -> None:
    lists = shortlists(run, least=4)
    span = replace(run.span(PROMPT, END), shortlists=lists)
    np.testing.assert_array_equal(run.logits(span), run.logits(run.span(PROMPT, END)))
    assert not any(each.any() for each in lists if each is not None)


@windows
def test_the_first_layers_and_short_texts_read_all(run: Run, use_isa: UseISA, isa: str) -> None:
    part = run.logits(run.span(PROMPT, END))
    every = run.logits(run.span(PROMPT, END, kv_read=None))
    assert 0 < np.abs(part - every).mean() < 0.5 * np.abs(every).mean()
    np.testing.assert_array_equal(run.logits(run.span(PROMPT, END, kv_read=7 * BLOCK)), every)
    short = run.span(READ - 8, READ, kv_read=None)
    np.testing.assert_array_equal(run.logits(replace(short, kv_read=READ)), run.logits(short))
    two = Run(use_isa, isa, replace(SHAPES[7], layers=2))
    every = two.logits(two.span(PROMPT, END, kv_read=None))
    np.testing.assert_array_equal(two.logits(two.span(PROMPT, END)), every)


def test_what_cannot_choose_is_refused(use_isa: UseISA) -> None:
    run = Run(use_isa, HERE_OR_NONE[0], replace(SHAPES[1], layers=1))
    with pytest.raises(ValueError, match=r"511 tokens to read of k4v4 .* 512 to"):
        run.logits(run.span(PROMPT, END, kv_read=511))
    span, pool = run.span(PROMPT, END), run.pools[0]
    assert isinstance(pool, KVBlocks)
    right = allocate_shortlists(run.layers, pool.kv_heads, READ)
    few, wrong = np.ascontiguousarray(right[..., :1]), right.astype(np.int64)
    for lists in ([right], [right, right], [few, None], [wrong, None], [right[0], None]):
        with pytest.raises(ValueError, match="shortlists"):
            run.logits(replace(span, shortlists=lists))
    with pytest.raises(ValueError, match="None tokens to read"):
        run.logits(replace(span, shortlists=[right, None], kv_read=None))
