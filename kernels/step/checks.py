"""Checks that the parts of a model for the fused steps fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.experts.native import BESIDE
from edgellm.kernels.kv_blocks import SEALED, KVBlocks, SealedBlocks
from edgellm.kernels.latent import LatentWeights
from edgellm.kernels.linear import PANEL, PackedWeights
from edgellm.kernels.lora import AdapterWeights
from edgellm.kernels.quantized import GROUP
from edgellm.kernels.state_blocks import StateBlocks
from edgellm.kernels.step.weights import VECTORS, LayerWeights, Weights

Pool = KVBlocks | SealedBlocks | StateBlocks


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
    if weights.streams is not None:
        weights.streams.check(hidden)
    if not weights.layers:
        raise ValueError("weights without a layer")
    for index, layer in enumerate(weights.layers):
        _check_layer(layer, hidden)
        _check_source(weights.layers, index)
        _check_input(weights, layer)
        _check_streams(weights, layer)
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
    _check_laurel(layer, hidden)
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
    if layer.latent is not None:
        return _check_latent(layer, layer.latent, hidden)
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


def _check_latent(layer: LayerWeights, latent: LatentWeights, hidden: int) -> dict[str, int]:
    """Check a layer that attends over latents; returns the outputs of its projections."""
    q, k, v = layer.qkv
    inputs = latent.check(heads=layer.heads, hidden=hidden)
    sizes = {
        "q": layer.heads * (k.outputs + latent.key_up.inputs),
        "k": k.outputs,
        "v": latent.rank,
    }
    for name, linear in (("q", q), ("k", k), ("v", v)):
        needed = sizes[name], inputs if name == "q" else hidden
        _require(name, (linear.outputs, linear.inputs), needed)
        if linear.outputs % PANEL:
            raise ValueError(f"{name} has {linear.outputs} outputs; needed are panels of {PANEL}")
    _require("o", layer.o.inputs, latent.value_up.outputs)
    others = layer.q_gate, layer.q_bias, layer.k_bias, layer.v_bias, layer.head_norms, layer.kv_from
    _require("gates, biases, norms and layers beside latents", others, (None,) * 6)
    _require("scale is there", layer.scale is not None, True)
    return sizes


def _check_source(layers: Sequence[LayerWeights], index: int) -> None:
    """Check whose K and V a layer reads."""
    layer = layers[index]
    if layer.mixer is not None:
        return
    sources = [x for x in (layer.k, layer.kv_from, layer.slot) if x is not None]
    if len(sources) != 1 or (layer.k is None and layer.v):
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
    count = len(weights.layers)
    tokens, most = table.outputs // count, weights.embedding.outputs
    if table.outputs % count or not 1 <= tokens <= most:
        raise ValueError(
            f"layer_table has {table.outputs} rows; needed are {count} for each of up to {most} "
            "tokens"
        )
    _require_floats("layer_table.norm", weights.layer_table.norm, width)
    _require_floats("input.post_norm", given.post_norm, hidden)
    for name, linear in (("context", given.context), ("gate", given.gate)):
        _require(f"input.{name}", (linear.outputs, linear.inputs), (width, hidden))
    _require("input.output", (given.output.outputs, given.output.inputs), (hidden, width))
    if width % PANEL:
        raise ValueError(f"input.gate has {width} outputs; needed are whole panels of {PANEL}")


def _check_streams(weights: Weights, layer: LayerWeights) -> None:
    """Check a layer's weights around several residual streams."""
    _require("altup is there", layer.altup is not None, weights.streams is not None)
    if layer.altup is not None:
        layer.altup.check(streams=weights.stream_count, hidden=weights.embedding.inputs)
        _require("output_scale beside streams", layer.output_scale, 1.0)


def _check_laurel(layer: LayerWeights, hidden: int) -> None:
    """Check what a layer adds beside attention, and that an MLP with a cutoff is a plain one."""
    if layer.cutoff is not None:
        parts = layer.routing, layer.gate_bias, layer.up_bias
        if layer.gate is None or any(part is not None for part in parts):
            raise ValueError("a cutoff of gates; needed is one MLP with a gate and without biases")
    laurel = layer.laurel
    if laurel is None:
        return
    norms = layer.attention_norm, layer.post_attention_norm
    others = layer.mixer, layer.routing, layer.beside, layer.latent
    if any(norm is None for norm in norms) or others != (None,) * 4:
        raise ValueError(
            "laurel beside another mixer or experts, or without norms; needed are attention and a "
            "plain MLP, with norms before and behind attention"
        )
    rank = laurel.left.outputs
    shapes = (laurel.left.inputs, laurel.right.outputs, laurel.right.inputs)
    _require("laurel", shapes, (hidden, hidden, rank))
    _require_floats("laurel.post_norm", laurel.post_norm, hidden)
    if rank % GROUP:
        raise ValueError(f"laurel.left has {rank} outputs; needed is a multiple of {GROUP}")


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
    groups, used_groups = routing.groups, routing.used_groups
    if (
        experts % groups
        or not 1 <= used_groups <= groups
        or routing.used * groups > experts * used_groups
    ):
        raise ValueError(
            f"{experts} experts in {groups} groups, of which {used_groups} are used; needed are "
            f"groups of one size with {routing.used} experts in those that are used"
        )
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


def check_pools(weights: Weights, pools: Sequence[Pool]) -> None:
    """Refuse pools of KV blocks or states that were made for another model.

    Sealed blocks come behind the others.

    Raises:
        ValueError: the number of pools, or their layers, heads, states or formats differ.
    """
    _check_sealed(weights, pools)
    if any(layer.slot is not None for layer in weights.layers):
        return _check_pools_of_another(weights, pools)
    needed: list[tuple[int, ...]] = []
    for number in range(1 + max(pool for layer in weights.layers for pool in layer.pools)):
        members = [x for x in weights.layers if number in x.pools]
        sizes = {_pool_sizes(layer, number) for layer in members}
        if len(sizes) != 1:
            raise ValueError(
                f"layers of pool {number} have KV heads, head_dim and latents, or states of the "
                f"sizes {sorted(sizes)}"
            )
        needed.append((len(members), *sizes.pop()))
    there = [
        blocks.states.shape[1:]
        if isinstance(blocks, StateBlocks)
        else (blocks.layers, blocks.kv_heads, blocks.head_dim, blocks.latent)
        for blocks in pools
        if not isinstance(blocks, SealedBlocks)
    ]
    if there != needed:
        raise ValueError(
            "pools of layers, KV heads, head_dim and latents, or layers and numbers of a state "
            f"{there}; needed are {needed}"
        )
    formats = {blocks.format for blocks in pools if isinstance(blocks, KVBlocks)}
    if len(formats) > 1 and not formats <= {"int8", *SEALED}:
        raise ValueError("pools of several formats; needed is one, or int8 and those that seal")


def _check_sealed(weights: Weights, pools: Sequence[Pool]) -> None:
    """Check that sealed blocks and the pools whose blocks they were are there together."""
    sealing = {
        number: blocks
        for number, blocks in enumerate(pools)
        if isinstance(blocks, KVBlocks) and blocks.format in SEALED
    }
    rows = [blocks for blocks in pools if not isinstance(blocks, SealedBlocks)]
    needed = [*rows, *(blocks.sealed for blocks in sealing.values())]
    if [id(blocks) for blocks in pools] != [id(blocks) for blocks in needed]:
        raise ValueError("sealed blocks that are not behind the other pools, or not in their order")
    if any(layer.pool in sealing and (layer.window or layer.latent) for layer in weights.layers):
        raise ValueError("sealed blocks of layers with windows or latents; needed are others")


def _check_pools_of_another(weights: Weights, pools: Sequence[Pool]) -> None:
    """Check the pools of another model, whose K and V all layers read."""
    for index, layer in enumerate(weights.layers):
        pool = pools[layer.pool] if 0 <= layer.pool < len(pools) else None
        if layer.slot is None or not isinstance(pool, KVBlocks):
            raise ValueError(f"layer {index} does not read K and V of another model, as others do")
        if not 0 <= layer.slot < pool.layers or layer.heads % pool.kv_heads:
            raise ValueError(
                f"layer {index} with {layer.heads} heads reads layer {layer.slot} of {pool.layers} "
                f"with {pool.kv_heads} KV heads"
            )
        _require("head_dim", layer.head_dim, pool.head_dim)
        if layer.head_norms is not None:
            _require_floats("norm of Q", layer.head_norms.q, layer.head_dim)


def check_adapter(adapter: AdapterWeights, weights: Weights) -> None:
    """Refuse an adapter that was made for another model, or that changes experts.

    Raises:
        ValueError: the number of layers or the shape of a change differs.
    """
    _require("layers of the adapter", len(adapter.layers), len(weights.layers))
    for index, (changes, layer) in enumerate(zip(adapter.layers, weights.layers, strict=True)):
        for name, change in changes.items():
            linear = _changed(layer, name)
            if linear is None:
                raise ValueError(f"layers.{index} has no {name} that an adapter can change")
            heads = layer.heads if name in ("key_up", "value_up") else 0
            needed = linear.outputs // max(heads, 1), linear.inputs
            _require(f"layers.{index}.{name}", (change.outputs, change.inputs), needed)
            _require(f"heads of layers.{index}.{name}", change.heads, heads)


def _changed(layer: LayerWeights, name: str) -> PackedWeights | None:
    """Return the linear layer of a name of `CHANGED`; None: there is none that could be changed."""
    if layer.routing is not None and name in ("gate", "up", "down"):
        return None
    if name.startswith("delta_"):
        parts: tuple[Any, ...] = (layer.mixer,)
        name = name.removeprefix("delta_")
    else:
        parts = layer, layer.mixer, layer.beside, layer.latent
    return next((x for x in (getattr(part, name, None) for part in parts) if x is not None), None)


def _pool_sizes(layer: LayerWeights, pool: int) -> tuple[int, ...]:
    if layer.beside is not None and pool == layer.beside_pool:
        return (layer.beside.state_size,)
    if layer.mixer is None:
        return layer.kv_heads, layer.head_dim, 0 if layer.latent is None else layer.latent.rank
    return (layer.mixer.state_size,)


def _require(name: str, value: object, needed: object) -> None:
    if value != needed:
        raise ValueError(f"{name} is {value}; needed is {needed}")


def _require_floats(name: str, array: NDArray[Any], size: int) -> None:
    if array.dtype != np.float32 or array.shape != (size,) or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype} {array.shape}; needed is float32 ({size},)")
