"""Author one segment (see `contract.py`) from its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from edgellm.graphs import contract
from edgellm.graphs.builder import GraphBuilder
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import Grid
from edgellm.graphs.linear import BlockRotatedLinear, Linear

Array = ir.TensorProtocol
Half = Literal["", "up", "down"]
Norm = Callable[[GraphBuilder, ir.Value, Array, ModelConfig], ir.Value]


@dataclass(frozen=True)
class Mlp:
    """The second half of a layer: `down(silu(gate(x)) * up(x))`."""

    norm: Array
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Segment:
    """The parts between two attentions; `index` 0 has no first half, the last no second one.

    Attributes:
        enter: `[E, E]` that takes the embedding to the residual's basis (segment 0), or None.
        leave: `[E, E]` that takes the normed residual back (last segment), or None.
        norm: the next layer's attention norm, or the final norm.
    """

    index: int
    norm: Array
    output: Linear | None = None
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
    norm = _basic_norm if basic_norms else _norm
    rows: int | str = contract.CHUNK_DIM if chunk is None else chunk
    inputs = {
        name: graph.input(name, (rows, width))
        for name, width in contract.part_inputs(config, part).items()
    }
    values: Sequence[ir.Value]
    if half == "up":
        values = _first_half(graph, segment, inputs, norm, config)
    else:
        residual = _residual(graph, segment, inputs, norm, config, half)
        normed = norm(graph, residual, segment.norm, config)
        if segment.index < config.layers:
            values = (residual, _apply(graph, segment.qkv, normed))
        elif segment.leave is not None:
            values = (graph.op("MatMul", normed, graph.weight(segment.leave)),)
        else:
            values = (normed,)
    widths = contract.part_outputs(config, part)
    return graph.build(
        {
            name: (value, (rows, width))
            for value, (name, width) in zip(values, widths.items(), strict=True)
        }
    )


def _residual(
    graph: GraphBuilder,
    segment: Segment,
    inputs: Mapping[str, ir.Value],
    norm: Norm,
    config: ModelConfig,
    half: Half,
) -> ir.Value:
    """The residual stream after a layer, or where the first one begins."""
    if segment.index == 0:
        return _enter(graph, inputs[contract.X], segment.enter)
    assert segment.mlp is not None
    down = segment.mlp.down
    if half == "down":
        assert isinstance(down, BlockRotatedLinear)
        residual, activated = inputs[contract.RESIDUAL], inputs[contract.ACTIVATED]
        down = down.linear
    else:
        residual = _after_attention(graph, segment, inputs)
        activated = _activated(graph, segment.mlp, norm(graph, residual, segment.mlp.norm, config))
    return graph.op("Add", residual, _apply(graph, down, activated))


def _first_half(
    graph: GraphBuilder,
    segment: Segment,
    inputs: Mapping[str, ir.Value],
    norm: Norm,
    config: ModelConfig,
) -> Sequence[ir.Value]:
    """The residual between attention and MLP, and what down_proj's grid is for."""
    assert segment.mlp is not None
    assert isinstance(segment.mlp.down, BlockRotatedLinear)
    residual = _after_attention(graph, segment, inputs)
    activated = _activated(graph, segment.mlp, norm(graph, residual, segment.mlp.norm, config))
    return residual, segment.mlp.down.rotated(graph, activated)


def _after_attention(
    graph: GraphBuilder, segment: Segment, inputs: Mapping[str, ir.Value]
) -> ir.Value:
    attended = _apply(graph, segment.output, inputs[contract.ATTENTION])
    return graph.op("Add", inputs[contract.RESIDUAL], attended)


def author_head(head: Linear, config: ModelConfig) -> ir.Model:
    """The LM head for any number of rows."""
    graph = GraphBuilder("head")
    hidden = graph.input(contract.HIDDEN, (contract.ROWS_DIM, config.hidden_size))
    logits = _apply(graph, head, hidden)
    return graph.build({contract.LOGITS: (logits, (contract.ROWS_DIM, config.vocab_size))})


def _enter(graph: GraphBuilder, x: ir.Value, rotation: Array | None) -> ir.Value:
    if rotation is None:
        return graph.op("Identity", x)
    return graph.op("MatMul", x, graph.weight(rotation))


def _norm(graph: GraphBuilder, x: ir.Value, weight: Array, config: ModelConfig) -> ir.Value:
    return graph.op(
        "RMSNormalization", x, graph.weight(weight), axis=-1, epsilon=config.rms_norm_eps
    )


def _basic_norm(graph: GraphBuilder, x: ir.Value, weight: Array, config: ModelConfig) -> ir.Value:
    squares = graph.op("Mul", x, x)
    mean = graph.op("ReduceMean", squares, graph.constant([-1], np.int64), keepdims=1)
    mean = graph.op("Add", mean, graph.constant(config.rms_norm_eps, np.float32))
    return graph.op("Mul", graph.op("Div", x, graph.op("Sqrt", mean)), graph.weight(weight))


def _apply(graph: GraphBuilder, linear: Linear | None, x: ir.Value) -> ir.Value:
    assert linear is not None
    return linear.apply(graph, linear.activation(graph, x))


def _activated(graph: GraphBuilder, mlp: Mlp, normed: ir.Value) -> ir.Value:
    x = mlp.gate.activation(graph, normed)
    gate, up = mlp.gate.apply(graph, x), mlp.up.apply(graph, x)
    return graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
