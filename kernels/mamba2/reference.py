"""Reference of Mamba-2 in float64: one row and head at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.mamba2.weights import LANE_BLOCK, Mamba2Vectors

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class State:
    """State of a layer after some rows.

    Attributes:
        rows: x, B and C of the last rows before the convolution, `[taps - 1, channels]`.
        heads: state of each head, `[heads, head_dim, state_dim]`.
    """

    rows: Floats
    heads: Floats

    @classmethod
    def zero(cls, vectors: Mamba2Vectors) -> State:
        """Return the state before the first row."""
        rows = np.zeros((vectors.taps - 1, vectors.channels))
        return cls(rows, np.zeros((vectors.heads, vectors.head_dim, vectors.state_dim)))

    def flat(self) -> Floats:
        """Return the numbers in the order in which the C++ kernel keeps them."""
        heads, head_dim, state_dim = self.heads.shape
        blocks = self.heads.reshape(heads, head_dim // LANE_BLOCK, LANE_BLOCK, state_dim)
        return np.concatenate([self.rows.ravel(), blocks.swapaxes(2, 3).ravel()])


def mix(rows: Floats, vectors: Mamba2Vectors, state: State) -> tuple[Floats, State]:
    """Take rows `[C, inputs]` through the convolution, the states and the gated norm.

    Args:
        state: state before the first row.

    Returns:
        Rows for the output projection `[C, inner]`, and the state after the last one.
    """
    inner, channels = vectors.inner, vectors.channels
    z, mixed, dt = np.split(rows.astype(np.float64), [inner, inner + channels], axis=1)
    window = np.concatenate([state.rows, mixed])
    out, heads = np.empty((len(rows), inner)), state.heads.copy()
    for r in range(len(rows)):
        convolved = _silu(
            (window[r : r + vectors.taps] * vectors.conv).sum(axis=0)
            + (0 if vectors.conv_bias is None else vectors.conv_bias)
        )
        step = np.logaddexp(0, dt[r] + vectors.dt_bias)
        out[r] = _row(convolved, step, vectors, heads)
    return _gated_norm(out, z, vectors), State(window[len(rows) :], heads)


def _row(convolved: Floats, step: Floats, vectors: Mamba2Vectors, heads: Floats) -> Floats:
    """Return a row's output before the norm, and change the states of all heads."""
    x, b, c = np.split(
        convolved, [vectors.inner, vectors.inner + vectors.groups * vectors.state_dim]
    )
    x, b, c = x.reshape(vectors.heads, -1), *(y.reshape(vectors.groups, -1) for y in (b, c))
    y = np.empty_like(x)
    for head in range(vectors.heads):
        group = head * vectors.groups // vectors.heads
        decay = np.exp(step[head] * vectors.decay[head])
        heads[head] = decay * heads[head] + np.outer(step[head] * x[head], b[group])
        y[head] = heads[head] @ c[group] + vectors.skip[head] * x[head]
    return y.ravel()


def _gated_norm(y: Floats, z: Floats, vectors: Mamba2Vectors) -> Floats:
    gated = np.asarray(y * _silu(z))
    if vectors.norm is None:
        return gated
    groups = gated.reshape(len(y), vectors.groups, -1)
    normed = groups / np.sqrt((groups**2).mean(axis=-1, keepdims=True) + vectors.epsilon)
    return np.asarray(normed.reshape(y.shape) * vectors.norm)


def _silu(x: Floats) -> Floats:
    return np.asarray(x / (1 + np.exp(-x)))
