"""Author one segment (see `contract.py`) from its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from edgellm.graphs import contract
from edgellm.graphs.builder import GraphBuilder
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import Grid
from edgellm.graphs.layer_config import Activation
from edgellm.graphs.linear import BlockRotatedLinear, Linear
from edgellm.graphs.norm import Array, Norm, NormStyle

Half = Literal["", "up", "down"]
# tanh(y) is 2 sigmoid(2y) - 1, so GELU's approximation (arXiv:1606.08415) is
# x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """The second half of a layer: `down(activation(gate(x)) * up(x))`.

    Attributes:
        up, down, gate: `down(activation(up(x)))` without a gate.
        norm: before it, or None where it reads the residual as it is.
        post_norm: of what it adds to the residual, if any.
    """

    up: Linear
    down: Linear
    gate: Linear | None = None
    norm: Norm | None = None
    post_norm: Norm | None = None
    activation: Activation = "silu"


@dataclass(frozen=True)
class Segment:
    """The parts between two attentions; `index` 0 has no first half, the last no second one.

    Attributes:
        enter: `[E, E]` that takes the embedding to the residual's basis (segment 0), or None.
        leave: `[E, E]` that takes the normed residual back (last segment), or None.
        norm: the next layer's attention norm, or the final norm; None where Q, K and V read the
            residual as it is.
        output_norm: of what attention adds to the residual, if any.
    """

    index: int
    norm: Norm | None
    output: Linear | None = None
    output_norm: Norm | None = None
    mlp: Mlp | None = None
    qkv: Linear | None = None
    enter: Array | None = None
    leave: Array | None = None


def author_segment(
    segment: Segment,
    config: ModelConfig,
    *,
    chunk: int | None,
    half: Half = "",
    grids: Mapping[str, Grid] | None = None,
    basic_norms: bool = False,
) -> ir.Model:
    """The ONNX graph of a segment for a static chunk size, or for any size if None.

    Args:
        half: one of the halves of a segment that is cut before down_proj, see `contract.py`.
        grids: those of its `StaticLinear` layers; None makes a graph for a calibration run.
        basic_norms: write norms out in basic operators. OpenVINO leaves RMSNormalization to the
            CPU; Qualcomm's HTP takes it, and would overflow half precision in the squares.
    """
    part = contract.Part(segment.index, half)
    graph = GraphBuilder(f"segment_{segment.index}{half}", grids=grids)
    style = NormStyle(config.norm_eps, basic=basic_norms)
    rows: int | str = contract.CHUNK_DIM if chunk is None else chunk
    inputs = {
        name: graph.input(name, (rows, width))
        for name, width in contract.part_inputs(config, part).items()
    }
    values: Sequence[ir.Value]
    if half == "up":
        values = _first_half(graph, segment, inputs, style)
    elif half == "down":
        values = _behind_layers(graph, segment, _second_half(graph, segment, inputs, style), style)
    else:
        residual = _residual(graph, segment, inputs, style, config)
        values = _behind_layers(graph, segment, residual, style)
    widths = contract.part_outputs(config, part)
    return graph.build(
        {
            name: (value, (rows, width))
            for value, (name, width) in zip(values, widths.items(), strict=True)
        }
    )


def author_head(head: Linear, config: ModelConfig) -> ir.Model:
    """The LM head for any number of rows."""
    graph = GraphBuilder("head")
    hidden = graph.input(contract.HIDDEN, (contract.ROWS_DIM, config.hidden_size))
    logits = _apply(graph, head, hidden)
    if config.logit_softcap is not None:
        cap = graph.constant(config.logit_softcap, np.float32)
        logits = graph.op("Mul", graph.op("Tanh", graph.op("Div", logits, cap)), cap)
    return graph.build({contract.LOGITS: (logits, (contract.ROWS_DIM, config.vocab_size))})


def _behind_layers(
    graph: GraphBuilder, segment: Segment, residual: ir.Value, style: NormStyle
) -> Sequence[ir.Value]:
    """The residual and Q, K and V of the next layer, or the hidden states."""
    normed = _normed(graph, segment.norm, residual, style)
    if segment.qkv is not None:
        return residual, _apply(graph, segment.qkv, normed)
    if segment.leave is not None:
        return (graph.op("MatMul", normed, graph.weight(segment.leave)),)
    return (normed,)


def _residual(
    graph: GraphBuilder,
    segment: Segment,
    inputs: Mapping[str, ir.Value],
    style: NormStyle,
    config: ModelConfig,
) -> ir.Value:
    """The residual stream after a layer, or where the first one begins."""
    if segment.mlp is None:
        return _enter(graph, inputs[contract.X], segment.enter, config.embedding_scale)
    residual = _after_attention(graph, segment, inputs, style)
    activated = _activated(graph, segment.mlp, residual, style)
    return _after_mlp(graph, segment.mlp, segment.mlp.down, activated, residual, style)


def _first_half(
    graph: GraphBuilder, segment: Segment, inputs: Mapping[str, ir.Value], style: NormStyle
) -> Sequence[ir.Value]:
    """The residual between attention and MLP, and what down_proj's grid is for."""
    assert segment.mlp is not None
    assert isinstance(segment.mlp.down, BlockRotatedLinear)
    residual = _after_attention(graph, segment, inputs, style)
    activated = _activated(graph, segment.mlp, residual, style)
    return residual, segment.mlp.down.rotated(graph, activated)


def _second_half(
    graph: GraphBuilder, segment: Segment, inputs: Mapping[str, ir.Value], style: NormStyle
) -> ir.Value:
    """The residual after a layer whose MLP is there up to down_proj."""
    assert segment.mlp is not None
    assert isinstance(segment.mlp.down, BlockRotatedLinear)
    activated, residual = inputs[contract.ACTIVATED], inputs[contract.RESIDUAL]
    return _after_mlp(graph, segment.mlp, segment.mlp.down.linear, activated, residual, style)


def _after_attention(
    graph: GraphBuilder, segment: Segment, inputs: Mapping[str, ir.Value], style: NormStyle
) -> ir.Value:
    attended = _apply(graph, segment.output, inputs[contract.ATTENTION])
    added = _normed(graph, segment.output_norm, attended, style)
    return graph.op("Add", inputs[contract.RESIDUAL], added)


def _after_mlp(
    graph: GraphBuilder,
    mlp: Mlp,
    down: Linear,
    activated: ir.Value,
    residual: ir.Value,
    style: NormStyle,
) -> ir.Value:
    added = _normed(graph, mlp.post_norm, _apply(graph, down, activated), style)
    return graph.op("Add", residual, added)


def _enter(graph: GraphBuilder, x: ir.Value, rotation: Array | None, scale: float) -> ir.Value:
    if scale != 1:
        x = graph.op("Mul", x, graph.constant(scale, np.float32))
    if rotation is not None:
        return graph.op("MatMul", x, graph.weight(rotation))
    # an output of its own, even where nothing is done
    return graph.op("Identity", x) if scale == 1 else x


def _normed(graph: GraphBuilder, norm: Norm | None, x: ir.Value, style: NormStyle) -> ir.Value:
    return x if norm is None else norm.apply(graph, x, style)


def _apply(graph: GraphBuilder, linear: Linear | None, x: ir.Value) -> ir.Value:
    assert linear is not None
    return linear.apply(graph, linear.activation(graph, x))


def _activated(graph: GraphBuilder, mlp: Mlp, residual: ir.Value, style: NormStyle) -> ir.Value:
    """What down_proj reads."""
    x = mlp.up.activation(graph, _normed(graph, mlp.norm, residual, style))
    activation = _silu if mlp.activation == "silu" else _gelu
    if mlp.gate is None:
        return activation(graph, mlp.up.apply(graph, x))
    gate, up = mlp.gate.apply(graph, x), mlp.up.apply(graph, x)
    return graph.op("Mul", activation(graph, gate), up)


def _silu(graph: GraphBuilder, x: ir.Value) -> ir.Value:
    return graph.op("Mul", x, graph.op("Sigmoid", x))


def _gelu(graph: GraphBuilder, x: ir.Value) -> ir.Value:
    squares = graph.op("Mul", x, x)
    factor = graph.op("Mul", squares, graph.constant(_GELU_CUBIC, np.float32))
    factor = graph.op("Add", factor, graph.constant(_GELU_LINEAR, np.float32))
    return graph.op("Mul", x, graph.op("Sigmoid", graph.op("Mul", x, factor)))
