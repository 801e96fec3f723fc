"""Rows that go through the layers in groups, in calls of their own."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from instruction_sets import in_turn
from model_shapes import HYBRIDS, LATENTS, PARTS, SHAPES, SHARED, UNEVEN, WIDE, Shape
from random_model import Model, View, span_of

from edgellm.kernels.linear import rows_of
from edgellm.kernels.step import FusedStep, LayerGroup, StepSpan, reference

# Three layers, so that there is one that is neither the first nor the last.
DEEP = [replace(SHAPES[0], layers=3), replace(SHAPES[3], layers=3), SHAPES[1]]
DEEP += [replace(PARTS[name], layers=3) for name in PARTS]
DEEP += [replace(UNEVEN[name], layers=3) for name in UNEVEN]
DEEP += [replace(SHARED["gemma4"], layers=3, shared=1), SHARED["shared"]]
DEEP += [replace(SHARED["gemma3n"], layers=3, shared=1), replace(SHARED["streams"], layers=3)]
DEEP += [replace(LATENTS["latents"], layers=3), *HYBRIDS.values()]
# Where rows are cut, and after which layers they rest there.
CUTS = ([1, 64, 131], [131])
GROUPS = ([1, 2, 3], [2, 3], [1, 3])


def in_groups(
    step: FusedStep, spans: Sequence[StepSpan], ends: Sequence[int], *, threads: int = 2
) -> tuple[list[np.ndarray], np.ndarray]:
    """The residual behind each group, at last the states, and the logits."""
    residuals: list[np.ndarray] = []
    for start, end in zip([0, *ends], ends, strict=False):
        last = end == ends[-1]
        calls = [span if last else replace(span, logit_rows=0) for span in spans]
        group = LayerGroup(
            layers=range(start, end), entering=residuals[-1].copy() if start else None
        )
        result = step.run(calls, threads=threads, group=group)
        assert result is not None
        residuals.append(result[0])
        logits = result[1]
    return residuals, logits


@pytest.mark.parametrize(
    ("compiled", "case"),
    in_turn((shape, ("int8", "f32")[i // 4 % 2]) for i, shape in enumerate(DEEP)),
    indirect=["compiled"],
    ids=str,
)
@pytest.mark.usefixtures("poisoned")
def test_groups_of_layers_make_no_difference(
    compiled: ctypes.CDLL, case: tuple[Shape, str]
) -> None:
    """Nor what other rows compute between two groups of one: the same bits, also in the cache."""
    shape, format = case
    model = Model(shape)
    expected_views = model.views(format)
    whole = model.step(compiled, expected_views)
    expected = [
        whole.run([span_of(expected_views, model.tokens[a:b], a, logit_rows=b - a)])
        for a, b in ((0, 64), (64, 131))
    ]
    for ends in GROUPS:
        views = model.views(format)
        step = model.step(compiled, views)
        for (a, b), (states, logits) in zip(((0, 64), (64, 131)), expected, strict=True):
            span = span_of(views, model.tokens[a:b], a, logit_rows=b - a)
            found = in_groups(step, [span], ends, threads=1 + len(ends) % 2)
            np.testing.assert_array_equal(found[0][-1], states)
            np.testing.assert_array_equal(found[1], logits)
        for ours, theirs in zip(views, expected_views, strict=True):
            assert_same_rows(ours, theirs)


def assert_same_rows(ours: View, theirs: View) -> None:
    for block in ours.table[:2]:
        for a, b in zip(ours.blocks.block(block), theirs.blocks.block(block), strict=True):
            np.testing.assert_array_equal(a, b)


@functools.cache
def reference_residuals(shape: Shape) -> list[np.ndarray]:
    """The residual of 131 tokens before the first layer and behind each."""
    model = Model(shape)
    return reference.through(
        model.weights, model.floats, model.tokens[:131], model.turns, format="int8"
    )


@pytest.mark.parametrize(
    ("compiled", "shape"),
    in_turn([*DEEP, replace(WIDE, layers=3)]),
    indirect=["compiled"],
    ids=str,
)
@pytest.mark.usefixtures("poisoned")
def test_the_residual_between_groups_matches_reference(compiled: ctypes.CDLL, shape: Shape) -> None:
    model = Model(shape)
    expected = reference_residuals(shape)
    for cuts in CUTS:
        views = model.views("int8")
        step, found = model.step(compiled, views), []
        for a, b in zip([0, *cuts], cuts, strict=False):
            span = span_of(views, model.tokens[a:b], a, logit_rows=0)
            found.append(in_groups(step, [span], [1, 2, 3])[0][:2])
        for layer in range(2):
            ours, x = np.concatenate([each[layer] for each in found]), expected[layer + 1]
            assert np.abs(ours - x).mean() / np.abs(x).mean() < 0.015 * (layer + 1)


def test_a_residual_may_enter_the_first_layer(compiled: ctypes.CDLL) -> None:
    """In place of the embeddings, which then say nothing."""
    model = Model(DEEP[0])
    expected = model.run(compiled, [40], "int8")
    views, scale = model.views("int8"), np.float32(model.weights.embedding_scale)
    entering = rows_of(model.weights.embedding, model.tokens[:40]) * scale
    span = span_of(views, [0] * 40, 0, logit_rows=1)
    group = LayerGroup(layers=range(3), entering=entering)
    found = model.step(compiled, views).run([span], group=group)
    assert found is not None
    np.testing.assert_array_equal(found[0], expected[0])


def test_many_sequences_in_one_group(compiled: ctypes.CDLL) -> None:
    """Rows of a prompt rest behind a layer while others run through all of them."""
    model = Model(DEEP[0])
    expected = model.run(compiled, [100, 101, 104], "int8")
    views = model.views("int8")
    step = model.step(compiled, views)
    first = span_of(views, model.tokens[:100], 0, logit_rows=0)
    begun = step.run([first], group=LayerGroup(layers=range(1)))
    assert begun is not None
    other = StepSpan(tables=[[2]] * len(views), tokens=[5, 6, 7], start=0, logit_rows=1)
    assert step.run([other]) is not None
    rest = step.run([first], group=LayerGroup(layers=range(1, 3), entering=begun[0]))
    assert rest is not None
    np.testing.assert_array_equal(rest[0], expected[0][:100])
    spans = [
        span_of(views, model.tokens[100:101], 100, logit_rows=1),
        StepSpan(tables=[[2]] * len(views), tokens=[8], start=3, logit_rows=1),
    ]
    together, _ = in_groups(step, spans, [2, 3])
    np.testing.assert_array_equal(together[-1][:1], expected[0][100:101])


def test_one_that_is_stopped_begins_its_group_again(native_library: ctypes.CDLL) -> None:
    model = Model(DEEP[0])
    expected, _ = model.run(native_library, [131], "int8")
    views = model.views("int8")
    step = model.step(native_library, views)
    span = span_of(views, model.tokens[:131], 0, logit_rows=0)
    begun = step.run([span], group=LayerGroup(layers=range(1)))
    assert begun is not None
    group, asked = LayerGroup(layers=range(1, 3), entering=begun[0]), iter([False, True])
    assert step.run([span], group=group, should_stop=lambda: next(asked)) is None
    assert list(asked) == []
    rest = step.run([span], group=group)
    assert rest is not None
    np.testing.assert_array_equal(rest[0], expected)


ENTERING = np.zeros((2, 64), np.float32)


@pytest.mark.parametrize(
    ("layers", "entering", "logit_rows", "words"),
    [
        (range(0), None, 0, "needed are some"),
        (range(2, 1), ENTERING, 0, "needed are some"),
        (range(4), None, 0, "needed are some"),
        (range(-1, 2), None, 0, "needed are some"),
        (range(0, 3, 2), None, 0, "needed are some"),
        (range(2), None, 1, "before the last layer"),
        (range(2), ENTERING[:1], 0, "needed is float32"),
        (range(1, 3), None, 1, "nothing enters"),
        (range(1, 3), ENTERING[:1], 1, "needed is float32"),
        (range(1, 3), ENTERING[:, :32], 1, "needed is float32"),
        (range(1, 3), ENTERING.astype("f8"), 1, "needed is float32"),
        (range(1, 3), np.asfortranarray(ENTERING), 1, "needed is float32"),
    ],
    ids=str,
)
def test_groups_out_of_range_are_refused(
    native_library: ctypes.CDLL, layers: range, entering: Any, logit_rows: int, words: str
) -> None:
    model = Model(Shape(1, 1, 64, hidden=64, layers=3))
    views = model.views("int8")
    span = span_of(views, [1, 2], 0, logit_rows=logit_rows)
    with pytest.raises(ValueError, match=words):
        model.step(native_library, views).run(
            [span], group=LayerGroup(layers=layers, entering=entering)
        )
