"""Author one segment (see `contract.py`) from its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.graphs import contract
from edgellm.graphs.builder import GraphBuilder
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import Grid
from edgellm.graphs.linear import Linear

Array = ir.TensorProtocol


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
    grids: Mapping[str, Grid] | None = None,
    basic_norms: bool = False,
) -> ir.Model:
    """The ONNX graph of a segment for a static chunk size, or for any size if None.

    Args:
        grids: those of its `StaticLinear` layers; None makes a graph for a calibration run.
        basic_norms: write norms out in basic operators. OpenVINO leaves RMSNormalization to the
            CPU; Qualcomm's HTP takes it, and would overflow half precision in the squares.
    """
    graph = GraphBuilder(f"segment_{segment.index}", grids=grids)
    norm = _basic_norm if basic_norms else _norm
    rows: int | str = contract.CHUNK_DIM if chunk is None else chunk
    inputs = {
        name: graph.input(name, (rows, width))
        for name, width in contract.segment_inputs(config, segment.index).items()
    }
    if segment.index == 0:
        residual = _enter(graph, inputs[contract.X], segment.enter)
    else:
        residual = inputs[contract.RESIDUAL]
        residual = graph.op(
            "Add", residual, _apply(graph, segment.output, inputs[contract.ATTENTION])
        )
        assert segment.mlp is not None
        normed = norm(graph, residual, segment.mlp.norm, config)
        residual = graph.op("Add", residual, _mlp(graph, segment.mlp, normed))
    normed = norm(graph, residual, segment.norm, config)
    if segment.index == config.layers:
        if segment.leave is not None:
            normed = graph.op("MatMul", normed, graph.weight(segment.leave))
        values: Sequence[ir.Value] = (normed,)
    else:
        values = (residual, _apply(graph, segment.qkv, normed))
    widths = contract.segment_outputs(config, segment.index)
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


def _mlp(graph: GraphBuilder, mlp: Mlp, normed: ir.Value) -> ir.Value:
    x = mlp.gate.activation(graph, normed)
    gate, up = mlp.gate.apply(graph, x), mlp.up.apply(graph, x)
    hidden = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
    return _apply(graph, mlp.down, hidden)
