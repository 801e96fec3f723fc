"""Tensors of a model under canonical names: the one list for all other files.

    embedding [V, E]    final_norm [E]    head [V, E] (absent where tied to the embedding)
    layer_embedding [V * layers, P] (or of fewer tokens)    layer_embedding_norm [P] (where the
        config has a width P)
    streams_enter, streams_leave [(S - 1) * E, E] (where the config has S residual streams)
    combine [E, 2B], project [B, E] (where the config has a backbone of the width B)
    layers.I.NAME, with the names of `layer_tensors`

Rows of q and k, and their biases, are in the half-split RoPE order (first halves, then second
halves of the rotated channels of a head).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import Attention, LayerConfig, Mixer
from edgellm.graphs.state_mixers import DeltaNet, Mamba2, ShortConv
from edgellm.kernels.experts import Routing

# Matrix of a linear layer, matrix whose rows are looked up as well, matrix whose rows are looked up
# alone, router (a matrix that stays in float32: a rounded one would choose other experts), or
# vector (norm, bias, filters of channels).
Role = Literal["linear", "table", "rows", "router", "vector"]
# Tensors of a model with a matrix for each residual stream but the first, one behind the other.
STREAM_STACKS = ("streams_enter", "streams_leave")


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and role of one tensor of a model.

    Attributes:
        shape: `[outputs, inputs]` of a matrix, `[size]` of a vector.
        experts: choice among the experts whose matrices are stacked in this one; None: all tokens
            are multiplied with all of it.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    experts: Routing | None = None

    @property
    def quantized(self) -> bool:
        """Whether the tensor is a matrix in a quantized kind where weights are packed."""
        return self.role in ("linear", "table", "rows")

    def used(self, size: int) -> int:
        """Return the part of a size of the tensor that one token uses."""
        return size if self.experts is None else size * self.experts.used // self.experts.experts


def layer_tensors(config: ModelConfig, layer: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of a layer under their names within it, in the order of computation.

        attention_norm [E]    q [H*D, E]    k, v [Hkv*D, E]    q_norm, k_norm [D] or [H*D], [Hkv*D]
        o [E, H*D]    post_attention_norm [E]
        mlp_norm [E]    gate, up [F, E]    down [E, F]    post_mlp_norm [E]

    The norm before a mixer of another kind is called attention_norm too. In place of Q, K and V a
    short convolution has conv_in [3E, E] (rows of B, then C, then x) and conv [E, taps]; a delta
    net with N key heads and M value heads has delta_qkv [2N*K+M*V, E], delta_z [M*V, E], delta_a
    and delta_b [M, E], conv [2N*K+M*V, taps], decay and dt_bias [M], delta_norm [V]. The outputs
    of attention may have a gate, q_gate [H*D, E]. Mamba-2 has

        mamba_in [N, E] (rows of z, x, B, C and dt)    conv [channels, taps]    dt_bias [H]
        decay, skip [H]: A, which is negative, and D    mamba_norm [H*D]

    A layer with X experts has a router [X, E], router_bias and selection_bias [X] before the gate,
    and its MLPs one behind the other: gate and up [X*F, E], down [X*E, F]. A shared expert comes
    behind them: shared_router [E], shared_gate, shared_up [S, E], shared_down [E, S]. Where it is
    an MLP beside the experts, router_norm [E] (of the residual, times any number that the router
    divides by) comes before the router, experts_norm [E] before the gate, and shared_post_norm and
    experts_post_norm [E] come last. expert_scale [X] has factors of the experts' shares.
    A Mamba-2 beside attention comes behind it, and its output projection is mamba_o.
    Where K and V are made of latents, q has rows of what RoPE turns, then of the rest of each head
    [H*(D+key), E], k is what the keys of all heads share [D, E], and v gives the latent [rank, E].
    In place of q there may be q_down [R, E], its norm q_down_norm [R], and q_up [H*(D+key), R].
    Behind them come latent_norm [rank], key_up [H*rank, key], value_up [H*value, rank], by heads.
    Attention sinks [H] come before the output projection.
    A layer that reads K and V of another has none of k, v and k_norm, and one whose V is K no v.
    Where tokens have embeddings of the width P for each layer, layer_context and layer_gate [P, E],
    layer_output [E, P] and post_layer_norm [E] come last, and behind them layer_scale [1], if any.
    A product beside attention, laurel_left [R, E], laurel_right [E, R] and laurel_norm [E], comes
    before the MLP's norm. With S residual streams a layer begins with altup_router_norm [E] (times
    what the router multiplies by), altup_router [S, E], altup_predict [S*S, S], altup_correct
    [S, S] and altup_scale [E].
    Biases, where the config has them, come behind their tensors: `q_bias`, `mlp_norm_bias` ...
    """
    here, e = config.layers[layer], config.hidden_size
    specs: list[TensorSpec] = []

    def norm(name: str) -> None:
        specs.append(TensorSpec(name, (e,), "vector"))
        if config.norm == "layer":
            specs.append(TensorSpec(f"{name}_bias", (e,), "vector"))

    if config.streams is not None:
        specs += _altup_tensors(config.streams, e)
    if here.norms_inputs:
        norm("attention_norm")
    specs += _MIXERS[type(here.mixer)](here.mixer, e)
    if here.beside is not None:
        beside = _mamba2_tensors(here.beside, e)
        specs += (replace(s, name="mamba_o") if s.name == "o" else s for s in beside)
    if here.norms_outputs:
        norm("post_attention_norm")
    if here.laurel is not None:
        specs += _linear("laurel_left", here.laurel, e, bias=False)
        specs += _linear("laurel_right", e, here.laurel, bias=False)
        specs.append(TensorSpec("laurel_norm", (e,), "vector"))
    if here.norms_inputs:
        norm("mlp_norm")
    specs += _mlp_tensors(here, e)
    if here.norms_outputs:
        norm("post_mlp_norm")
    if config.layer_embedding is not None:
        for name in ("layer_context", "layer_gate"):
            specs += _linear(name, config.layer_embedding, e, bias=False)
        specs += _linear("layer_output", e, config.layer_embedding, bias=False)
        specs.append(TensorSpec("post_layer_norm", (e,), "vector"))
    if here.scaled:
        specs.append(TensorSpec("layer_scale", (1,), "vector"))
    return tuple(specs)


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(name, (outputs, inputs), "linear")
    if bias:
        yield TensorSpec(f"{name}_bias", (outputs,), "vector")


def _altup_tensors(streams: int, e: int) -> Iterator[TensorSpec]:
    yield TensorSpec("altup_router_norm", (e,), "vector")
    yield TensorSpec("altup_router", (streams, e), "router")
    yield TensorSpec("altup_predict", (streams * streams, streams), "vector")
    yield TensorSpec("altup_correct", (streams, streams), "vector")
    yield TensorSpec("altup_scale", (e,), "vector")


def _attention_tensors(attention: Attention, e: int) -> Iterator[TensorSpec]:
    latent, widths = attention.latent, {"q": attention.query_size}
    if attention.kv_from is None:
        widths["k"] = attention.kv_size
        if not attention.k_as_v:
            widths["v"] = attention.value_size
    if latent is not None and latent.query_rank is not None:
        yield TensorSpec("q_down", (latent.query_rank, e), "linear")
        yield TensorSpec("q_down_norm", (latent.query_rank,), "vector")
        yield TensorSpec("q_up", (widths.pop("q"), latent.query_rank), "linear")
    for name, width in widths.items():
        yield from _linear(name, width, e, bias=attention.qkv_bias)
    if latent is not None:
        yield TensorSpec("latent_norm", (latent.rank,), "vector")
        yield TensorSpec("key_up", (attention.heads * latent.rank, latent.key), "linear")
        yield TensorSpec("value_up", (attention.size, latent.rank), "linear")
    if attention.qk_norm != "none":
        whole = attention.qk_norm == "width"
        for name in ("q", "k") if "k" in widths else ("q",):
            width = widths[name] if whole else attention.head_dim
            yield TensorSpec(f"{name}_norm", (width,), "vector")
    if attention.sinks:
        yield TensorSpec("sinks", (attention.heads,), "vector")
    if attention.output_gate:
        yield TensorSpec("q_gate", (attention.size, e), "linear")
    yield from _linear("o", e, attention.size, bias=attention.output_bias)


def _short_conv_tensors(conv: ShortConv, e: int) -> Iterator[TensorSpec]:
    yield TensorSpec("conv_in", (3 * conv.channels, e), "linear")
    yield TensorSpec("conv", (conv.channels, conv.taps), "vector")
    yield TensorSpec("o", (e, conv.size), "linear")


def _mamba2_tensors(mamba: Mamba2, e: int) -> Iterator[TensorSpec]:
    yield TensorSpec("mamba_in", (mamba.inputs, e), "linear")
    yield TensorSpec("conv", (mamba.channels, mamba.taps), "vector")
    if mamba.conv_bias:
        yield TensorSpec("conv_bias", (mamba.channels,), "vector")
    for name in ("dt_bias", "decay", "skip"):
        yield TensorSpec(name, (mamba.heads,), "vector")
    if mamba.gate_norm:
        yield TensorSpec("mamba_norm", (mamba.size,), "vector")
    yield TensorSpec("o", (e, mamba.size), "linear")


def _delta_net_tensors(net: DeltaNet, e: int) -> Iterator[TensorSpec]:
    outputs = {"qkv": net.channels, "z": net.size, "a": net.value_heads, "b": net.value_heads}
    for name, width in outputs.items():
        yield TensorSpec(f"delta_{name}", (width, e), "linear")
    yield TensorSpec("conv", (net.channels, net.taps), "vector")
    for name in ("decay", "dt_bias"):
        yield TensorSpec(name, (net.value_heads,), "vector")
    yield TensorSpec("delta_norm", (net.value_dim,), "vector")
    yield TensorSpec("o", (e, net.size), "linear")


_MIXERS: Mapping[type[Mixer], Callable[[Any, int], Iterator[TensorSpec]]] = {
    Attention: _attention_tensors,
    ShortConv: _short_conv_tensors,
    Mamba2: _mamba2_tensors,
    DeltaNet: _delta_net_tensors,
}


# Matrices of mixers that do not read the residual.
_BEHIND = ("o", "mamba_o", "q_up", "key_up", "value_up")


def mixer_inputs(config: ModelConfig, layer: int) -> list[str]:
    """Return the names within a layer of its mixers' input projections."""
    here, e = config.layers[layer], config.hidden_size
    specs = [*_MIXERS[type(here.mixer)](here.mixer, e)]
    if here.beside is not None:
        specs += _mamba2_tensors(here.beside, e)
    return [spec.name for spec in specs if spec.role == "linear" and spec.name not in _BEHIND]


def _mlp_tensors(layer: LayerConfig, e: int) -> Iterator[TensorSpec]:
    mlp, experts = layer.mlp, layer.experts
    count = 1 if experts is None else experts.experts
    beside = layer.shared is not None and layer.shared.beside
    if beside:
        yield TensorSpec("router_norm", (e,), "vector")
    if experts is not None:
        yield TensorSpec("router", (count, e), "router")
        for name, there in (
            ("router_bias", experts.bias),
            ("selection_bias", experts.selection_bias),
            ("expert_scale", experts.scaled),
        ):
            if there:
                yield TensorSpec(name, (count,), "vector")
    if beside:
        yield TensorSpec("experts_norm", (e,), "vector")
    shapes = {"gate": (mlp.intermediate, e), "up": (mlp.intermediate, e)}
    shapes["down"] = (e, mlp.intermediate)
    for name, (outputs, inputs) in shapes.items():
        if name == "gate" and not mlp.gated:
            continue
        yield TensorSpec(name, (count * outputs, inputs), "linear", experts)
        if mlp.bias:
            yield TensorSpec(f"{name}_bias", (count * outputs,), "vector", experts)
    if layer.shared is not None:
        size = layer.shared.intermediate
        if layer.shared.routed:
            yield TensorSpec("shared_router", (e,), "vector")
        for name, shape in (("gate", (size, e)), ("up", (size, e)), ("down", (e, size))):
            yield TensorSpec(f"shared_{name}", shape, "linear")
    if beside:
        for name in ("shared_post_norm", "experts_post_norm"):
            yield TensorSpec(name, (e,), "vector")


def model_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Map the canonical names of a model's tensors to the tensors; embedding and head come last."""
    specs = {
        f"layers.{layer}.{spec.name}": spec
        for layer in range(config.layer_count)
        for spec in layer_tensors(config, layer)
    }
    vectors = ["final_norm", "final_norm_bias"][: 2 if config.norm == "layer" else 1]
    tables = ["embedding"] if config.tied_embedding else ["embedding", "head"]
    for name in vectors:
        specs[name] = TensorSpec(name, (config.hidden_size,), "vector")
    if config.layer_embedding is not None:
        rows = config.layer_rows, config.layer_embedding
        specs["layer_embedding_norm"] = TensorSpec("layer_embedding_norm", rows[1:], "vector")
        specs["layer_embedding"] = TensorSpec("layer_embedding", rows, "rows")
    if config.streams is not None:
        stack = (config.streams - 1) * config.hidden_size, config.hidden_size
        for name in STREAM_STACKS:
            specs[name] = TensorSpec(name, stack, "linear")
    if config.backbone is not None:
        e, backbone = config.hidden_size, config.backbone
        specs["combine"] = TensorSpec("combine", (e, 2 * backbone), "linear")
        specs["project"] = TensorSpec("project", (backbone, e), "linear")
    for name in tables:
        specs[name] = TensorSpec(name, (config.vocab_size, config.hidden_size), "table")
    return specs


def parameters(config: ModelConfig) -> int:
    return sum(math.prod(spec.shape) for spec in model_tensors(config).values())


def used_parameters(config: ModelConfig) -> int:
    """Count the parameters that a token uses: of its experts alone, where a layer has some."""
    return sum(spec.used(math.prod(spec.shape)) for spec in model_tensors(config).values())


def multiplied_parameters(config: ModelConfig) -> int:
    """Count the weights of all layers that a token is multiplied with, as `used_parameters`."""
    matrices = (s for s in model_tensors(config).values() if s.role in ("linear", "router"))
    return sum(spec.used(math.prod(spec.shape)) for spec in matrices)
