"""Weights for the fused steps in C++ and Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.altup import AltUpWeights, Streams
from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.experts import Routing
from edgellm.kernels.kv_append.norms import HeadNorms
from edgellm.kernels.latent import LatentWeights
from edgellm.kernels.linear import PackedWeights
from edgellm.kernels.mamba2 import Mamba2Weights
from edgellm.kernels.short_conv import ShortConvWeights

Floats = NDArray[np.float32]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_swiglu")
# Weights of a mixer that keeps a state in place of K and V. Each has `linears` (its input
# projections), `size` (inputs of the layer's `o`), `state_size` (float32 numbers of a state), and
# `check`, which raises a ValueError where its parts do not fit each other and the residual's width.
StateMixer = ShortConvWeights | Mamba2Weights | DeltaNetWeights


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """Weights for a token's own embedding in a layer, of width P (see `LayerTable`).

    The layer adds `norm(output(activation(gate(x)) * e))` behind its MLP. The embedding e is made
    of a row of the table and of `context(x0)`, where x0 is the residual before the first layer.

    Attributes:
        context, gate: `[P, E]`.
        output: `[E, P]`.
        post_norm: weight of the norm `[E]`.
    """

    context: PackedWeights
    gate: PackedWeights
    output: PackedWeights
    post_norm: Floats


@dataclass(frozen=True, kw_only=True)
class Laurel:
    """Weights of what a layer adds beside attention (LAuReL, arXiv:2411.07501).

    Of the rows n that attention reads, the residual behind attention is
    `(x + attention(n) + n + norm(right(left(n)))) / sqrt(2)`.

    Attributes:
        left, right: `[rank, E]` and `[E, rank]`.
        post_norm: weight of the norm `[E]`.
    """

    left: PackedWeights
    right: PackedWeights
    post_norm: Floats


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """Embeddings of tokens for each layer, `e = (norm(c / sqrt(E)) + sqrt(P) * row) / sqrt(2)`.

    Attributes:
        table: `[V * layers, P]`; a token has one row for each layer, side by side. Where it has
            fewer, tokens behind have those of token 0.
        norm: weight of the norm of the contexts c, `[P]`.
    """

    table: PackedWeights
    norm: Floats


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of a layer: packed weights, and vectors `[E]` (norms) or `[outputs]` (biases).

    Attributes:
        q, k, v, heads: projections of attention, and its number of query heads. k and v are None in
            a layer that reads those of another; v alone is None where V is K before its norm.
        kv_from: index of the layer whose K and V this one reads; None: its own.
        slot: layer of the pool whose K and V this one reads, which another model has written; None:
            see `kv_from`.
        q_gate: projection to the gate of attention's outputs, `[H*D, E]`, or None.
        latent: what attention over latents has beside q, k and v (see there); or None.
        mixer: mixer in place of attention, which then has no projections and heads; or None.
        beside, mamba_o, beside_pool: Mamba-2 that reads the same rows as attention, its output
            projection, and the pool with its states; or None.
        gate: weight of the gate; None where the MLP is `down(activation(up(x)))`.
        attention_norm, mlp_norm: norms before attention and MLP; None where these read the residual
            as it is.
        post_attention_norm, post_mlp_norm: norms of the outputs of attention and MLP before they
            are added to the residual.
        attention_norm_bias ...: biases; a norm with a bias is a layer norm, else it is an RMS norm.
        router: weight of the router `[experts, E]`, or None. With a router gate and up are those of
            all experts, one behind the other, `[experts * F, E]`; so is down, `[experts * E, F]`,
            and so are their biases.
        router_bias, selection_bias: biases `[experts]` of the logits, and of the scores in the
            choice of experts alone.
        routing: choice of experts by the router's logits; None without a router.
        shared_gate, shared_up, shared_down: expert that all rows go through beside the chosen ones.
        shared_router: weight `[E]` whose product's sigmoid is that expert's share; None: 1.
        expert_scale: factors of the shares of the experts, `[experts]`, or None.
        shared_post_norm, experts_post_norm: norms of the outputs of the shared expert and of all
            others before they are added, of a shared expert that is an MLP beside the experts.
        experts_norm, router_norm: norms of the residual that these experts and their router read;
            the shared expert alone reads what `mlp_norm` gives then.
        sinks: for each query head a score without key and value, `[heads]`.
        head_norms: norms of Q and K, or None.
        rope: index of the RoPE table that turns Q and K.
        pool: index of the pool with the layer's K and V or state, as the next of that pool's
            layers.
        window: number of positions that a token sees; None: all positions.
        scale: factor of the scores; None is `D ** -0.5`.
        softcap: soft cap of the scores, or None.
        input: weights for embeddings of the layer's own, or None.
        output_scale: factor of the residual at the end of the layer.
        laurel: weights of what the layer adds beside attention, or None.
        altup: weights around several residual streams, of which the layer computes the first, and
            adds the embeddings of its own to all others; or None.
        cutoff: number of standard deviations above a row's mean from which on a gate of the MLP
            counts, by what it exceeds; None: all count as they are.
    """

    o: PackedWeights
    up: PackedWeights
    down: PackedWeights
    q: PackedWeights | None = None
    k: PackedWeights | None = None
    v: PackedWeights | None = None
    heads: int = 0
    kv_from: int | None = None
    slot: int | None = None
    q_gate: PackedWeights | None = None
    latent: LatentWeights | None = None
    mixer: StateMixer | None = None
    beside: Mamba2Weights | None = None
    mamba_o: PackedWeights | None = None
    beside_pool: int = 0
    gate: PackedWeights | None = None
    attention_norm: Floats | None = None
    attention_norm_bias: Floats | None = None
    q_bias: Floats | None = None
    k_bias: Floats | None = None
    v_bias: Floats | None = None
    o_bias: Floats | None = None
    post_attention_norm: Floats | None = None
    post_attention_norm_bias: Floats | None = None
    mlp_norm: Floats | None = None
    mlp_norm_bias: Floats | None = None
    gate_bias: Floats | None = None
    up_bias: Floats | None = None
    down_bias: Floats | None = None
    post_mlp_norm: Floats | None = None
    post_mlp_norm_bias: Floats | None = None
    router: Floats | None = None
    router_bias: Floats | None = None
    selection_bias: Floats | None = None
    routing: Routing | None = None
    shared_gate: PackedWeights | None = None
    shared_up: PackedWeights | None = None
    shared_down: PackedWeights | None = None
    shared_router: Floats | None = None
    expert_scale: Floats | None = None
    shared_post_norm: Floats | None = None
    experts_post_norm: Floats | None = None
    experts_norm: Floats | None = None
    router_norm: Floats | None = None
    sinks: Floats | None = None
    head_norms: HeadNorms | None = None
    activation: Activation = "silu"
    rope: int = 0
    pool: int = 0
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    input: LayerInput | None = None
    output_scale: float = 1.0
    laurel: Laurel | None = None
    altup: AltUpWeights | None = None
    cutoff: float | None = None

    @property
    def head_dim(self) -> int:
        if self.latent is not None and self.k is not None:
            return self.k.outputs
        return self.o.inputs // self.heads

    @property
    def pools(self) -> tuple[int, ...]:
        """Pools that have something of the layer's own."""
        own = () if self.kv_from is not None or self.slot is not None else (self.pool,)
        return own if self.beside is None else (*own, self.beside_pool)

    @property
    def kv_heads(self) -> int:
        """KV heads of the layer's own; 0 where it reads those of another layer."""
        return 0 if self.k is None else self.k.outputs // self.head_dim

    @property
    def qkv(self) -> tuple[PackedWeights, PackedWeights, PackedWeights]:
        """Projections to Q, K and V of a layer that has all three.

        Raises:
            ValueError: it lacks one of them.
        """
        if self.q is None or self.k is None or self.v is None:
            raise ValueError("a layer without q, k or v; needed are all three")
        return self.q, self.k, self.v

    @property
    def shared(self) -> tuple[PackedWeights, PackedWeights, PackedWeights] | None:
        """Gate, up and down of the shared expert; None: there is none."""
        gate, up, down = self.shared_gate, self.shared_up, self.shared_down
        return None if gate is None or up is None or down is None else (gate, up, down)

    @property
    def linears(self) -> tuple[PackedWeights, ...]:
        mixer = (self.q, self.k, self.v) if self.mixer is None else self.mixer.linears
        given = self.input
        inputs = () if given is None else (given.context, given.gate, given.output)
        laurel = () if self.laurel is None else (self.laurel.left, self.laurel.right)
        mlp = (self.gate, self.up, self.down, *(self.shared or ()))
        beside = () if self.beside is None else (*self.beside.linears, self.mamba_o)
        latent = () if self.latent is None else self.latent.linears
        every = (*mixer, *latent, self.q_gate, self.o, *beside, *laurel, *mlp, *inputs)
        return tuple(linear for linear in every if linear is not None)


# Vector in LayerWeights -> linear layer with as many outputs, or "hidden" for the residual's width.
VECTORS = {
    "attention_norm": "hidden",
    "attention_norm_bias": "hidden",
    "q_bias": "q",
    "k_bias": "k",
    "v_bias": "v",
    "o_bias": "hidden",
    "post_attention_norm": "hidden",
    "post_attention_norm_bias": "hidden",
    "mlp_norm": "hidden",
    "mlp_norm_bias": "hidden",
    "gate_bias": "up",
    "up_bias": "up",
    "down_bias": "hidden",
    "post_mlp_norm": "hidden",
    "post_mlp_norm_bias": "hidden",
}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of a whole model; `head` is `embedding` where they are tied.

    Attributes:
        embedding, head: `[V, E]`.
        epsilon: epsilon of the norms of the residual.
        embedding_scale: factor of the rows of the embedding.
        logit_softcap: soft cap of the logits, or None.
        layer_table: embeddings of tokens for each layer, or None.
        streams: weights around several residual streams, or None.
    """

    layers: Sequence[LayerWeights]
    final_norm: Floats
    embedding: PackedWeights
    head: PackedWeights
    epsilon: float
    final_norm_bias: Floats | None = None
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    layer_table: LayerTable | None = None
    streams: Streams | None = None

    @property
    def most_heads(self) -> int:
        """Query heads of the layer that has the most."""
        return max(layer.heads for layer in self.layers)

    @property
    def stream_count(self) -> int:
        """Number of residual streams."""
        return 1 if self.streams is None else self.streams.count

    @property
    def slots(self) -> list[int]:
        """Index of each layer, or of the one whose K and V it reads, among those of its pool."""
        return [
            self._slot(index if layer.kv_from is None else layer.kv_from, layer.pool)
            if layer.slot is None
            else layer.slot
            for index, layer in enumerate(self.layers)
        ]

    @property
    def beside_slots(self) -> list[int]:
        """Index of each layer's mixer beside attention among those of its pool; else 0."""
        return [
            0 if layer.beside is None else self._slot(index, layer.beside_pool)
            for index, layer in enumerate(self.layers)
        ]

    def _slot(self, index: int, pool: int) -> int:
        return sum(pool in layer.pools for layer in self.layers[:index])

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights, which are nearly all bytes of the model."""
        tables = {id(panels): panels for panels in (self.embedding, self.head)}
        linears = [panels for layer in self.layers for panels in layer.linears]
        if self.streams is not None:
            linears += (self.streams.enter, self.streams.leave)
        return sum(panels.data.nbytes for panels in (*tables.values(), *linears))
