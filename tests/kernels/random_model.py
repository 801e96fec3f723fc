"""Random models of every part that a layer may have, and what the reference makes of them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from model_shapes import Latents, Shape
from random_weights import random_weight

from edgellm.kernels import rope
from edgellm.kernels.altup import AltUpWeights, Streams
from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.experts.native import BESIDE
from edgellm.kernels.kv_append import HeadNorms
from edgellm.kernels.kv_blocks import BLOCK, SEALED, KVBlocks, allocate
from edgellm.kernels.latent import LatentWeights
from edgellm.kernels.linear import PackedWeights, pack_weight
from edgellm.kernels.mamba2 import Mamba2Vectors, Mamba2Weights
from edgellm.kernels.quantized import dequantize
from edgellm.kernels.sealed_blocks import allocate_sealed
from edgellm.kernels.short_conv import ShortConvWeights
from edgellm.kernels.state_blocks import StateBlocks, StateView, allocate_states
from edgellm.kernels.step import (
    FusedStep,
    Laurel,
    LayerInput,
    LayerTable,
    LayerWeights,
    StepSpan,
    Weights,
    reference,
)

EPSILON = 1e-5
VOCABULARY = 70
TABLE = [3, 0, 4, 1]
# Of the layers with a window, where others have none.
OTHER_TABLE = [1, 3, 0, 2]


# One after the other for embedding, head, q, k, v, o, gate, up and down.
MIXTURES = {
    "affine": ("int8_symmetric", "int8_symmetric", *["int4_affine"] * 7),
    "symmetric": ("int8_symmetric", "int8_symmetric", *["int4_symmetric"] * 7),
    "Q4_K_M": (
        *("int6_k", "int6_k", "int4_k", "int4_k", "int6_k"),
        *("int4_k", "int4_k", "int4_k", "int6_k"),
    ),
    "narrow": (
        *("int8_symmetric", "int8_affine", "int5_symmetric", "int5_affine", "int8_symmetric"),
        *("iq4_nl", "mxfp4", "int4_symmetric", "int8_affine"),
    ),
    "others": (
        *("iq4_xs", "int5_k", "iq4_xs", "int5_k", "int4_affine"),
        *("int5_k", "int4_k", "int6_k", "iq4_xs"),
    ),
}
# Matrices of layers' own embeddings -> those whose kind they have.
OTHERS = {"layer_table": "embedding", "context": "k", "output": "o"}
NARROW = ("affine", "symmetric", "narrow")


@dataclass(frozen=True)
class View:
    """A pool, and a sequence's table in it."""

    blocks: Any
    table: list[int]

    def states(self, start: int, end: int) -> StateView | None:
        """The blocks of a step of states, which are snapshots of the ends of blocks."""
        if not isinstance(self.blocks, StateBlocks):
            return None
        ends = [*range((start // BLOCK + 1) * BLOCK, end, BLOCK), end]
        targets = tuple((at - start, self.table[(at - 1) // BLOCK]) for at in ends)
        source = self.table[(start - 1) // BLOCK] if start else None
        return StateView(self.blocks, source, targets)


class Model:
    """Random weights, dequantized ones beside them."""

    def __init__(self, shape: Shape, mixture: str = "affine") -> None:
        self.shape = shape
        self._rng = np.random.default_rng(shape.heads * shape.head_dim)
        self._kinds = MIXTURES[mixture]
        self.floats: dict[str, np.ndarray] = {}
        layers = []
        for index in range(shape.layers):
            here, prefix = shape.of(index), f"layers.{index}."
            routing = here.parts.routing
            experts = 1 if routing is None else routing.experts
            mixing = self._mixing(index)
            mixer = mixing.get("mixer")
            width = here.heads * here.head_dim if mixer is None else mixer.size
            if here.parts.latent is not None:
                width = here.heads * here.parts.latent.value
            layers.append(
                LayerWeights(
                    **mixing,
                    o=self._linear(prefix + "o", shape.hidden, width),
                    gate=self._linear(prefix + "gate", experts * here.intermediate, shape.hidden)
                    if here.parts.gated
                    else None,
                    up=self._linear(prefix + "up", experts * here.intermediate, shape.hidden),
                    down=self._linear(prefix + "down", experts * shape.hidden, here.intermediate),
                    router=None if routing is None else self._router(experts),
                    **self._beside(prefix, here),
                    routing=routing,
                    head_norms=self._head_norms(here) if mixer is None else None,
                    activation=here.parts.activation,
                    rope=index % len(shape.parts.ropes),
                    window=None if index % 2 else shape.window,
                    pool=int((shape.mixed or shape.hybrid) and index % 2 == 0),
                    input=self._input(prefix),
                    output_scale=here.parts.output_scale,
                    laurel=self._laurel(prefix, here.parts.laurel),
                    altup=self._altup(),
                    cutoff=here.parts.cutoff,
                    **self._vectors(here, index),
                )
            )
        self.weights = Weights(
            layers=layers,
            final_norm=self._vector(shape.hidden, around=1.0),
            final_norm_bias=self._vector(shape.hidden) if shape.parts.layer_norm else None,
            embedding=self._linear("embedding", VOCABULARY, shape.hidden, size=1.0),
            head=self._linear("head", VOCABULARY, shape.hidden, size=1.0),
            epsilon=EPSILON,
            embedding_scale=shape.parts.embedding_scale,
            logit_softcap=shape.parts.logit_softcap,
            layer_table=self._table(),
            streams=self._streams(),
        )
        self.turns = []
        for number, magnitude in enumerate(shape.parts.ropes):
            half = shape.of(number).head_dim // 2
            inv_freq = 10000.0 ** (-np.arange(half) / half)
            # magnitude 0 stands for a RoPE that does not turn
            self.turns.append((((magnitude > 0) * inv_freq).tolist(), magnitude or 1.0))
        self.ropes = [rope.table(freq, 1100, magnitude=m) for freq, m in self.turns]
        self.tokens = self._rng.integers(0, VOCABULARY, 500).tolist()

    def _mixing(self, index: int) -> dict[str, Any]:
        """What `LayerWeights` has of a layer's mixer."""
        here, prefix = self.shape.of(index), f"layers.{index}."
        if here.parts.mixer == "short_conv":
            hidden = self.shape.hidden
            conv_in = self._linear(prefix + "conv_in", 3 * hidden, hidden)
            filters = self._rng.standard_normal((4, hidden)).astype("f4")
            return {"mixer": ShortConvWeights(conv_in=conv_in, filters=filters)}
        if here.parts.mixer == "mamba2":
            return {"mixer": self._mamba2(here, prefix)}
        if here.parts.mixer == "delta_net":
            return {"mixer": self._delta_net(prefix)}
        if here.parts.latent is not None:
            return self._latent(here, here.parts.latent, prefix)
        width = here.heads * here.head_dim
        beside: dict[str, Any] = {}
        if here.parts.mamba_beside:
            mamba = self._mamba2(here, prefix, normed=not here.parts.biases)
            mamba_o = self._linear(prefix + "mamba_o", self.shape.hidden, mamba.size)
            beside = {"beside": mamba, "mamba_o": mamba_o, "beside_pool": 1}
        gate = {}
        if here.parts.output_gate:
            gate = {"q_gate": self._linear(prefix + "q_gate", width, self.shape.hidden)}
        return {
            "q": self._linear(prefix + "q", width, self.shape.hidden),
            **self._keys_and_values(index),
            **gate,
            **beside,
            "heads": here.heads,
            "scale": here.parts.scale,
            "softcap": here.parts.softcap,
        }

    def _latent(self, here: Shape, latent: Latents, prefix: str) -> dict[str, Any]:
        hidden, heads, down = self.shape.hidden, here.heads, {}
        if latent.query_rank is not None:
            down = {
                "query_down": self._linear(prefix + "query_down", latent.query_rank, hidden),
                "query_norm": self._vector(latent.query_rank, around=1.0),
            }
        inputs = latent.query_rank or hidden
        return {
            "q": self._linear(prefix + "q", heads * (here.head_dim + latent.key), inputs),
            "k": self._linear(prefix + "k", here.head_dim, hidden),
            "v": self._linear(prefix + "v", latent.rank, hidden),
            "latent": LatentWeights(
                key_up=self._linear(prefix + "key_up", heads * latent.rank, latent.key),
                value_up=self._linear(prefix + "value_up", heads * latent.value, latent.rank),
                norm=self._vector(latent.rank, around=1.0),
                epsilon=EPSILON,
                **down,
            ),
            "heads": heads,
            "scale": here.parts.scale,
        }

    def _keys_and_values(self, index: int) -> dict[str, Any]:
        shape, here, prefix = self.shape, self.shape.of(index), f"layers.{index}."
        first = shape.layers - shape.shared
        if index >= first:
            step = 2 if shape.mixed or shape.hybrid else 1
            return {"kv_from": max(own for own in range(first) if (index - own) % step == 0)}
        size = here.kv_heads * here.head_dim
        k = self._linear(prefix + "k", size, shape.hidden)
        if here.parts.k_as_v:
            return {"k": k}
        return {"k": k, "v": self._linear(prefix + "v", size, shape.hidden)}

    def _input(self, prefix: str) -> LayerInput | None:
        hidden, width = self.shape.hidden, self.shape.layer_width
        if width is None:
            return None
        return LayerInput(
            context=self._linear(prefix + "input.context", width, hidden),
            gate=self._linear(prefix + "input.gate", width, hidden),
            output=self._linear(prefix + "input.output", hidden, width),
            post_norm=self._vector(hidden, around=1.0),
        )

    def _table(self) -> LayerTable | None:
        width = self.shape.layer_width
        if width is None:
            return None
        tokens = self.shape.layer_tokens or VOCABULARY
        table = self._linear("layer_table", tokens * self.shape.layers, width, size=0.2)
        return LayerTable(table=table, norm=self._vector(width, around=1.0))

    def _laurel(self, prefix: str, rank: int | None) -> Laurel | None:
        if rank is None:
            return None
        return Laurel(
            left=self._linear(prefix + "laurel.left", rank, self.shape.hidden),
            right=self._linear(prefix + "laurel.right", self.shape.hidden, rank),
            post_norm=self._vector(self.shape.hidden, around=1.0),
        )

    def _altup(self) -> AltUpWeights | None:
        count, hidden = self.shape.streams, self.shape.hidden
        if count is None:
            return None
        return AltUpWeights(
            router_norm=self._vector(hidden, around=1.0),
            router=self._router(count),
            predict=self._vector(count**3).reshape(-1, count),
            correct=self._vector(count**2).reshape(-1, count),
            scale=self._vector(hidden, around=1.0),
        )

    def _streams(self) -> Streams | None:
        if self.shape.streams is None:
            return None
        others, hidden = (self.shape.streams - 1) * self.shape.hidden, self.shape.hidden
        return Streams(
            enter=self._linear("streams_enter", others, hidden),
            leave=self._linear("streams_leave", others, hidden),
        )

    def _mamba2(self, here: Shape, prefix: str, *, normed: bool = True) -> Mamba2Weights:
        """KV heads stand for groups; a convolution has a bias where other parts have one."""
        inner, state_dim = here.heads * here.head_dim, 48
        channels = inner + 2 * here.kv_heads * state_dim
        vectors = Mamba2Vectors(
            conv=self._vector(4 * channels).reshape(4, channels) * 3,
            conv_bias=self._vector(channels) if here.parts.biases else None,
            dt_bias=self._vector(here.heads),
            decay=-np.exp(self._vector(here.heads)),
            skip=self._vector(here.heads, around=0.5),
            norm=self._vector(inner, around=1.0) if normed else None,
            head_dim=here.head_dim,
            groups=here.kv_heads,
            epsilon=1e-3,
        )
        outputs = inner + channels + here.heads
        return Mamba2Weights(
            mamba_in=self._linear(prefix + "mamba_in", outputs, self.shape.hidden), vectors=vectors
        )

    def _delta_net(self, prefix: str) -> DeltaNetWeights:
        keys, values, taps = 2, 4, 4
        outputs = {"qkv": 2 * keys * 16 + values * 32, "z": values * 32, "a": values, "b": values}
        hidden = self.shape.hidden
        return DeltaNetWeights(
            **{x: self._linear(f"{prefix}delta_{x}", size, hidden) for x, size in outputs.items()},
            conv=self._rng.standard_normal((taps, outputs["qkv"])).astype("f4"),
            decay=-np.exp(self._vector(values)),
            dt_bias=self._vector(values),
            norm=self._vector(32, around=1.0),
            key_heads=keys,
        )

    def _router(self, experts: int) -> np.ndarray:
        hidden = self.shape.hidden
        return (self._rng.standard_normal((experts, hidden)) / np.sqrt(hidden)).astype("f4")

    def _beside(self, prefix: str, here: Shape) -> dict[str, Any]:
        """Biases of the router, the shared expert and the sinks, as far as a layer has them."""
        parts, hidden, made = here.parts, self.shape.hidden, {}
        if parts.routing is not None and parts.routing.bias:
            made["router_bias"] = self._vector(parts.routing.experts)
        if parts.routing is not None and parts.routing.selection_bias:
            made["selection_bias"] = self._vector(parts.routing.experts)
        if parts.shared:
            sizes = {"gate": (parts.shared, hidden), "up": (parts.shared, hidden)}
            sizes["down"] = hidden, parts.shared
            for name, size in sizes.items():
                made[f"shared_{name}"] = self._linear(f"{prefix}shared_{name}", *size)
        if parts.shared_router:
            made["shared_router"] = self._vector(hidden)
        if parts.routing is not None and parts.routing.scaled:
            made["expert_scale"] = self._vector(parts.routing.experts, around=1.0)
        if parts.beside:
            made |= {name: self._vector(hidden, around=1.0) for name in BESIDE}
        if parts.sinks:
            made["sinks"] = 5 * self._vector(here.heads)
        return made

    def _vector(self, size: int, *, around: float = 0.0) -> np.ndarray:
        return (around + 0.2 * self._rng.standard_normal(size)).astype("f4")

    def _vectors(self, here: Shape, index: int) -> dict[str, np.ndarray]:
        """Norm weights and biases of a layer, as far as it has them."""
        shape, parts = self.shape, here.parts
        width, kv = here.heads * here.head_dim, here.kv_heads * here.head_dim
        names = []
        if parts.norms != "post":
            names += ["attention_norm", "mlp_norm"]
        if parts.norms != "pre":
            names += ["post_attention_norm", "post_mlp_norm"]
        vectors = {name: self._vector(shape.hidden, around=1.0) for name in names}
        if parts.layer_norm:
            vectors |= {f"{name}_bias": self._vector(shape.hidden) for name in names}
        if here.bias:
            sizes = {"q_bias": width, "k_bias": kv, "v_bias": kv}
            if index >= shape.layers - shape.shared:
                del sizes["k_bias"]
            if index >= shape.layers - shape.shared or parts.k_as_v:
                del sizes["v_bias"]
            vectors |= {name: 5 * self._vector(size) for name, size in sizes.items()}
        if parts.biases:
            sizes = {"o_bias": shape.hidden, "down_bias": shape.hidden}
            sizes |= {"up_bias": here.intermediate}
            sizes |= {"gate_bias": here.intermediate} if parts.gated else {}
            count = 1 if parts.routing is None else parts.routing.experts
            vectors |= {
                name: self._vector(size if name == "o_bias" else count * size)
                for name, size in sizes.items()
            }
        return vectors

    def _head_norms(self, here: Shape) -> HeadNorms | None:
        kind, head_dim = here.parts.qk_norm, here.head_dim
        if kind == "none":
            return None
        sizes = (
            (here.heads * head_dim, here.kv_heads * head_dim)
            if kind == "width"
            else (head_dim, head_dim)
        )
        q, k = (self._vector(size, around=1.0) for size in sizes)
        after = kind == "head_after_rope"
        return HeadNorms(q=q, k=k, epsilon=EPSILON, after_rope=after, values=here.parts.v_norm)

    def _linear(
        self, name: str, outputs: int, inputs: int, *, size: float | None = None
    ) -> PackedWeights:
        order = ("embedding", "head", "q", "k", "v", "o", "gate", "up", "down")
        part = OTHERS.get(name.partition(".input.")[2] or name, name.split(".")[-1])
        part = part.removeprefix("shared_")
        kind = self._kinds[order.index(part if part in order else "q")]
        size = 3 / np.sqrt(inputs) if size is None else size
        weight = random_weight(kind, outputs, inputs, self._rng, size=size)
        self.floats[name] = dequantize(weight)
        return pack_weight(weight)

    def views(self, format: str) -> list[View]:
        """Empty pools of blocks, and a sequence's tables in them."""
        pools = self.pools(format, blocks=5)
        tables = TABLE, OTHER_TABLE, TABLE
        return [View(pool, table) for pool, table in zip(pools, tables, strict=False)]

    def pools(self, format: str, *, blocks: int) -> list[KVBlocks | StateBlocks]:
        pools: list[KVBlocks | StateBlocks] = []
        for number in sorted({pool for layer in self.weights.layers for pool in layer.pools}):
            members = [x for x in self.weights.layers if number in x.pools]
            sizes = {"blocks": blocks, "layers": len(members)}
            beside = members[0].beside
            mixer = members[0].mixer
            if beside is not None and number == members[0].beside_pool:
                mixer = beside
            if mixer is not None:
                pools.append(allocate_states(**sizes, elements=mixer.state_size))
                pools[-1].states[:] = np.nan
                continue
            heads = {"kv_heads": members[0].kv_heads, "head_dim": members[0].head_dim}
            latent = members[0].latent
            rank = 0 if latent is None else latent.rank
            seals = format in SEALED and not (rank or members[0].window)
            sealed = allocate_sealed(format=format, **sizes, **heads) if seals else None
            kept = "int8" if format in SEALED and not seals else format
            pools.append(allocate(format=kept, **sizes, **heads, latent=rank, sealed=sealed))
        return [*pools, *(pool.sealed for pool in pools if getattr(pool, "sealed", None))]

    def poison(self, views: list[View], start: int) -> None:
        """What lies behind the windows of a whole pool must not be read any more."""
        if self.shape.mixed and self.shape.window is not None:
            view = views[1]
            for block in view.table[: max(0, start + 1 - self.shape.window) // BLOCK]:
                for array in view.blocks.block(block):
                    array[...] = np.nan if array.dtype.kind == "f" else 77

    def reference(
        self, length: int, format: str, *, rounded: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        return reference.forward(
            self.weights,
            self.floats,
            self.tokens[:length],
            self.turns,
            format=format,
            rounded=rounded,
        )

    def step(self, library: ctypes.CDLL, views: list[View]) -> FusedStep:
        return FusedStep(library, self.weights, self.ropes, [view.blocks for view in views])

    def run(
        self, library: ctypes.CDLL, cuts: list[int], format: str, *, threads: int = 2
    ) -> tuple[np.ndarray, np.ndarray]:
        """States and logits of all tokens, in calls that end at `cuts`."""
        views = self.views(format)
        step, found = self.step(library, views), []
        for start, end in zip([0, *cuts], cuts, strict=False):
            self.poison(views, start)
            span = span_of(views, self.tokens[start:end], start, logit_rows=end - start)
            found.append(step.run([span], threads=threads))
        states, logits = zip(*found, strict=True)
        return np.concatenate(states), np.concatenate(logits)


def span_of(views: list[View], tokens: list[int], start: int, *, logit_rows: int) -> StepSpan:
    tables, end = [view.table for view in views], start + len(tokens)
    states = [view.states(start, end) for view in views]
    states = states if any(states) else []
    return StepSpan(tables=tables, tokens=tokens, start=start, logit_rows=logit_rows, states=states)
