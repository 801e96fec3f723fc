"""The experts of one layer by themselves, in C++."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from model_shapes import EXPERTS, PLAIN_EXPERTS
from random_model import Model

from edgellm.kernels.experts import reference
from edgellm.kernels.linear.reference import linear
from edgellm.kernels.step.reference import activate


def rows_of(model: Model, count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    return rng.standard_normal((count, model.shape.hidden)).astype(np.float32)


def expected(model: Model, layer: int, x: np.ndarray) -> np.ndarray:
    """What the references give."""
    weights = model.weights.layers[layer]
    assert weights.routing is not None
    assert weights.router is not None
    logits = x.astype("f8") @ weights.router.T.astype("f8")
    shares = reference.shares(logits, weights.routing, weights.selection_bias)
    each = {
        name: np.split(model.floats[f"layers.{layer}.{name}"], weights.routing.experts)
        for name in ("gate", "up", "down")
    }
    total = np.zeros(x.shape)
    for expert in range(weights.routing.experts):
        gate, up, down = (each[name][expert] for name in ("gate", "up", "down"))
        inner = activate(linear(x, gate), weights.activation) * linear(x, up)
        total += shares[:, expert, None] * linear(inner.astype(np.float32), down)
    return total


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize(
    "name", [*PLAIN_EXPERTS, "groups", "groups of one", "a bias in the choice by softmax"]
)
@pytest.mark.usefixtures("poisoned")
def test_rows_match_reference(compiled: ctypes.CDLL, name: str, count: int) -> None:
    model = Model(EXPERTS[name])
    step, x = model.step(compiled, model.views("f32")), rows_of(model, count)
    found, exact = step.experts(0, x, threads=2), expected(model, 0, x)
    assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("name", [*PLAIN_EXPERTS, "groups"])
@pytest.mark.usefixtures("poisoned")
def test_a_row_does_not_depend_on_the_others(compiled: ctypes.CDLL, name: str) -> None:
    """Nor on the threads, and not on rows that are no numbers."""
    model = Model(EXPERTS[name])
    step, x = model.step(compiled, model.views("f32")), rows_of(model, 40)
    alone = np.concatenate([step.experts(0, row[None]) for row in x])
    np.testing.assert_array_equal(step.experts(0, x, threads=3), alone)
    np.testing.assert_array_equal(step.experts(0, x[3:20], threads=2), alone[3:20])
    x[[0, 17]] = np.nan
    found = step.experts(0, x, threads=2)
    good = np.delete(np.arange(40), [0, 17])
    np.testing.assert_array_equal(found[good], alone[good])
    assert np.isnan(found[[0, 17]]).all()


@pytest.mark.usefixtures("poisoned")
def test_infinite_biases_of_a_damaged_file(native_library: ctypes.CDLL) -> None:
    """The first experts are chosen where none is better than another."""
    model = Model(EXPERTS["sigmoid and a shared expert"])
    bias, x = model.weights.layers[0].selection_bias, rows_of(model, 7)
    assert bias is not None
    bias[:] = -np.inf
    found = model.step(native_library, model.views("f32")).experts(0, x)
    bias[:] = 0
    bias[:3] = 2
    first = model.step(native_library, model.views("f32")).experts(0, x)
    assert np.abs(found - first).max() < 1e-4 * np.abs(first).max()


def test_what_does_not_fit_is_refused(native_library: ctypes.CDLL) -> None:
    model = Model(EXPERTS["every second layer"])
    step, x = model.step(native_library, model.views("f32")), rows_of(model, 2)
    with pytest.raises(ValueError, match="layer 1 has no experts"):
        step.experts(1, x)
    with pytest.raises(ValueError, match="needed are 96 numbers"):
        step.experts(0, x[:, :64])
