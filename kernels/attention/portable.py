"""Attention of a chunk in numpy: gathered KV blocks, two batched matrix products, one softmax."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels import hadamard
from edgellm.kernels.kv_blocks import BLOCK, SCALED, BlockTable, KVBlocks

# Buffer of scores, computed for as many KV heads at a time as fit. Beyond a few tens of MB the
# softmax passes leave the last-level cache, and the buffer counts in a small machine's memory.
_SCORE_BYTES = 32 << 20


def attend(
    blocks: KVBlocks,
    table: BlockTable,
    layer: int,
    q: NDArray[np.float32],
    start: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Attend over the KV blocks of a sequence; see `attend` in `__init__.py`."""
    if window is not None:  # ids of blocks before the window are arbitrary, so skip them
        skipped = max(0, start + 1 - window) // BLOCK
        table, start = table[skipped:], start - skipped * BLOCK
    tokens, heads, head_dim = q.shape
    kv_heads = blocks.kv_heads
    group = heads // kv_heads
    length = start + tokens
    out = np.empty((kv_heads, group, tokens, head_dim), np.float32)
    queries = (
        (hadamard.transform(q) if blocks.format in SCALED else q)
        .transpose(1, 0, 2)
        .reshape(kv_heads, group * tokens, head_dim)
    )
    queries = queries * np.float32(head_dim**-0.5 if scale is None else scale)
    step = max(1, _SCORE_BYTES // (4 * group * tokens * length))
    for first in range(0, kv_heads, step):
        part = slice(first, min(first + step, kv_heads))
        k, v = (rows.astype(np.float32) for rows in blocks.read(table, layer, part, length))
        k_scale = _scales(blocks.k_scale, table, layer, part, length)
        scores = queries[part] @ k.transpose(0, 2, 1)  # [h, G*C, length]
        if k_scale is not None:
            scores *= k_scale[:, None, :]
        if softcap is not None:
            scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        _mask(scores.reshape(-1, group, tokens, length), start, window)
        largest = scores.max(axis=-1, keepdims=True)
        scores -= largest
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        if sinks is not None:
            of_rows = sinks.reshape(kv_heads, group)[part].repeat(tokens, axis=1)
            total += np.exp(of_rows[..., None] - largest)
        v_scale = _scales(blocks.v_scale, table, layer, part, length)
        if v_scale is not None:
            scores *= v_scale[:, None, :]
        out[part] = ((scores @ v) / total).reshape(-1, group, tokens, head_dim)
    return out.transpose(2, 0, 1, 3).reshape(tokens, heads, head_dim)


def _scales(
    scales: NDArray[np.float32] | None,
    table: BlockTable,
    layer: int,
    heads: slice,
    length: int,
) -> NDArray[np.float32] | None:
    """Gather a sequence's scales `[h, length]`; None if the format has no scales."""
    if scales is None:
        return None
    ids = np.asarray(table[: -(-length // BLOCK)], np.intp)
    flat = scales[ids, layer, heads].transpose(1, 0, 2)
    return flat.reshape(flat.shape[0], -1)[:, :length]


def _mask(scores: NDArray[np.float32], start: int, window: int | None) -> None:
    """Set the scores `[h, G, C, length]` that a query must not see to -inf, in place."""
    tokens = scores.shape[2]
    if tokens > 1:
        future = np.triu(np.ones((tokens, tokens), np.bool_), k=1)
        scores[..., start:][..., future] = -np.inf
    if window is not None and start + tokens > window:
        positions = np.arange(scores.shape[3])
        oldest = start + 1 - window + np.arange(tokens)
        scores[..., positions < oldest[:, None]] = -np.inf
