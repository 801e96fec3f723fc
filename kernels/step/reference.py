"""The fused step written out in float64, rounding where the kernels round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.attention import reference as attention
from edgellm.kernels.kv_append import reference as kv_append
from edgellm.kernels.kv_blocks import KVFormat
from edgellm.kernels.linear.reference import linear as int8_linear
from edgellm.kernels.rope import reference as rope

Floats = NDArray[np.float64]


def forward(
    weights: Mapping[str, NDArray[np.float32]],
    tokens: Sequence[int],
    inv_freq: Sequence[float],
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    epsilon: float,
    format: KVFormat,
    window: int | None = None,
    rounded: bool = True,
) -> tuple[Floats, Floats]:
    """All tokens of a sequence from its start.

    Args:
        weights: dequantized, `[N, K]`, under the names of `Weights` and `LayerWeights`, those of a
            layer as `layers.0.q`.
        rounded: whether linear layers round their inputs, as those in C++ do.

    Returns:
        Hidden states after the final norm `[C, E]` and logits `[C, V]`.
    """
    linear = _rounded if rounded else _exact
    x = weights["embedding"][list(tokens)].astype(np.float64)
    for layer in range(layers):
        part = {n: w for n, w in weights.items() if n.startswith(f"layers.{layer}.")}
        w = {name.split(".")[2]: value for name, value in part.items()}
        normed = _norm(x, w["attention_norm"], epsilon)
        head_dim = w["o"].shape[1] // heads
        first_value = (heads + kv_heads) * head_dim
        bias = w.get("qkv_bias", np.zeros(first_value + kv_heads * head_dim, np.float32))
        qk = linear(normed, np.concatenate([w["q"], w["k"]])) + bias[:first_value]
        v = normed @ w["v"].T.astype(np.float64) + bias[first_value:]
        v = v.reshape(-1, kv_heads, head_dim)
        rotated = rope.apply(qk.reshape(len(tokens), -1, head_dim), inv_freq, 0)
        k = kv_append.round_trip(rotated[:, heads:], format, key=True)
        v = kv_append.round_trip(v, format, key=False)
        attended = attention.attend(rotated[:, :heads], k, v, 0, window=window)
        x = x + linear(attended.reshape(len(tokens), -1), w["o"])
        normed = _norm(x, w["mlp_norm"], epsilon)
        gate = linear(normed, w["gate"])
        activated = gate / (1 + np.exp(-gate)) * linear(normed, w["up"])
        x = x + linear(activated, w["down"])
    states = _norm(x, weights["final_norm"], epsilon)
    return states, states @ weights["head"].T.astype(np.float64)


def _rounded(x: Floats, weight: NDArray[np.float32]) -> Floats:
    return int8_linear(x.astype(np.float32), weight)


def _exact(x: Floats, weight: NDArray[np.float32]) -> Floats:
    return x @ weight.T.astype(np.float64)


def _norm(x: Floats, weight: NDArray[np.float32], epsilon: float) -> Floats:
    """RMSNorm (Zhang and Sennrich, arXiv:1910.07467)."""
    normed: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight
    return normed
