"""Layers that keep a state: where it is read from and written to, and what is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from model_shapes import HYBRIDS, Shape
from random_model import Model, View, span_of

from edgellm.kernels.state_blocks import StateBlocks, StateView, allocate_states
from edgellm.kernels.step import FusedStep, StepSpan

BLOCKS = 5


def with_states(span: StepSpan, *targets: tuple[int, int], source: int | None = None) -> StepSpan:
    """The span with a state read from one block and written to others."""
    states = [view and replace(view, source=source, targets=targets) for view in span.states]
    return replace(span, states=states)


def states_of(views: list[View]) -> StateBlocks:
    """The pool of a model's states."""
    (pool,) = [view.blocks for view in views if isinstance(view.blocks, StateBlocks)]
    return pool


@pytest.mark.parametrize("shape", HYBRIDS.values(), ids=list(HYBRIDS))
def test_states_after_any_row_are_those_of_a_step_that_ends_there(
    compiled: ctypes.CDLL, shape: Shape
) -> None:
    model = Model(shape)
    views = model.views("int8")
    step, states = model.step(compiled, views), states_of(views).states
    span = span_of(views, model.tokens[:60], 0, logit_rows=0)
    whole = with_states(span, (1, 0), (2, 1), (40, 2), (60, 3))
    assert step.run([whole], threads=2) is not None
    several = states.copy()
    assert np.isnan(several[4]).all()
    for rows, block in ((1, 0), (2, 1), (40, 2), (60, 3)):
        states[:] = np.nan
        part = replace(span, tokens=model.tokens[:rows])
        assert step.run([with_states(part, (rows, 4))]) is not None
        np.testing.assert_array_equal(states[4], several[block])
        assert np.isnan(states[:4]).all()


@pytest.mark.parametrize("shape", HYBRIDS.values(), ids=list(HYBRIDS))
def test_a_step_goes_on_from_its_source_alone(compiled: ctypes.CDLL, shape: Shape) -> None:
    """Also where it writes to the block that it reads."""
    model = Model(shape)
    expected, _ = model.run(compiled, [70], "f32")
    for target in (1, 3):
        views = model.views("f32")
        step = model.step(compiled, views)
        first = with_states(span_of(views, model.tokens[:50], 0, logit_rows=0), (50, 1))
        second = span_of(views, model.tokens[50:70], 50, logit_rows=0)
        assert step.run([first]) is not None
        found = step.run([with_states(second, (20, target), source=1)], threads=2)
        assert found is not None
        np.testing.assert_array_equal(found[0], expected[50:])


def no_view(view: StateView) -> StateView | None:
    return None


def other_pool(view: StateView) -> StateView:
    return replace(view, blocks=allocate_states(blocks=5, layers=2, elements=3))


WRONG: dict[str, Callable[[StateView], StateView | None]] = {
    "states of another pool": no_view,
    "another pool, or none": other_pool,
    "of 2 tokens": lambda view: replace(view, targets=((1, 0),)),
    "after \\[\\]": lambda view: replace(view, targets=()),
    "after \\[2, 1\\]": lambda view: replace(view, targets=((2, 0), (1, 1))),
    "after \\[0, 2\\]": lambda view: replace(view, targets=((0, 0), (2, 1))),
    "state blocks \\[5\\]": lambda view: replace(view, targets=((2, 5),)),
    "state blocks \\[-1, 0\\]": lambda view: replace(view, source=-1, targets=((2, 0),)),
}


@pytest.mark.parametrize("words", WRONG)
def test_states_that_do_not_exist_are_refused(native_library: ctypes.CDLL, words: str) -> None:
    model = Model(HYBRIDS["short_conv"])
    views = model.views("int8")
    step = model.step(native_library, views)
    span = span_of(views, [1, 2], 0, logit_rows=0)
    wrong = replace(span, states=[view and WRONG[words](view) for view in span.states])
    with pytest.raises(ValueError, match=words):
        step.run([span, wrong])


def test_spans_without_states_are_refused(native_library: ctypes.CDLL) -> None:
    model = Model(HYBRIDS["short_conv"])
    views = model.views("int8")
    span = replace(span_of(views, [1, 2], 0, logit_rows=0), states=())
    with pytest.raises(ValueError, match="states of 0 pools"):
        model.step(native_library, views).run([span])


def test_pools_and_weights_that_do_not_fit_are_refused(native_library: ctypes.CDLL) -> None:
    model = Model(HYBRIDS["short_conv"])
    pools = model.pools("int8", blocks=BLOCKS)
    number = next(i for i, pool in enumerate(pools) if isinstance(pool, StateBlocks))
    for layers, elements in ((1, 288), (2, 287)):
        other = [*pools]
        other[number] = allocate_states(blocks=BLOCKS, layers=layers, elements=elements)
        with pytest.raises(ValueError, match="needed are"):
            FusedStep(native_library, model.weights, model.ropes, other)
    layer = model.weights.layers[0]
    mixer = layer.mixer
    assert mixer is not None
    wrong = {
        "conv_in is": replace(mixer, conv_in=layer.up),
        "needed are 2 to 16 taps": replace(mixer, filters=mixer.filters[:1]),
        "needed are float32": replace(mixer, filters=mixer.filters.astype("f8")),
    }
    for words, each in wrong.items():
        weights = replace(model.weights, layers=[replace(layer, mixer=each)])
        with pytest.raises(ValueError, match=words):
            FusedStep(native_library, weights, model.ropes, pools)
    projected = replace(layer, q=layer.o)
    with pytest.raises(ValueError, match="beside a mixer"):
        FusedStep(native_library, replace(model.weights, layers=[projected]), model.ropes, pools)
