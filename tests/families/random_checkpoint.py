"""Random checkpoints of every kind of layer, and what they compute in float64."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.backends.packed_weights import altup_weights, mamba2_vectors
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import Attention, LayerConfig, Mlp, Rope
from edgellm.graphs.state_mixers import DeltaNet, Mamba2, ShortConv
from edgellm.graphs.tensor import Tensor
from edgellm.graphs.tensors import model_tensors
from edgellm.kernels.altup import reference as altup
from edgellm.kernels.attention import reference as attention
from edgellm.kernels.experts import Routing
from edgellm.kernels.mamba2 import reference
from edgellm.kernels.rope import reference as rope
from edgellm.kernels.step.reference import activate, exceeding, gated, head_norm, norm

_ATTENTION = Attention(heads=6, kv_heads=2, head_dim=16)
_MLP = Mlp(intermediate=160)


def _rope(theta: float, *, pairs: int = 8, magnitude: float = 1.0) -> Rope:
    angles = theta ** (-np.arange(pairs) / pairs)
    return Rope(inv_freq=tuple(angles.tolist()), magnitude=magnitude)


def config_of(*layers: LayerConfig, **changes: Any) -> ModelConfig:
    """A small model of these layers."""
    values = {
        "model_type": "random",
        "vocab_size": 320,
        "hidden_size": 96,
        "ropes": (_rope(10000.0),),
        "norm_eps": 1e-5,
        "context_length": 512,
        "tied_embedding": False,
        **changes,
    }
    return ModelConfig(layers=layers, **values)


def _layer(norms: Any = "pre", *, mlp: Mlp = _MLP, **changes: Any) -> LayerConfig:
    return LayerConfig(mixer=replace(_ATTENTION, **changes), mlp=mlp, norms=norms)


_GELU = replace(_MLP, activation="gelu_tanh")
_BIASES = {"qkv_bias": True, "output_bias": True}
# Each new part on its own, and as families have them together.
_MAMBA = Mamba2(heads=3, head_dim=32, state_dim=48, groups=1, taps=4, norm_eps=1e-3)
CONFIGS = {
    "llama": config_of(_layer(), _layer()),
    "biases": config_of(_layer(mlp=replace(_MLP, bias=True), **_BIASES)),
    "gelu": config_of(_layer(mlp=_GELU)),
    "ungated": config_of(_layer(mlp=replace(_MLP, gated=False))),
    "window": config_of(_layer(window=9), _layer()),
    "scale": config_of(_layer(scale=0.07)),
    "softcap": config_of(_layer(softcap=2.0), logit_softcap=3.0),
    "head_norms": config_of(_layer(qk_norm="head"), _layer(qk_norm="head")),
    "width_norms": config_of(_layer(qk_norm="width")),
    "norms_after_rope": config_of(_layer(qk_norm="head_after_rope")),
    "normed_biases": config_of(_layer(qk_norm="head", qkv_bias=True)),
    "magnitude": config_of(_layer(qkv_bias=True), ropes=(_rope(10000.0, pairs=6, magnitude=1.2),)),
    "no_positions": config_of(
        _layer(), _layer(rope=1), ropes=(_rope(10000.0), Rope(inv_freq=(0.0,) * 8))
    ),
    "gemma": config_of(_layer(mlp=_GELU), embedding_scale=96**0.5, tied_embedding=True),
    "gemma2": config_of(
        _layer("sandwich", mlp=_GELU, window=16, scale=0.3, softcap=5.0),
        _layer("sandwich", mlp=_GELU, scale=0.3, softcap=5.0),
        embedding_scale=96**0.5,
        logit_softcap=30.0,
    ),
    "gemma3": config_of(
        _layer("sandwich", mlp=_GELU, qk_norm="head", window=16),
        _layer("sandwich", mlp=_GELU, qk_norm="head", rope=1),
        ropes=(_rope(10000.0), _rope(1e6)),
        embedding_scale=96**0.5,
        tied_embedding=True,
    ),
    "olmo2": config_of(_layer("post", qk_norm="width"), _layer("post", qk_norm="width")),
    "uneven": config_of(
        _layer(window=9, qkv_bias=True),
        LayerConfig(
            mixer=Attention(heads=2, kv_heads=1, head_dim=32, rope=1, qk_norm="head"),
            mlp=Mlp(intermediate=96, activation="gelu_tanh", gated=False, bias=True),
            norms="sandwich",
        ),
        _layer(mlp=replace(_MLP, intermediate=64), heads=8, kv_heads=4),
        ropes=(_rope(10000.0), _rope(1e6, pairs=16)),
    ),
    "experts": config_of(
        replace(_layer(), experts=Routing(experts=5, used=3)),
        _layer("sandwich"),
        replace(
            _layer("sandwich", mlp=replace(_GELU, intermediate=64)),
            experts=Routing(experts=3, used=2, normalized=False, scale=1.5),
        ),
        embedding_scale=2.0,
    ),
    "short_conv": config_of(
        LayerConfig(mixer=ShortConv(channels=96, taps=4), mlp=_MLP),
        _layer(qk_norm="head", window=9),
        LayerConfig(
            mixer=ShortConv(channels=96, taps=2),
            mlp=replace(_MLP, intermediate=64),
            norms="sandwich",
            experts=Routing(experts=3, used=2),
        ),
    ),
    "mamba2": config_of(
        LayerConfig(mixer=_MAMBA, mlp=_MLP),
        _layer(window=9),
        LayerConfig(
            mixer=replace(_MAMBA, heads=4, groups=2, taps=2, conv_bias=False),
            mlp=_MLP,
            norms="post",
        ),
    ),
    "delta_net": config_of(
        LayerConfig(
            mixer=DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=32, taps=4), mlp=_MLP
        ),
        _layer(qk_norm="head", output_gate=True),
        LayerConfig(
            mixer=DeltaNet(
                key_heads=2, value_heads=4, key_dim=32, value_dim=32, taps=2, tiled=True
            ),
            mlp=_MLP,
            norms="sandwich",
        ),
    ),
    "starcoder2": config_of(
        *2 * [_layer(mlp=replace(_GELU, gated=False, bias=True), window=20, **_BIASES)],
        norm="layer",
    ),
}


@dataclass(frozen=True)
class RandomCheckpoint:
    """Numbers of a size at which every part of a layer shows; no norm weight is 1, no bias 0."""

    config: ModelConfig
    path: Path = Path("random")
    metadata: Mapping[str, Any] = field(default_factory=dict)
    mtp: None = None

    def tensor(self, name: str) -> Tensor:
        spec = model_tensors(self.config)[name]
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        values = rng.standard_normal(spec.shape).astype(np.float32)
        if spec.role != "vector":
            values /= np.float32(np.sqrt(spec.shape[1]))
        elif name.endswith("_norm"):
            values = 1 + values / 4
        elif name.endswith("decay"):
            values = -np.exp(values)
        else:
            values /= 2
        if spread := self._spread(name):
            values = (values.T * np.resize(spread, len(values))).T.astype(np.float32)
        return Tensor(spec.shape, "F32", lambda: values)

    def _spread(self, name: str) -> list[float]:
        """Factors of the channels of a head: large keys meet small queries."""
        part = name.rpartition(".")[2]
        if part not in ("k", "k_bias", "q", "q_bias", "k_norm", "q_norm"):
            return []
        layer = int(name.split(".")[1])
        attention = self.config.layers[layer].attention
        if part.endswith("_norm") == (attention.qk_norm == "none"):
            return []
        pairs, sign = len(self.config.rope_of(layer).inv_freq), 1 if part.startswith("k") else -1
        sizes = [2.0 ** (sign * (pair % 4 - 1)) for pair in range(pairs)]
        return sizes + sizes + [1.0] * (attention.head_dim - 2 * pairs)


def vector(checkpoint: Any, name: str) -> np.ndarray | None:
    """A vector of a checkpoint as float64, or None where its model has none of that name."""
    if name not in model_tensors(checkpoint.config):
        return None
    return checkpoint.tensor(name).float32().astype(np.float64)


def product(checkpoint: Any, name: str, x: np.ndarray) -> np.ndarray:
    """A linear layer with its bias, if it has one."""
    bias = vector(checkpoint, f"{name}_bias")
    weight = checkpoint.tensor(name).float32().astype(np.float64)
    return x @ weight.T + (0 if bias is None else bias)


def normed(checkpoint: Any, name: str, x: np.ndarray) -> np.ndarray:
    """A norm, or `x` where the model has none there."""
    weight, bias = vector(checkpoint, name), vector(checkpoint, f"{name}_bias")
    return norm(x, weight, bias, checkpoint.config.norm_eps)


def after_attention(
    checkpoint: Any, layer: int, attended: np.ndarray, residual: np.ndarray
) -> np.ndarray:
    """The residual behind a layer."""
    name, here = f"layers.{layer}", checkpoint.config.layers[layer]
    added = product(checkpoint, f"{name}.o", attended)
    if here.beside is not None:
        rows = normed(checkpoint, f"{name}.attention_norm", residual)
        added = added + product(checkpoint, f"{name}.mamba_o", mamba2(checkpoint, layer, rows, {}))
    before, residual = residual, residual + normed(checkpoint, f"{name}.post_attention_norm", added)
    if here.laurel is not None:
        x = normed(checkpoint, f"{name}.attention_norm", before)
        added = product(checkpoint, f"{name}.laurel_left", x)
        added = product(checkpoint, f"{name}.laurel_right", added)
        added = x + normed(checkpoint, f"{name}.laurel_norm", added)
        residual = (residual + added) / np.sqrt(2)
    x = normed(checkpoint, f"{name}.mlp_norm", residual)
    if here.experts is not None:
        added = experts(checkpoint, layer, x, residual)
    else:
        up = product(checkpoint, f"{name}.up", x)
        gate = product(checkpoint, f"{name}.gate", x) if here.mlp.gated else None
        if here.mlp.cutoff is not None:
            gate = exceeding(gate, here.mlp.cutoff)
        added = product(checkpoint, f"{name}.down", inner(gate, up, here.mlp.activation))
    return residual + normed(checkpoint, f"{name}.post_mlp_norm", added)


def inner(gate: np.ndarray | None, up: np.ndarray, activation: Any) -> np.ndarray:
    """What the second product of an MLP takes."""
    return activate(up, activation) if gate is None else gated(gate, up, activation)


PARTS_BESIDE = ("experts", "router")


def experts(checkpoint: Any, layer: int, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """The experts of a layer, row by row, and the one of all rows."""
    first, routed = x, x
    here, name = checkpoint.config.layers[layer], f"layers.{layer}"
    routing, activation = here.experts, here.mlp.activation
    stacks = {}
    for part in ("gate", "up", "down"):
        whole = checkpoint.tensor(f"{name}.{part}").float32().astype(np.float64)
        bias = vector(checkpoint, f"{name}.{part}_bias")
        bias = np.zeros(len(whole)) if bias is None else bias
        stacks[part] = list(
            zip(*(np.split(a, routing.experts) for a in (whole, bias)), strict=True)
        )
    if here.shared is not None and here.shared.beside:
        x, routed = (normed(checkpoint, f"{name}.{part}_norm", residual) for part in PARTS_BESIDE)
    logits = product(checkpoint, f"{name}.router", routed)
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    if routing.scores == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    selection = vector(checkpoint, f"{name}.selection_bias")
    factors = vector(checkpoint, f"{name}.expert_scale")
    added = np.zeros_like(x)
    for row, each in enumerate(scores):
        ranks = each if selection is None else each + selection
        best = 2 if routing.scores == "sigmoid" else 1
        groups = np.split(np.arange(len(each)), routing.groups)
        groups.sort(key=lambda group: -np.sort(ranks[group])[-best:].sum())
        allowed = np.concatenate(groups[: routing.used_groups])
        chosen = allowed[np.argsort(-ranks[allowed])][: routing.used]
        total = each[chosen].sum() if routing.normalized else 1.0
        for expert in chosen:
            (gate, up, down) = (stacks[part][expert] for part in ("gate", "up", "down"))
            middle = inner(gate[0] @ x[row] + gate[1], up[0] @ x[row] + up[1], activation)
            y = down[0] @ middle + down[1]
            share = each[expert] / total * (1 if factors is None else factors[expert])
            added[row] += routing.scale * share * y
    if here.shared is None:
        return added
    x, added = first, normed(checkpoint, f"{name}.experts_post_norm", added)
    gate, up = (product(checkpoint, f"{name}.shared_{part}", x) for part in ("gate", "up"))
    y = product(checkpoint, f"{name}.shared_down", inner(gate, up, activation))
    if here.shared.routed:
        y = y / (1 + np.exp(-x @ vector(checkpoint, f"{name}.shared_router")))[:, None]
    return added + normed(checkpoint, f"{name}.shared_post_norm", y)


Kept = dict[int, tuple[np.ndarray, np.ndarray]]


def short_conv(checkpoint: Any, layer: int, x: np.ndarray, _: Kept) -> np.ndarray:
    """A short convolution of normed rows, row by row and tap by tap."""
    name = f"layers.{layer}"
    b, c, x = np.split(product(checkpoint, f"{name}.conv_in", x), 3, axis=1)
    filters, mixed = checkpoint.tensor(f"{name}.conv").float32(), np.zeros_like(x)
    for row in range(len(x)):
        for back in range(min(row + 1, filters.shape[1])):
            mixed[row] += filters[:, -1 - back] * b[row - back] * x[row - back]
    return c * mixed


def mamba2(checkpoint: Any, layer: int, x: np.ndarray, kept: Kept) -> np.ndarray:
    """The Mamba-2 of normed rows, which its own tests compare with transformers."""
    name, mixer = f"layers.{layer}", checkpoint.config.layers[layer].state_mixer
    vectors = mamba2_vectors(mixer, lambda part: checkpoint.tensor(f"{name}.{part}").float32())
    rows = product(checkpoint, f"{name}.mamba_in", x)
    return reference.mix(rows, vectors, reference.State.zero(vectors))[0]


def delta_net(checkpoint: Any, layer: int, x: np.ndarray, kept: Kept) -> np.ndarray:
    """A gated delta net of normed rows, head by head and row by row."""
    name, net = f"layers.{layer}", checkpoint.config.layers[layer].mixer
    qkv, z, a, b = (
        product(checkpoint, f"{name}.delta_{part}", x) for part in ("qkv", "z", "a", "b")
    )
    filters, mixed = checkpoint.tensor(f"{name}.conv").float32(), np.zeros_like(qkv)
    for row in range(len(x)):
        for back in range(min(row + 1, net.taps)):
            mixed[row] += filters[:, -1 - back] * qkv[row - back]
    mixed = activate(mixed, "silu")
    keys, ratio = net.key_heads * net.key_dim, net.value_heads // net.key_heads
    q, k, v = np.split(mixed, [keys, 2 * keys], axis=1)
    decay, bias = vector(checkpoint, f"{name}.decay"), vector(checkpoint, f"{name}.dt_bias")
    weight, out = vector(checkpoint, f"{name}.delta_norm"), np.zeros_like(z)
    for head in range(net.value_heads):
        of = head % net.key_heads if net.tiled else head // ratio
        here = slice(of * net.key_dim, (of + 1) * net.key_dim)
        values = slice(head * net.value_dim, (head + 1) * net.value_dim)
        memory = np.zeros((net.value_dim, net.key_dim))
        for row in range(len(x)):
            query, key = (
                each[row, here] / np.sqrt(each[row, here] @ each[row, here] + 1e-6)
                for each in (q, k)
            )
            memory *= np.exp(decay[head] * np.log1p(np.exp(a[row, head] + bias[head])))
            wrong = v[row, values] - memory @ key
            memory += np.outer(wrong / (1 + np.exp(-b[row, head])), key)
            out[row, values] = norm(
                memory @ query / np.sqrt(net.key_dim), weight, None, checkpoint.config.norm_eps
            )
    return out * activate(z, "silu")


def mix(checkpoint: Any, layer: int, residual: np.ndarray, kept: Kept) -> np.ndarray:
    """The mixer of a layer for a whole text, before the output projection.

    Args:
        kept: K and V of the layers before, to which those of this one come.
    """
    x = normed(checkpoint, f"layers.{layer}.attention_norm", residual)
    mixer = checkpoint.config.layers[layer].mixer
    return _MIXERS[type(mixer)](checkpoint, layer, x, kept)


def attend(checkpoint: Any, layer: int, x: np.ndarray, kept: Kept) -> np.ndarray:
    """Attention of the normed rows of a whole text, `[n, H * D]`."""
    config, name = checkpoint.config, f"layers.{layer}"
    here, turn = config.layers[layer].attention, config.rope_of(layer)
    if here.latent is not None:
        return attend_latents(checkpoint, layer, x)

    def heads(part: str) -> np.ndarray:
        return product(checkpoint, f"{name}.{part}", x).reshape(len(x), -1, here.head_dim)

    def rotated(rows: np.ndarray, part: str) -> np.ndarray:
        weight = vector(checkpoint, f"{name}.{part}_norm")
        if weight is not None and here.qk_norm != "head_after_rope":
            rows = head_norm(rows, weight, config.norm_eps)
        rows = rope.apply(rows, turn.inv_freq, 0, turn.magnitude)
        if weight is not None and here.qk_norm == "head_after_rope":
            rows = head_norm(rows, weight, config.norm_eps)
        return rows

    if here.kv_from is None:
        k = heads("k")
        v = k if here.k_as_v else heads("v")
        if here.v_norm:
            v = head_norm(v, np.ones(here.head_dim), config.norm_eps)
        kept[layer] = rotated(k, "k"), v
    attended = attention.attend(
        rotated(heads("q"), "q"),
        *kept[layer if here.kv_from is None else here.kv_from],
        0,
        window=here.window,
        scale=here.scale,
        softcap=here.softcap,
        sinks=vector(checkpoint, f"{name}.sinks"),
    )
    attended = attended.reshape(len(x), -1)
    if here.output_gate:
        attended = attended / (1 + np.exp(-product(checkpoint, f"{name}.q_gate", x)))
    return attended


def attend_latents(checkpoint: Any, layer: int, x: np.ndarray) -> np.ndarray:
    """Attention over latents as it is defined, with K and V of each head."""
    config, name = checkpoint.config, f"layers.{layer}."
    here, turn = config.layers[layer].attention, config.rope_of(layer)
    latent, heads, row, q = here.latent, here.heads, x, "q"

    def of_norm(rows: np.ndarray, part: str) -> np.ndarray:
        return norm(rows, vector(checkpoint, name + part), None, latent.norm_eps)

    if latent.query_rank is not None:
        row, q = of_norm(product(checkpoint, f"{name}q_down", x), "q_down_norm"), "q_up"
    query = product(checkpoint, name + q, row).reshape(len(x), heads, -1)
    shared = product(checkpoint, f"{name}k", x)[:, None]
    c = of_norm(product(checkpoint, f"{name}v", x), "latent_norm")
    up, values = (
        checkpoint.tensor(f"{name}{part}_up").float32().astype(np.float64).reshape(heads, -1, width)
        for part, width in (("key", latent.key), ("value", latent.rank))
    )
    k, v = np.einsum("nr,hrk->nhk", c, up), np.einsum("nr,hvr->nhv", c, values)
    query[..., : here.head_dim], shared = (
        rope.apply(rows, turn.inv_freq, 0, turn.magnitude)
        for rows in (query[..., : here.head_dim], shared)
    )
    k = np.concatenate((np.repeat(shared, heads, axis=1), k), axis=2)
    return attention.attend(query, k, v, 0, scale=here.scale).reshape(len(x), -1)


def layer_embedding(
    checkpoint: Any, layer: int, tokens: Sequence[int], first: np.ndarray, x: np.ndarray
) -> np.ndarray:
    """What tokens' own embeddings for a layer add behind its MLP; 0 where there are none."""
    config, name = checkpoint.config, f"layers.{layer}."
    width = config.layer_embedding
    if width is None:
        return np.zeros_like(x)
    table = checkpoint.tensor("layer_embedding").float32().reshape(-1, config.layer_count, width)
    tokens = [token if token < len(table) else 0 for token in tokens]
    context = product(checkpoint, f"{name}layer_context", first) * config.hidden_size**-0.5
    context = normed(checkpoint, "layer_embedding_norm", context)
    e = (context + table[list(tokens), layer].astype(np.float64) * width**0.5) * 2**-0.5
    gate = activate(
        product(checkpoint, f"{name}layer_gate", x), config.layers[layer].mlp.activation
    )
    added = product(checkpoint, f"{name}layer_output", gate * e)
    return normed(checkpoint, f"{name}post_layer_norm", added)


_MIXERS = {Attention: attend, ShortConv: short_conv, Mamba2: mamba2, DeltaNet: delta_net}


def of_stream(checkpoint: Any, name: str, x: np.ndarray, index: int) -> np.ndarray:
    """The product with the matrix of one of the streams behind the first."""
    stack = checkpoint.tensor(name).float32().astype(np.float64)
    return x @ np.split(stack, checkpoint.config.streams - 1)[index].T


def enter_streams(checkpoint: Any, first: np.ndarray) -> np.ndarray | None:
    """The residual streams of a text's embeddings; None: there is one."""
    if checkpoint.config.streams is None:
        return None
    return altup.enter(first, lambda x: product(checkpoint, "streams_enter", x))


def altup_of(checkpoint: Any, layer: int) -> Any:
    return altup_weights(lambda part: checkpoint.tensor(f"layers.{layer}.{part}").float32())


def exact(checkpoint: Any, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states `[n, E]` and logits `[n, V]` of a text."""
    config = checkpoint.config
    table = checkpoint.tensor("embedding").float32().astype(np.float64)
    x = first = table[list(tokens)] * config.embedding_scale
    kept: Kept = {}
    streams = enter_streams(checkpoint, first)
    for layer in range(config.layer_count):
        if streams is not None:
            weights = altup_of(checkpoint, layer)
            streams = altup.predict(weights, streams, config.norm_eps)
            x = streams[0]
        x = after_attention(checkpoint, layer, mix(checkpoint, layer, x, kept), x)
        if streams is not None:
            streams = altup.correct(weights, streams, x, config.norm_eps)
            x = streams[0] * weights.scale
        added = layer_embedding(checkpoint, layer, tokens, first, x)
        x = x + added
        if streams is not None:
            streams[1:] += added
        if config.layers[layer].scaled:
            x = x * vector(checkpoint, f"layers.{layer}.layer_scale")
    if streams is not None:
        x = altup.leave(streams, lambda rows, i: of_stream(checkpoint, "streams_leave", rows, i))
    hidden = normed(checkpoint, "final_norm", x)
    head = table if config.tied_embedding else checkpoint.tensor("head").float32()
    logits = hidden @ head.T.astype(np.float64)
    if config.logit_softcap is not None:
        logits = config.logit_softcap * np.tanh(logits / config.logit_softcap)
    return hidden, logits
