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


def heavy_blocks(
    q: NDArray[np.floating], k: NDArray[np.floating], mass: float, *, scale: float | None = None
) -> list[int]:
    """Return the key blocks that a whole block of query positions reads for a KV head, in order.

    The first one, its own and the one before, and for each head the fewest others with which they
    have `mass` of its attention, as told by the antidiagonals of tiles of 16 queries and 16 keys.

    Args:
        q: its queries `[128, H, D]`, those of the last 128 keys.
        k: keys `[n, D]`, a multiple of 128.
    """
    own, tiles = len(k) // BLOCK - 1, BLOCK // PANEL
    keys = k.astype(np.float64).reshape(-1, PANEL, k.shape[1])
    queries = q.astype(np.float64).reshape(tiles, PANEL, *q.shape[1:])[:, ::-1]
    scores = np.einsum("irhd,jrd->hij", queries, keys) / PANEL
    scores *= q.shape[-1] ** -0.5 if scale is None else scale
    later = np.arange(len(keys)) > own * tiles + np.arange(tiles)[:, None]
    scores[:, later] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    taken = set[int]()
    for of_head in weights:
        of_blocks = of_head.sum(0).reshape(-1, tiles).sum(-1)
        chosen = list({0, max(own - 1, 0), own})
        for block in np.argsort(-of_blocks):
            if of_blocks[chosen].sum() >= mass * of_blocks.sum():
                break
            if block not in chosen:
                chosen.append(int(block))
        taken.update(chosen)
    return sorted(taken)
