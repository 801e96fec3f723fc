"""Reference of the gated delta net in float64, one row after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.delta_net import STATE_COLUMNS, DeltaRule

Floats = NDArray[np.float64]

_UNIT_EPSILON = 1e-6  # of the norms of q and k


def delta_net(
    net: DeltaRule,
    projections: tuple[Floats, Floats, Floats, Floats],
    epsilon: float,
    state: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Compute what the output projection reads, and the state after the last row.

    Args:
        projections: q, k and v before the convolution `[C, channels]`, the gate of the outputs
            `[C, size]`, step sizes and learning rates before their functions `[C, value_heads]`.
        epsilon: epsilon of the norms of the outputs.
        state: state before the first row; None: all zeros.
    """
    qkv, z, a, b = projections
    rows, heads = len(qkv), net.value_heads
    columns, s = _unpacked(net, np.zeros(net.state_size) if state is None else state)
    inputs = np.concatenate([columns, qkv])
    taps = [inputs[i : i + rows] * net.conv[i].astype(np.float64) for i in range(net.taps)]
    mixed = _silu(np.sum(taps, axis=0))
    q, k, v = np.split(mixed, [net.keys, 2 * net.keys], axis=1)
    key_heads = [net.key_head_of(head) for head in range(heads)]
    q, k = (_unit(each.reshape(rows, net.key_heads, -1))[:, key_heads] for each in (q, k))
    q, v = q * net.key_dim**-0.5, v.reshape(rows, heads, -1)
    kept = np.exp(net.decay * np.logaddexp(0, a + net.dt_bias))
    learned = 1 / (1 + np.exp(-b))
    out = np.empty_like(v)
    for row in range(rows):
        s = s * kept[row, :, None, None]
        change = learned[row, :, None] * (v[row] - np.einsum("hkv,hk->hv", s, k[row]))
        s = s + k[row, :, :, None] * change[:, None, :]
        out[row] = np.einsum("hkv,hk->hv", s, q[row])
    scale = np.sqrt((out * out).mean(axis=-1, keepdims=True) + epsilon)
    out = (out / scale * net.norm).reshape(rows, -1) * _silu(z)
    return out, _packed(net, inputs[rows:], s)


def _unpacked(net: DeltaRule, state: Floats) -> tuple[Floats, Floats]:
    """Return the columns `[taps - 1, channels]` of a state, and its matrices
    `[value_heads, key_dim, value_dim]`."""
    columns, matrices = np.split(state.astype(np.float64), [(net.taps - 1) * net.channels])
    blocks = matrices.reshape(net.value_heads, -1, net.key_dim, STATE_COLUMNS)
    s = blocks.transpose(0, 2, 1, 3).reshape(net.value_heads, net.key_dim, net.value_dim)
    return columns.reshape(net.taps - 1, net.channels), s


def _packed(net: DeltaRule, columns: Floats, s: Floats) -> Floats:
    blocks = s.reshape(net.value_heads, net.key_dim, -1, STATE_COLUMNS).transpose(0, 2, 1, 3)
    return np.concatenate([columns.ravel(), blocks.ravel()])


def _silu(x: Floats) -> Floats:
    return np.asarray(x / (1 + np.exp(-x)))


def _unit(x: Floats) -> Floats:
    return np.asarray(x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + _UNIT_EPSILON))
