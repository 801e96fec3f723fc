"""Reference attention: one query and head at a time over dense K and V, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
    out = np.empty((tokens, heads, v.shape[2]), np.float64)
    for token in range(tokens):
        end = start + token + 1
        begin = 0 if window is None else max(0, end - window)
        for head in range(heads):
            keys = k[begin:end, head // group].astype(np.float64)
            values = v[begin:end, head // group].astype(np.float64)
            scores = keys @ q[token, head].astype(np.float64) * factor
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            sink = np.full(1, -np.inf) if sinks is None else sinks[head : head + 1]
            largest = max(scores.max(), sink[0])
            weights = np.exp(scores - largest)
            out[token, head] = weights @ values / (weights.sum() + np.exp(sink[0] - largest))
    return out
