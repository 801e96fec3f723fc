"""Reference of attention over latents in float64, which rounds where the kernels round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.attention import reference as attention
from edgellm.kernels.kv_append import reference as kv_append
from edgellm.kernels.kv_blocks import KVFormat
from edgellm.kernels.latent.weights import LatentWeights
from edgellm.kernels.rope import reference as rope

Floats = NDArray[np.float64]


def attend(
    x: Floats,
    weights: LatentWeights,
    product_of: Callable[[int, int], Callable[[Floats, str], Floats]],
    turn: tuple[Sequence[float], float],
    *,
    heads: int,
    scale: float,
    format: KVFormat,
) -> Floats:
    """Compute what the output projection reads, for all rows `[C, E]` of a sequence.

    Args:
        product_of: gives the products with one of so many parts of the rows of a matrix.
        turn: frequencies and magnitude of RoPE.
        format: how keys and latents are rounded.

    Returns:
        Values of all heads `[C, H * value]`.
    """

    def turned(rows: Floats) -> Floats:
        inv_freq, magnitude = turn
        return rope.apply(rows, inv_freq, 0, magnitude)

    whole, row = product_of(0, 1), x
    if weights.query_norm is not None:
        row = _norm(whole(x, "query_down"), weights.query_norm, weights.epsilon)
    k = whole(x, "k")[:, None]
    latent = _norm(whole(x, "v"), weights.norm, weights.epsilon)[:, None]
    q = whole(row, "q").reshape(len(x), heads, -1)
    rotated, rest = np.split(q, [k.shape[2]], axis=2)
    up = [product_of(head, heads)(rest[:, head], "key_up") for head in range(heads)]
    k = kv_append.round_trip(turned(k), format, key=True)
    latent = kv_append.round_trip(latent, format, key=False)
    seen = attention.attend(
        np.concatenate((turned(rotated), np.stack(up, axis=1)), axis=2),
        np.concatenate((k, latent), axis=2),
        latent,
        0,
        scale=scale,
    )
    values = [product_of(head, heads)(seen[:, head], "value_up") for head in range(heads)]
    return np.concatenate(values, axis=1)


def _norm(x: Floats, weight: NDArray[np.float32], epsilon: float) -> Floats:
    """Apply RMSNorm (arXiv:1910.07467)."""
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight)
