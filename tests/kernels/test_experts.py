"""The experts of one layer by themselves, in C++."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from model_shapes import EXPERTS, PLAIN_EXPERTS
from random_model import Model

from edgellm.kernels.experts import reference
from edgellm.kernels.linear.reference import linear
from edgellm.kernels.step.reference import activate, norm


def rows_of(model: Model, count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    return rng.standard_normal((count, model.shape.hidden)).astype(np.float32)


def expected(model: Model, layer: int, x: np.ndarray) -> np.ndarray:
    """What the references give; of an MLP beside the experts, what both add to the residual."""
    weights = model.weights.layers[layer]
    assert weights.routing is not None
    assert weights.router is not None

    def normed(rows: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        exact = rows.astype("f8")
        return exact if weights.experts_norm is None else norm(exact, weight, None, epsilon)

    epsilon = model.weights.epsilon
    logits = normed(x, weights.router_norm) @ weights.router.T.astype("f8")
    routing, scales = weights.routing, weights.expert_scale
    shares = reference.shares(logits, routing, weights.selection_bias, scales)

    def mlp(rows: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        rows = rows.astype(np.float32)
        inner = activate(linear(rows, gate), weights.activation) * linear(rows, up)
        return np.asarray(linear(inner.astype(np.float32), down))

    names, own = ("gate", "up", "down"), model.floats
    each = [np.split(own[f"layers.{layer}.{name}"], routing.experts) for name in names]
    read, total = normed(x, weights.experts_norm), np.zeros(x.shape)
    for expert in range(routing.experts):
        total += shares[:, expert, None] * mlp(read, *(part[expert] for part in each))
    if weights.experts_norm is None:
        return total
    shared = [own[f"layers.{layer}.shared_{name}"] for name in names]
    beside = normed(mlp(normed(x, weights.mlp_norm), *shared), weights.shared_post_norm)
    return np.asarray(normed(total, weights.experts_post_norm) + beside)


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize(
    "name",
    [
        *PLAIN_EXPERTS,
        *("groups", "groups of one", "a bias in the choice by softmax", "an MLP beside experts"),
    ],
)
@pytest.mark.usefixtures("poisoned")
def test_rows_match_reference(compiled: ctypes.CDLL, name: str, count: int) -> None:
    model = Model(EXPERTS[name])
    step, x = model.step(compiled, model.views("f32")), rows_of(model, count)
    found, exact = step.experts(0, x, threads=2), expected(model, 0, x)
    assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("name", [*PLAIN_EXPERTS, "groups", "an MLP beside experts"])
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
