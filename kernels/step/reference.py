"""Reference of the fused step in float64, which rounds where the kernels round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.altup import reference as altup
from edgellm.kernels.attention import reference as attention
from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.delta_net import reference as delta_net
from edgellm.kernels.experts import reference as experts
from edgellm.kernels.kv_append import reference as kv_append
from edgellm.kernels.kv_blocks import BLOCK, SEALED, KVFormat
from edgellm.kernels.kv_seal.reference import with_sealed
from edgellm.kernels.latent import reference as latents
from edgellm.kernels.linear.reference import linear as int8_linear
from edgellm.kernels.lora import LowRank
from edgellm.kernels.lora.reference import change
from edgellm.kernels.mamba2 import Mamba2Weights
from edgellm.kernels.mamba2 import reference as mamba2
from edgellm.kernels.rope import reference as rope
from edgellm.kernels.short_conv import reference as short_conv
from edgellm.kernels.step.weights import Activation, LayerWeights, StateMixer, Weights

Floats = NDArray[np.float64]
Matrices = Mapping[str, NDArray[np.float32]]
# Matrices whose inputs have 16 bits in the kernels.
_FINE = ("v", "k_as_v", "delta_a", "delta_b")
Changes = Mapping[str, LowRank]
# K and V of a layer, each as computed and as kept.
_Kept = list[tuple[Floats, Floats]]
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
    every = through(
        weights, matrices, tokens, ropes, format=format, rounded=rounded, adapter=adapter
    )
    x = every[-1]
    if weights.streams is not None:
        x = altup.leave(
            _streams(weights, x),
            lambda rows, index: _products(
                matrices, {}, "", rounded, index, weights.stream_count - 1
            )(rows, "streams_leave"),
        )
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
    tokens: Sequence[int],
    ropes: Sequence[tuple[Sequence[float], float]],
    *,
    format: KVFormat,
    rounded: bool = True,
    adapter: Changes | None = None,
) -> list[Floats]:
    """Compute the residual `[C, E]` of all tokens before the first layer and behind each.

    Several streams stand side by side, `[C, S * E]`. Arguments are those of `forward`.
    """
    first = embed(weights, matrices, tokens)
    residuals = [first]
    if weights.streams is not None:
        project = _products(matrices, {}, "", rounded, 0, 1)
        streams = altup.enter(first, lambda x: project(x, "streams_enter"))
        residuals = [np.concatenate(streams, axis=1)]
    kept: dict[int, _Kept] = {}  # K and V of layers that have their own
    for index, layer in enumerate(weights.layers):
        x = residuals[-1]
        stored: KVFormat = "int8" if format in SEALED and (layer.window or layer.latent) else format
        if layer.altup is not None:
            streams = altup.predict(layer.altup, _streams(weights, x), weights.epsilon)
            x = streams[0]
        product_of = partial(_products, matrices, adapter or {}, f"layers.{index}.", rounded)
        product = product_of(0, 1)
        normed = norm(x, layer.attention_norm, layer.attention_norm_bias, weights.epsilon)
        turn = ropes[layer.rope]
        if layer.mixer is not None:
            mixed = _mixed(normed, layer.mixer, product, weights.epsilon)
        elif layer.latent is not None:
            assert layer.scale is not None
            mixed = latents.attend(
                normed,
                layer.latent,
                product_of,
                turn,
                heads=layer.heads,
                scale=layer.scale,
                format=stored,
            )
        else:
            if layer.kv_from is None:
                kept[index] = _keys_and_values(normed, layer, product, turn, stored)
            kv = kept[index if layer.kv_from is None else layer.kv_from]
            mixed = _attention(normed, layer, product, turn, kv, stored)
        o = _biased(product(mixed, "o"), layer.o_bias)
        post = layer.post_attention_norm, layer.post_attention_norm_bias
        x = x + norm(o, *post, weights.epsilon)
        if layer.laurel is not None:
            added = product(product(normed, "laurel.left"), "laurel.right")
            added = norm(added, layer.laurel.post_norm, None, weights.epsilon)
            x = (x + normed + added) / np.sqrt(2)
        if layer.beside is not None:
            x = x + product(_mixed(normed, layer.beside, product, weights.epsilon), "mamba_o")
        post = layer.post_mlp_norm, layer.post_mlp_norm_bias
        added = _feed_forward(x, layer, product_of, weights.epsilon)
        x = x + norm(added, *post, weights.epsilon)
        if layer.altup is not None:
            streams = altup.correct(layer.altup, streams, x, weights.epsilon)
            x = streams[0] * layer.altup.scale
        if layer.input is not None:
            e = layer_embeddings(weights, matrices, index, tokens, first, rounded=rounded)
            added = product(
                activate(product(x, "input.gate"), layer.activation) * e, "input.output"
            )
            added = norm(added, layer.input.post_norm, None, weights.epsilon)
            x = x + added
            if layer.altup is not None:
                streams[1:] += added
        if layer.altup is not None:
            x = np.concatenate(streams, axis=1)
        residuals.append(x * layer.output_scale)
    return residuals


def _streams(weights: Weights, x: Floats) -> Floats:
    """Return the streams `[S, C, E]` of rows that have them side by side."""
    return np.stack(np.split(x, weights.stream_count, axis=1))


def layer_embeddings(
    weights: Weights,
    matrices: Matrices,
    index: int,
    tokens: Sequence[int],
    first: Floats,
    *,
    rounded: bool,
) -> Floats:
    """Compute the embeddings of tokens for a layer, `[C, P]`; see `LayerTable`.

    Args:
        index: number of the layer.
        first: residual before the first layer `[C, E]`.
        rounded: as in `forward`.
    """
    assert weights.layer_table is not None
    hidden, count = first.shape[1], len(weights.layers)
    context = _products(matrices, {}, f"layers.{index}.", rounded, 0, 1)(first, "input.context")
    context = norm(context / np.sqrt(hidden), weights.layer_table.norm, None, weights.epsilon)
    table = matrices["layer_table"].reshape(-1, count, weights.layer_table.table.inputs)
    known = [token if token < len(table) else 0 for token in tokens]
    rows = table[known, index].astype(np.float64)
    return np.asarray((context + np.sqrt(rows.shape[1]) * rows) / np.sqrt(2))


def _keys_and_values(
    x: Floats,
    layer: LayerWeights,
    product: _Product,
    turn: tuple[Sequence[float], float],
    format: KVFormat,
) -> _Kept:
    """Compute K and V of a layer, `[C, Hkv, D]`, and as attention reads them from the cache."""
    shape = len(x), -1, layer.head_dim
    exact = layer.v is None  # K is V as well
    k = _biased(product(x, "k_as_v" if exact else "k"), layer.k_bias).reshape(shape)
    v = k if exact else _biased(product(x, "v"), layer.v_bias).reshape(shape)
    norms = layer.head_norms
    if norms is not None and norms.values:
        v = norm(v, np.ones(layer.head_dim, np.float32), None, norms.epsilon)
    k = _turned(k, None if norms is None else norms.k, layer, turn)
    return [
        (k, kv_append.round_trip(k, format, key=True)),
        (v, kv_append.round_trip(v, format, key=False)),
    ]


def _turned(
    heads: Floats,
    weight: NDArray[np.float32] | None,
    layer: LayerWeights,
    turn: tuple[Sequence[float], float],
) -> Floats:
    """Normalize and turn heads of Q or K, `[C, H, D]`."""
    (inv_freq, magnitude), norms = turn, layer.head_norms
    if norms is None or weight is None:
        return rope.apply(heads, inv_freq, 0, magnitude)
    if norms.after_rope:
        return head_norm(rope.apply(heads, inv_freq, 0, magnitude), weight, norms.epsilon)
    return rope.apply(head_norm(heads, weight, norms.epsilon), inv_freq, 0, magnitude)


def _attention(
    x: Floats,
    layer: LayerWeights,
    product: _Product,
    turn: tuple[Sequence[float], float],
    kv: _Kept,
    format: KVFormat,
) -> Floats:
    q = _biased(product(x, "q"), layer.q_bias).reshape(len(x), -1, layer.head_dim)
    q = _turned(q, None if layer.head_norms is None else layer.head_norms.q, layer, turn)
    parts, step = [], BLOCK if format in SEALED else len(x)
    for begin in range(0, len(x), step):  # rows that read the same blocks sealed
        end = min(begin + step, len(x))
        held = [
            with_sealed(rows, held, format, end - 1, key=key) if format in SEALED else held
            for (rows, held), key in zip(kv, (True, False), strict=True)
        ]
        attended = attention.attend(
            q[begin:end],
            held[0],
            held[1],
            begin,
            window=layer.window,
            scale=layer.scale,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )
        parts.append(attended)
    attended = np.concatenate(parts).reshape(len(x), -1)
    if layer.q_gate is None:
        return attended
    return np.asarray(attended / (1 + np.exp(-product(x, "q_gate"))))


def _mixed(x: Floats, mixer: StateMixer, product: _Product, epsilon: float) -> Floats:
    """Compute what a mixer with states gives for all rows of a sequence, from its start."""
    if isinstance(mixer, Mamba2Weights):
        vectors = mixer.vectors
        return mamba2.mix(product(x, "mamba_in"), vectors, mamba2.State.zero(vectors))[0]
    if isinstance(mixer, DeltaNetWeights):
        qkv, z, a, b = (product(x, f"delta_{name}") for name in ("qkv", "z", "a", "b"))
        return delta_net.delta_net(mixer, (qkv, z, a, b), epsilon)[0]
    return short_conv.mix(product(x, "conv_in"), mixer.filters)


def _feed_forward(
    residual: Floats,
    layer: LayerWeights,
    product_of: Callable[[int, int], _Product],
    epsilon: float,
) -> Floats:
    """Compute the MLP, or the experts that the router chooses for each row, and the shared one.

    Args:
        product_of: gives the products of one of so many parts of the layer.
    """
    x = norm(residual, layer.mlp_norm, layer.mlp_norm_bias, epsilon)
    if layer.routing is None or layer.router is None:
        return _mlp(x, layer, product_of(0, 1))
    read = routed = x
    if layer.experts_norm is not None:
        read = norm(residual, layer.experts_norm, None, epsilon)
        routed = norm(residual, layer.router_norm, None, epsilon)
    count, out = layer.routing.experts, np.zeros_like(x)
    logits = _biased(routed @ layer.router.T.astype(np.float64), layer.router_bias)
    shares = experts.shares(logits, layer.routing, layer.selection_bias, layer.expert_scale)
    for expert in range(count):
        rows = shares[:, expert] != 0
        if rows.any():
            y = _mlp(read[rows], layer, product_of(expert, count), expert, count)
            out[rows] += shares[rows, expert, None] * y
    if layer.shared is None:
        return out
    product, share = product_of(0, 1), np.ones((len(x), 1))
    if layer.shared_router is not None:
        share = 1 / (1 + np.exp(-x @ layer.shared_router.astype(np.float64)))[:, None]
    inner = gated(product(x, "shared_gate"), product(x, "shared_up"), layer.activation)
    added = norm(share * product(inner, "shared_down"), layer.shared_post_norm, None, epsilon)
    return norm(out, layer.experts_post_norm, None, epsilon) + added


def _mlp(
    x: Floats, layer: LayerWeights, product: _Product, expert: int = 0, count: int = 1
) -> Floats:
    """Compute an MLP, which may be one of `count` experts."""

    def biased(x: Floats, name: str) -> Floats:
        bias = getattr(layer, f"{name}_bias")
        return _biased(product(x, name), None if bias is None else np.split(bias, count)[expert])

    up = biased(x, "up")
    if layer.gate is None:
        return biased(activate(up, layer.activation), "down")
    gate = biased(x, "gate")
    if layer.cutoff is not None:
        gate = exceeding(gate, layer.cutoff)
    inner = gated(gate, up, layer.activation)
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
        exact, name = name in _FINE, name.removesuffix("_as_v")
        weight, by = np.split(matrices[prefix + name], parts)[part], changes.get(prefix + name)
        added = 0.0 if by is None else change(x, by, part)
        if rounded and not exact:
            return int8_linear(x.astype(np.float32), weight) + added
        return x @ weight.T.astype(np.float64) + added

    return product


def activate(x: Floats, activation: Activation) -> Floats:
    """Apply SiLU, or GELU in its tanh form (Hendrycks and Gimpel, arXiv:1606.08415)."""
    if activation == "gelu_tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    return np.asarray(x / (1 + np.exp(-x)))


def exceeding(gate: Floats, deviations: float) -> Floats:
    """Return what gates exceed the mean and `deviations` standard deviations of their row by."""
    cutoff = gate.mean(axis=-1, keepdims=True) + deviations * gate.std(axis=-1, keepdims=True)
    return np.asarray(np.maximum(gate - cutoff, 0))


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
