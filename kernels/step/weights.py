"""Weights for the fused steps in C++ and Triton, and checks that their parts fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.experts import Routing
from edgellm.kernels.experts.native import BESIDE
from edgellm.kernels.kv_append.norms import HeadNorms
from edgellm.kernels.kv_blocks import KVBlocks
from edgellm.kernels.linear import PANEL, PackedWeights
from edgellm.kernels.lora import AdapterWeights
from edgellm.kernels.mamba2 import Mamba2Weights
from edgellm.kernels.short_conv import ShortConvWeights
from edgellm.kernels.state_blocks import StateBlocks

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
class LayerTable:
    """Embeddings of tokens for each layer, `e = (norm(c / sqrt(E)) + sqrt(P) * row) / sqrt(2)`.

    Attributes:
        table: `[V * layers, P]`; a token has one row for each layer, side by side.
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
        q_gate: projection to the gate of attention's outputs, `[H*D, E]`, or None.
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
    """

    o: PackedWeights
    up: PackedWeights
    down: PackedWeights
    q: PackedWeights | None = None
    k: PackedWeights | None = None
    v: PackedWeights | None = None
    heads: int = 0
    kv_from: int | None = None
    q_gate: PackedWeights | None = None
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

    @property
    def head_dim(self) -> int:
        return self.o.inputs // self.heads

    @property
    def pools(self) -> tuple[int, ...]:
        """Pools that have something of the layer's own."""
        own = () if self.kv_from is not None else (self.pool,)
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
        mlp = (self.gate, self.up, self.down, *(self.shared or ()))
        beside = () if self.beside is None else (*self.beside.linears, self.mamba_o)
        every = (*mixer, self.q_gate, self.o, *beside, *mlp, *inputs)
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

    @property
    def slots(self) -> list[int]:
        """Index of each layer, or of the one whose K and V it reads, among those of its pool."""
        owners = (index if x.kv_from is None else x.kv_from for index, x in enumerate(self.layers))
        return [self._slot(owner, self.layers[owner].pool) for owner in owners]

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
        return sum(panels.data.nbytes for panels in (*tables.values(), *linears))


def check_weights(weights: Weights, *, ropes: int) -> None:
    """Refuse weights whose shapes do not fit together in one model.

    Args:
        ropes: number of RoPE tables.

    Raises:
        ValueError: a part does not fit; the message names it.
    """
    hidden, vocabulary = weights.embedding.inputs, weights.embedding.outputs
    _require_floats("final_norm", weights.final_norm, hidden)
    if weights.final_norm_bias is not None:
        _require_floats("final_norm_bias", weights.final_norm_bias, hidden)
    for name, table in (("embedding", weights.embedding), ("head", weights.head)):
        _require(name, (table.outputs, table.inputs), (vocabulary, hidden))
    if not weights.layers:
        raise ValueError("weights without a layer")
    for index, layer in enumerate(weights.layers):
        _check_layer(layer, hidden)
        _check_source(weights.layers, index)
        _check_input(weights, layer)
        if not 0 <= layer.rope < ropes:
            raise ValueError(f"RoPE table {layer.rope} of {ropes}")


def _check_layer(layer: LayerWeights, hidden: int) -> None:
    intermediate, sizes = layer.up.outputs, {"hidden": hidden}
    experts = _check_router(layer, hidden)
    if layer.mixer is None:
        sizes |= _check_attention(layer, hidden)
    else:
        beside = layer.q, layer.k, layer.v, layer.q_gate
        _require("projections beside a mixer", beside, (None,) * 4)
        layer.mixer.check(hidden)
        _require("o", layer.o.inputs, layer.mixer.size)
    _require("o", layer.o.outputs, hidden)
    _check_beside(layer, hidden)
    for name, linear in (("gate", layer.gate), ("up", layer.up)):
        if linear is not None:
            _require(name, (linear.outputs, linear.inputs), (intermediate, hidden))
    down = experts * hidden, intermediate // experts
    _require("down", (layer.down.outputs, layer.down.inputs), down)
    for name, of in VECTORS.items():
        vector = getattr(layer, name)
        if vector is not None:
            each = experts if name == "down_bias" else 1
            _require_floats(name, vector, each * sizes.get(of, intermediate))
    if layer.sinks is not None:
        _require_floats("sinks", layer.sinks, layer.heads)
    for name in VECTORS:
        lacks_norm = getattr(layer, name.removesuffix("_bias"), 0) is None
        if name.endswith("norm_bias") and lacks_norm and getattr(layer, name) is not None:
            raise ValueError(f"{name} without a norm")


def _check_beside(layer: LayerWeights, hidden: int) -> None:
    """Check the mixer beside attention, if there is one."""
    if layer.beside is None or layer.mamba_o is None:
        _require("mamba_o and beside", (layer.mamba_o, layer.beside), (None, None))
        return
    if layer.mixer is not None or layer.post_attention_norm is not None:
        raise ValueError("a mixer beside another one; needed is attention without a norm behind it")
    layer.beside.check(hidden)
    shape = layer.mamba_o.outputs, layer.mamba_o.inputs
    _require("mamba_o", shape, (hidden, layer.beside.size))


def _check_attention(layer: LayerWeights, hidden: int) -> dict[str, int]:
    """Check the projections of a layer; returns their outputs."""
    width, heads, kv = layer.o.inputs, layer.heads, 0 if layer.k is None else layer.k.outputs
    for name, linear, outputs in (("q", layer.q, width), ("k", layer.k, kv), ("v", layer.v, kv)):
        if linear is not None:
            _require(name, (linear.outputs, linear.inputs), (outputs, hidden))
    if layer.q_gate is not None:
        _require("q_gate", (layer.q_gate.outputs, layer.q_gate.inputs), (width, hidden))
    # a row of Q ends where K begins: a padded panel would write over it
    if layer.q is None or width % heads or width % PANEL or kv % PANEL:
        raise ValueError(
            f"Q has {width} outputs, K and V {kv}; needed are whole panels of {PANEL} "
            f"and {heads} heads"
        )
    if layer.head_norms is not None and layer.k is not None:
        layer.head_norms.check(heads, layer.kv_heads, layer.head_dim)
    return {"q": width, "k": kv, "v": kv}


def _check_source(layers: Sequence[LayerWeights], index: int) -> None:
    """Check whose K and V a layer reads."""
    layer = layers[index]
    if layer.mixer is not None:
        return
    if (layer.k is None) != (layer.kv_from is not None) or (layer.k is None and layer.v):
        raise ValueError("needed is either K of a layer's own, or a layer whose K and V it reads")
    if layer.kv_from is None:
        return
    source = layers[layer.kv_from] if 0 <= layer.kv_from < index else None
    if source is None or source.k is None:
        raise ValueError(f"layer {index} reads K and V of {layer.kv_from}; needed is one before it")
    kind = source.head_dim, source.pool, source.window
    _require("head_dim, pool and window", (layer.head_dim, layer.pool, layer.window), kind)
    if layer.heads % source.kv_heads:
        raise ValueError(f"{layer.heads} heads; needed are those of {source.kv_heads} KV heads")
    norms = layer.head_norms
    if norms is not None and (norms.q.shape != (layer.head_dim,) or norms.q.dtype != np.float32):
        raise ValueError(f"norm of Q is {norms.q.dtype} {norms.q.shape}; needed is one of heads")


def _check_input(weights: Weights, layer: LayerWeights) -> None:
    """Check the embeddings of a layer's own."""
    hidden, given = weights.embedding.inputs, layer.input
    if given is None:
        return
    if weights.layer_table is None:
        raise ValueError("a layer with embeddings of its own; needed is their table")
    table, width = weights.layer_table.table, weights.layer_table.table.inputs
    _require("layer_table", table.outputs, weights.embedding.outputs * len(weights.layers))
    _require_floats("layer_table.norm", weights.layer_table.norm, width)
    _require_floats("input.post_norm", given.post_norm, hidden)
    for name, linear in (("context", given.context), ("gate", given.gate)):
        _require(f"input.{name}", (linear.outputs, linear.inputs), (width, hidden))
    _require("input.output", (given.output.outputs, given.output.inputs), (hidden, width))
    if width % PANEL:
        raise ValueError(f"input.gate has {width} outputs; needed are whole panels of {PANEL}")


def _check_router(layer: LayerWeights, hidden: int) -> int:
    """Check the router of a layer; returns its number of experts, 1 without a router."""
    routing, router = layer.routing, layer.router
    if routing is None and router is None:
        if layer.shared is not None:
            raise ValueError("a shared expert without a router")
        return 1
    if routing is None or router is None:
        raise ValueError("router without routing, or routing without router")
    if layer.gate is None:
        raise ValueError("experts without a gate; needed is one")
    experts = routing.experts
    if not 1 <= routing.used <= experts:
        raise ValueError(f"{routing.used} of {experts} experts are used; 1 to {experts} can be")
    if router.dtype != np.float32 or router.shape != (experts, hidden):
        raise ValueError(
            f"router is {router.dtype} {router.shape}; needed is float32 {(experts, hidden)}"
        )
    if layer.up.outputs % (2 * PANEL * experts):
        raise ValueError(
            f"{experts} experts have {layer.up.outputs} outputs of up; needed are as many for "
            f"each, in pairs of panels of {PANEL}"
        )
    vectors = {
        "router_bias": routing.bias,
        "selection_bias": routing.selection_bias,
        "expert_scale": routing.scaled,
    }
    for name, needed in vectors.items():
        vector = getattr(layer, name)
        _require(f"{name} is there", vector is not None, needed)
        if vector is not None:
            _require_floats(name, vector, experts)
    _check_shared(layer, hidden)
    return experts


def _check_shared(layer: LayerWeights, hidden: int) -> None:
    """Check the shared expert of a layer, if there is one."""
    parts = layer.shared_gate, layer.shared_up, layer.shared_down, layer.shared_router
    norms = [getattr(layer, name) for name in BESIDE]
    if layer.shared is None:
        if any(part is not None for part in (*parts, *norms)):
            raise ValueError("a part of a shared expert; needed are gate, up and down")
        return
    gate, up, down = layer.shared
    for name, linear in (("shared_gate", gate), ("shared_up", up)):
        _require(name, (linear.outputs, linear.inputs), (up.outputs, hidden))
    _require("shared_down", (down.outputs, down.inputs), (hidden, up.outputs))
    if up.outputs % (2 * PANEL):
        raise ValueError(f"shared_up has {up.outputs} outputs; needed are pairs of panels")
    if layer.shared_router is not None:
        _require_floats("shared_router", layer.shared_router, hidden)
    if all(each is None for each in norms):
        return
    if any(each is None for each in (*norms, layer.mlp_norm, layer.post_mlp_norm)):
        raise ValueError("an MLP beside experts; needed are its norms, theirs and the layer's")
    if layer.mlp_norm_bias is not None or layer.shared_router is not None:
        raise ValueError("an MLP beside experts with a layer norm or a share; needed is neither")
    for name, weight in zip(BESIDE, norms, strict=True):
        _require_floats(name, weight, hidden)


def check_pools(weights: Weights, pools: Sequence[KVBlocks | StateBlocks]) -> None:
    """Refuse pools of KV blocks or states that were made for another model.

    Raises:
        ValueError: the number of pools, or their layers, heads, states or formats differ.
    """
    needed: list[tuple[int, ...]] = []
    for number in range(1 + max(pool for layer in weights.layers for pool in layer.pools)):
        members = [x for x in weights.layers if number in x.pools]
        sizes = {_pool_sizes(layer, number) for layer in members}
        if len(sizes) != 1:
            raise ValueError(
                f"layers of pool {number} have KV heads and head_dim, or states of the sizes "
                f"{sorted(sizes)}"
            )
        needed.append((len(members), *sizes.pop()))
    there = [
        blocks.states.shape[1:]
        if isinstance(blocks, StateBlocks)
        else (blocks.layers, blocks.kv_heads, blocks.head_dim)
        for blocks in pools
    ]
    if there != needed:
        raise ValueError(
            f"pools of layers, KV heads and head_dim, or layers and numbers of a state {there}; "
            f"needed are {needed}"
        )
    if len({blocks.format for blocks in pools if isinstance(blocks, KVBlocks)}) > 1:
        raise ValueError("pools of several formats; needed is one")


def check_adapter(adapter: AdapterWeights, weights: Weights) -> None:
    """Refuse an adapter that was made for another model, or that changes experts or mixers with
    states.

    Raises:
        ValueError: the number of layers or the shape of a change differs.
    """
    _require("layers of the adapter", len(adapter.layers), len(weights.layers))
    for index, (changes, layer) in enumerate(zip(adapter.layers, weights.layers, strict=True)):
        for name, change in changes.items():
            linear = getattr(layer, name)
            of_experts = layer.routing is not None and name in ("gate", "up", "down")
            if linear is None or of_experts or (layer.mixer is not None and name == "o"):
                raise ValueError(f"layers.{index} has no {name} that an adapter can change")
            shape = change.outputs, change.inputs
            _require(f"layers.{index}.{name}", shape, (linear.outputs, linear.inputs))


def _pool_sizes(layer: LayerWeights, pool: int) -> tuple[int, ...]:
    if layer.beside is not None and pool == layer.beside_pool:
        return (layer.beside.state_size,)
    if layer.mixer is None:
        return layer.kv_heads, layer.head_dim
    return (layer.mixer.state_size,)


def _require(name: str, value: object, needed: object) -> None:
    if value != needed:
        raise ValueError(f"{name} is {value}; needed is {needed}")


def _require_floats(name: str, array: NDArray[Any], size: int) -> None:
    if array.dtype != np.float32 or array.shape != (size,) or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype} {array.shape}; needed is float32 ({size},)")
