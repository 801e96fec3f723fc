"""Reference attention: one head at a time over dense K and V, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.kv_blocks import BLOCK, PANEL


def attend(
    q: NDArray[np.floating],
    k: NDArray[np.floating],
    v: NDArray[np.floating],
    start: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: NDArray[np.floating] | None = None,
) -> NDArray[np.float64]:
    """Compute softmax(scale q k^T) v, where query `c` sees the keys up to position `start + c`.

    Args:
        q: queries `[C, H, D]` at positions `start ..`.
        k, v: keys `[start + C, Hkv, D]` and values `[start + C, Hkv, Dv]`; head `h` reads KV head
            `h // (H / Hkv)`.
        window: number of positions that a query sees, its own included; None: all positions.
        scale: factor of the scores; None is `D ** -0.5`.
        softcap: soft cap, if any: scores `s` become `softcap * tanh(s / softcap)`.
        sinks: for each head a score without key and value, `[H]`, as it enters the softmax.

    Returns:
        `[C, H, Dv]` float64.
    """
    tokens, heads, head_dim = q.shape
    group = heads // k.shape[1]
    factor = head_dim**-0.5 if scale is None else scale
    own, key = start + np.arange(tokens)[:, None], np.arange(len(k))
    hidden = (key > own) | (key <= own - (len(k) if window is None else window))
    out = np.empty((tokens, heads, v.shape[2]), np.float64)
    for head in range(heads):
        keys, values = (x[:, head // group].astype(np.float64) for x in (k, v))
        scores = q[:, head].astype(np.float64) @ keys.T * factor
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores[hidden] = -np.inf
        sink = -np.inf if sinks is None else float(sinks[head])
        largest = np.maximum(scores.max(axis=1, keepdims=True), sink)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=1, keepdims=True) + np.exp(sink - largest)
        out[:, head] = weights @ values / total
    return out


def heavy_panels(
    q: NDArray[np.floating], k: NDArray[np.floating], mass: float, *, scale: float | None = None
) -> NDArray[np.intp]:
    """Return the panels of keys that a head reads at a whole block of query positions, in order.

    Those of the first block, of its own and the one before, and the fewest others, as many as whole
    blocks have, with which they have `mass` of the attention of every sixteenth query.

    Args:
        q: its queries `[128, D]`, those of the last 128 keys.
        k: keys `[n, D]`, a multiple of 128.
    """
    panels, of_block = len(k) // PANEL, BLOCK // PANEL
    scores = q[PANEL - 1 :: PANEL].astype(np.float64) @ k.astype(np.float64).T
    scores *= q.shape[-1] ** -0.5 if scale is None else scale
    last = len(k) - BLOCK + np.arange(PANEL - 1, BLOCK, PANEL)
    scores[np.arange(len(k)) > last[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_panels = weights.sum(0).reshape(panels, PANEL).sum(-1)
    block = np.arange(panels) // of_block
    taken = (block == 0) | (block >= panels // of_block - 2)
    for count, panel in enumerate(np.argsort(np.where(taken, np.inf, -of_panels))):
        held = of_panels[taken].sum() >= mass * of_panels.sum()
        if taken.all() or (held and count % of_block == 0):
            break
        taken[panel] = True
    return np.flatnonzero(taken)
