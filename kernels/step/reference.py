"""Reference of the fused step in float64, which rounds where the kernels round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.attention import reference as attention
from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.delta_net import reference as delta_net
from edgellm.kernels.experts import reference as experts
from edgellm.kernels.kv_append import reference as kv_append
from edgellm.kernels.kv_blocks import KVFormat
from edgellm.kernels.linear.reference import linear as int8_linear
from edgellm.kernels.lora import LowRank
from edgellm.kernels.lora.reference import change
from edgellm.kernels.rope import reference as rope
from edgellm.kernels.short_conv import reference as short_conv
from edgellm.kernels.step.weights import Activation, LayerWeights, StateMixer, Weights

Floats = NDArray[np.float64]
Matrices = Mapping[str, NDArray[np.float32]]
# Matrices whose inputs have 16 bits in the kernels.
_FINE = ("v", "delta_a", "delta_b")
Changes = Mapping[str, LowRank]
# Function that multiplies rows by the matrix of a name.
_Product = Callable[[Floats, str], Floats]


def forward(
    weights: Weights,
    matrices: Matrices,
    tokens: Sequence[int],
    ropes: Sequence[tuple[Sequence[float], float]],
    *,
    format: KVFormat,
    rounded: bool = True,
    adapter: Changes | None = None,
) -> tuple[Floats, Floats]:
    """Compute hidden states and logits of all tokens of a sequence, from its start.

    Args:
        matrices: dequantized panels of `weights`, `[N, K]`, under the names of `Weights` and
            `LayerWeights`; names in a layer are written `layers.0.q`.
        ropes: frequencies and magnitude of each RoPE.
        rounded: whether linear layers round their inputs, as the C++ kernels do.
        adapter: changes of linear layers, under the names of `matrices`.

    Returns:
        Hidden states after the final norm `[C, E]` and logits `[C, V]`.
    """
    x = embed(weights, matrices, tokens)
    every = range(len(weights.layers))
    x = through(weights, matrices, x, every, ropes, format=format, rounded=rounded, adapter=adapter)
    states = norm(x, weights.final_norm, weights.final_norm_bias, weights.epsilon)
    logits = states @ matrices["head"].T.astype(np.float64)
    if weights.logit_softcap is not None:
        logits = weights.logit_softcap * np.tanh(logits / weights.logit_softcap)
    return states, logits


def embed(weights: Weights, matrices: Matrices, tokens: Sequence[int]) -> Floats:
    """Return the residual before the first layer, `[C, E]`."""
    return matrices["embedding"][list(tokens)].astype(np.float64) * weights.embedding_scale


def through(
    weights: Weights,
    matrices: Matrices,
    x: Floats,
    layers: range,
    ropes: Sequence[tuple[Sequence[float], float]],
    *,
    format: KVFormat,
    rounded: bool = True,
    adapter: Changes | None = None,
) -> Floats:
    """Take the residual `[C, E]` of all tokens of a sequence through a run of layers.

    Other arguments are those of `forward`.
    """
    for index in layers:
        layer = weights.layers[index]
        product_of = partial(_products, matrices, adapter or {}, f"layers.{index}.", rounded)
        product = product_of(0, 1)
        normed = norm(x, layer.attention_norm, layer.attention_norm_bias, weights.epsilon)
        if layer.mixer is None:
            mixed = _attention(normed, layer, product, ropes[layer.rope], format)
        else:
            mixed = _mixed(normed, layer.mixer, product, weights.epsilon)
        o = _biased(product(mixed, "o"), layer.o_bias)
        post = layer.post_attention_norm, layer.post_attention_norm_bias
        x = x + norm(o, *post, weights.epsilon)
        normed = norm(x, layer.mlp_norm, layer.mlp_norm_bias, weights.epsilon)
        post = layer.post_mlp_norm, layer.post_mlp_norm_bias
        x = x + norm(_feed_forward(normed, layer, product_of), *post, weights.epsilon)
    return x


def _attention(
    x: Floats,
    layer: LayerWeights,
    product: _Product,
    turn: tuple[Sequence[float], float],
    format: KVFormat,
) -> Floats:
    head_dim = layer.head_dim
    q, k = (
        _biased(product(x, name), bias).reshape(len(x), -1, head_dim)
        for name, bias in (("q", layer.q_bias), ("k", layer.k_bias))
    )
    v = _biased(product(x, "v"), layer.v_bias).reshape(len(x), -1, head_dim)
    inv_freq, magnitude = turn
    norms = layer.head_norms
    if norms is not None and not norms.after_rope:
        q, k = head_norm(q, norms.q, norms.epsilon), head_norm(k, norms.k, norms.epsilon)
    q, k = (rope.apply(rows, inv_freq, 0, magnitude) for rows in (q, k))
    if norms is not None and norms.after_rope:
        q, k = head_norm(q, norms.q, norms.epsilon), head_norm(k, norms.k, norms.epsilon)
    attended = attention.attend(
        q,
        kv_append.round_trip(k, format, key=True),
        kv_append.round_trip(v, format, key=False),
        0,
        window=layer.window,
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=layer.sinks,
    )
    attended = attended.reshape(len(x), -1)
    if layer.q_gate is None:
        return attended
    return np.asarray(attended / (1 + np.exp(-product(x, "q_gate"))))


def _mixed(x: Floats, mixer: StateMixer, product: _Product, epsilon: float) -> Floats:
    """Compute what a mixer with states gives for all rows of a sequence, from its start."""
    if isinstance(mixer, DeltaNetWeights):
        qkv, z, a, b = (product(x, f"delta_{name}") for name in ("qkv", "z", "a", "b"))
        return delta_net.delta_net(mixer, (qkv, z, a, b), epsilon)[0]
    return short_conv.mix(product(x, "conv_in"), mixer.filters)


def _feed_forward(
    x: Floats, layer: LayerWeights, product_of: Callable[[int, int], _Product]
) -> Floats:
    """Compute the MLP, or the experts that the router chooses for each row, and the shared one.

    Args:
        product_of: gives the products of one of so many parts of the layer.
    """
    if layer.routing is None or layer.router is None:
        return _mlp(x, layer, product_of(0, 1))
    count, out = layer.routing.experts, np.zeros_like(x)
    logits = _biased(x @ layer.router.T.astype(np.float64), layer.router_bias)
    shares = experts.shares(logits, layer.routing, layer.selection_bias)
    for expert in range(count):
        rows = shares[:, expert] > 0
        if rows.any():
            y = _mlp(x[rows], layer, product_of(expert, count), expert, count)
            out[rows] += shares[rows, expert, None] * y
    if layer.shared is None:
        return out
    product, share = product_of(0, 1), np.ones((len(x), 1))
    if layer.shared_router is not None:
        share = 1 / (1 + np.exp(-x @ layer.shared_router.astype(np.float64)))[:, None]
    inner = gated(product(x, "shared_gate"), product(x, "shared_up"), layer.activation)
    return out + share * product(inner, "shared_down")


def _mlp(
    x: Floats, layer: LayerWeights, product: _Product, expert: int = 0, count: int = 1
) -> Floats:
    """Compute an MLP, which may be one of `count` experts."""

    def biased(x: Floats, name: str) -> Floats:
        bias = getattr(layer, f"{name}_bias")
        return _biased(product(x, name), None if bias is None else np.split(bias, count)[expert])

    up = biased(x, "up")
    inner = (
        activate(up, layer.activation)
        if layer.gate is None
        else gated(biased(x, "gate"), up, layer.activation)
    )
    return biased(inner, "down")


def _products(
    matrices: Matrices, changes: Changes, prefix: str, rounded: bool, part: int, parts: int
) -> _Product:
    """Return a function for the products of one layer, or of one of its experts.

    Some take their input unrounded, because the kernels round it to 16 bits.

    Args:
        part, parts: number of an expert, and of all, of the matrices' rows.
    """

    def product(x: Floats, name: str) -> Floats:
        weight, by = np.split(matrices[prefix + name], parts)[part], changes.get(prefix + name)
        added = 0.0 if by is None else change(x, by)
        if rounded and name not in _FINE:
            return int8_linear(x.astype(np.float32), weight) + added
        return x @ weight.T.astype(np.float64) + added

    return product


def activate(x: Floats, activation: Activation) -> Floats:
    """Apply SiLU, or GELU in its tanh form (Hendrycks and Gimpel, arXiv:1606.08415)."""
    if activation == "gelu_tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    return np.asarray(x / (1 + np.exp(-x)))


def gated(gate: Floats, up: Floats, activation: Activation) -> Floats:
    """Compute `activation(gate) * up`, or the clamped form of gpt-oss (arXiv:2508.10925)."""
    if activation != "clamped_swiglu":
        return activate(gate, activation) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return np.asarray(gate / (1 + np.exp(-1.702 * gate)) * (up + 1))


def norm(
    x: Floats,
    weight: NDArray[np.float32] | None,
    bias: NDArray[np.float32] | None,
    epsilon: float,
) -> Floats:
    """Apply RMSNorm (arXiv:1910.07467), or LayerNorm (arXiv:1607.06450) if there is a bias.

    Without a weight, x is returned as it is.
    """
    if weight is None:
        return x
    if bias is not None:
        x = x - x.mean(axis=-1, keepdims=True)
    return _biased(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight, bias)


def head_norm(x: Floats, weight: NDArray[np.float32], epsilon: float) -> Floats:
    """Apply RMSNorm to heads `[C, H, D]`: to each by a weight `[D]`, or to all by `[H*D]`."""
    rows = x if len(weight) == x.shape[2] else x.reshape(len(x), 1, -1)
    return norm(rows, weight, None, epsilon).reshape(x.shape)


def _biased(x: Floats, bias: NDArray[np.float32] | None) -> Floats:
    return x if bias is None else x + bias
