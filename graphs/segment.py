"""Authoring of a segment's ONNX graph (see `contract.py`) from its linear layers and norms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.graphs import contract
from edgellm.graphs.altup import StreamAuthor, Streams
from edgellm.graphs.builder import Array, GraphBuilder, Norm, NormStyle
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import Grid, Half
from edgellm.graphs.layer_config import Activation
from edgellm.graphs.linear import BlockRotatedLinear, Linear

# tanh(y) is 2 sigmoid(2y) - 1, so GELU's approximation (arXiv:1606.08415) is
# x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """MLP of a layer: `down(activation(gate(x)) * up(x))`.

    Attributes:
        up, down, gate: linear layers; without a gate, the MLP is `down(activation(up(x)))`.
        norm: norm of the MLP's input; None where it reads the residual as it is.
        post_norm: norm of the MLP's output before it is added to the residual, if any.
        cutoff: standard deviations above a row's mean from which on a gate counts, or None.
    """

    up: Linear
    down: Linear
    gate: Linear | None = None
    norm: Norm | None = None
    post_norm: Norm | None = None
    activation: Activation = "silu"
    cutoff: float | None = None


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Way to the experts of a layer, which the host computes, and back.

    Attributes:
        norm: norm of their input, if any.
        post_norm: norm of what they give before it is added to the residual, if any.
        leave, enter: `[E, E]` from the residual's basis, in which `norm` has no weights, and back
            into it, if that is rotated.
        weight: weights `[E]` of the norm, behind `leave`.
    """

    norm: Norm | None
    post_norm: Norm | None = None
    leave: Array | None = None
    enter: Array | None = None
    weight: Array | None = None


@dataclass(frozen=True, kw_only=True)
class Laurel:
    """Product beside attention, `norm(right(left(n)))` of the rows n that it reads (LAuReL).

    With n itself it is added to the residual, which is divided by the root of 2 then.

    Attributes:
        before: norm that gives n of the residual.
    """

    before: Norm
    left: Linear
    right: Linear
    norm: Norm


@dataclass(frozen=True, kw_only=True)
class LayerContexts:
    """Projection and norm that tokens' embeddings for all layers are made with.

    Attributes:
        linear: projection of the residual before layer 0 to contexts of all layers.
        norm: norm of each layer's context.
        layers: number of layers.
        width: width of a layer's embedding, P.
        hidden: width of the residual, by whose root contexts are divided.
    """

    linear: Linear
    norm: Norm
    layers: int
    width: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """Sum of a layer with its tokens' embeddings, `x + norm(output(activation(gate(x)) * e))`."""

    gate: Linear
    output: Linear
    norm: Norm
    activation: Activation


@dataclass(frozen=True)
class Segment:
    """Linear layers and norms between two attentions.

    Segment 0 has no attention before it, and so no `output` and `mlp`. The last segment has no
    attention behind it, and so no `qkv`.

    Attributes:
        norm: attention norm of the next layer, or the final norm; None where Q, K and V read the
            residual as it is.
        output: output projection of the attention before the segment.
        output_norm: norm of its outputs before they are added to the residual, if any.
        experts: what takes the place of `mlp` in a layer with experts.
        qkv: fused projection of the attention behind the segment.
        enter: `[E, E]` that rotates the embedding to the residual's basis (segment 0), or None.
        leave: `[E, E]` that rotates the normed residual back (last segment), or None.
        contexts: what tokens' embeddings for layers are made of (segment 0), or None.
        layer_input: what the layer before the segment adds of such an embedding, or None.
        scale: factor `[1]` of the residual at the end of that layer, or None.
        laurel: product beside the attention before the segment, or None.
        streams: what the segment does with several residual streams; None: there is one.
    """

    index: int
    norm: Norm | None
    output: Linear | None = None
    output_norm: Norm | None = None
    mlp: Mlp | None = None
    experts: Experts | None = None
    qkv: Linear | None = None
    enter: Array | None = None
    leave: Array | None = None
    contexts: LayerContexts | None = None
    layer_input: LayerInput | None = None
    scale: Array | None = None
    laurel: Laurel | None = None
    streams: Streams | None = None


def author_segment(
    segment: Segment,
    config: ModelConfig,
    *,
    chunk: int | None,
    half: Half = "",
    grids: Mapping[str, Grid] | None = None,
    basic_norms: bool = False,
) -> ir.Model:
    """Author the ONNX graph of a segment.

    Args:
        chunk: static chunk size; None: a graph for any number of rows.
        half: half of a segment that is cut in two, see `contract.py`; "": the whole.
        grids: grids of its `StaticLinear` layers; None makes a graph for a calibration run.
        basic_norms: whether to write norms in basic operators. OpenVINO leaves RMSNormalization to
            the CPU; Qualcomm's HTP takes it, and would overflow half precision in the squares.
    """
    part = contract.Part(segment.index, half)
    graph = GraphBuilder(f"segment_{segment.index}{half}", grids=grids)
    style = NormStyle(config.norm_eps, basic=basic_norms)
    rows: int | str = contract.CHUNK_DIM if chunk is None else chunk
    inputs = {
        name: graph.input(name, (rows, width))
        for name, width in contract.part_inputs(config, part).items()
    }
    author = _Author(graph, segment, inputs, style)
    if half == "up":
        values = author.first_half()
    elif half == "down":
        values = author.behind_layers(author.second_half())
    elif half == "router":
        values = author.before_experts()
    elif half == "behind":
        values = author.behind_layers(author.with_experts())
    else:
        values = author.behind_layers(author.residual(config.embedding_scale))
    widths = contract.part_outputs(config, part)
    return graph.build(
        {
            name: (value, (rows, width))
            for value, (name, width) in zip(values, widths.items(), strict=True)
        }
    )


def author_head(head: Linear, config: ModelConfig) -> ir.Model:
    """Author the ONNX graph of the LM head, for any number of rows."""
    graph = GraphBuilder("head")
    hidden = graph.input(contract.HIDDEN, (contract.ROWS_DIM, config.hidden_size))
    logits = _apply(graph, head, hidden)
    if config.logit_softcap is not None:
        cap = graph.constant(config.logit_softcap, np.float32)
        logits = graph.op("Mul", graph.op("Tanh", graph.op("Div", logits, cap)), cap)
    return graph.build({contract.LOGITS: (logits, (contract.ROWS_DIM, config.vocab_size))})


@dataclass(frozen=True)
class _Author:
    """Author of the parts of a segment's graph."""

    graph: GraphBuilder
    segment: Segment
    inputs: Mapping[str, ir.Value]
    style: NormStyle

    def behind_layers(self, residual: ir.Value) -> Sequence[ir.Value]:
        """Add the end of a segment: residual and next layer's Q, K and V, or the hidden states."""
        if self.segment.streams is not None:
            return self._behind_streams(residual, self.segment.streams)
        added, scale = self._layer_input(residual), self.segment.scale
        if added is not None:
            residual = self.graph.op("Add", residual, added)
        if scale is not None:
            residual = self.graph.op("Mul", residual, self.graph.weight(scale))
        normed = self._normed(self.segment.norm, residual)
        if self.segment.qkv is not None:
            return residual, _apply(self.graph, self.segment.qkv, normed), *self._embedded(residual)
        if self.segment.leave is not None:
            return (self._times(normed, self.segment.leave),)
        return (normed,)

    def _behind_streams(self, made: ir.Value, streams: Streams) -> Sequence[ir.Value]:
        """Add the same of several residual streams, from what a layer made of the first one."""
        author = StreamAuthor(self.graph, streams, self.style)
        if streams.behind is None:
            assert streams.enter is not None
            every = author.entered(made, streams.enter)
        else:
            predicted = author.split(self.inputs[contract.RESIDUAL])
            every = author.corrected(streams.behind, predicted, made)
            scale = self.graph.weight(streams.behind.scale)
            added = self._layer_input(self.graph.op("Mul", author.first(every), scale))
            every = every if added is None else author.with_added(every, added)
        if streams.leave is not None:
            return (self._normed(self.segment.norm, author.left(every, streams.leave)),)
        assert streams.before is not None
        predicted = author.predicted(streams.before, every)
        normed = self._normed(self.segment.norm, author.first(predicted))
        qkv = _apply(self.graph, self.segment.qkv, normed)
        return author.joined(predicted), qkv, *self._embedded(made)

    def _layer_input(self, x: ir.Value) -> ir.Value | None:
        """Add what a layer makes of its tokens' embeddings for it, if any."""
        graph, given = self.graph, self.segment.layer_input
        if given is None:
            return None
        gate = _ACTIVATIONS[given.activation](graph, _apply(graph, given.gate, x))
        embedded = self.inputs[contract.embedded_name(self.segment.index - 1)]
        added = _apply(graph, given.output, graph.op("Mul", gate, embedded))
        return self._normed(given.norm, added)

    def _embedded(self, residual: ir.Value) -> list[ir.Value]:
        """Add what tokens' embeddings for layers come to: `(norm(c) + sqrt(P) row) / sqrt(2)`."""
        contexts = self.segment.contexts
        if contexts is None:
            return []
        graph, width = self.graph, contexts.width
        of_layers = graph.constant([0, -1, width], np.int64)

        def scaled(x: ir.Value, factor: float) -> ir.Value:
            return graph.op("Mul", x, graph.constant(factor, np.float32))

        context = scaled(_apply(graph, contexts.linear, residual), contexts.hidden**-0.5)
        normed = self._normed(contexts.norm, graph.op("Reshape", context, of_layers))
        rows = graph.op("Reshape", self.inputs[contract.LAYER_ROWS], of_layers)
        both = graph.op("Add", scaled(normed, 0.5**0.5), scaled(rows, (width / 2) ** 0.5))
        return [
            graph.op("Gather", both, graph.constant(layer, np.int64), axis=1)
            for layer in range(contexts.layers)
        ]

    def residual(self, embedding_scale: float) -> ir.Value:
        """Add the residual stream after a layer or, in segment 0, before the first layer."""
        mlp = self.segment.mlp
        if mlp is None:
            return self._enter(self.inputs[contract.X], embedding_scale)
        residual = self._after_attention()
        return self._after_mlp(mlp, mlp.down, self._activated(mlp, residual), residual)

    def first_half(self) -> Sequence[ir.Value]:
        """Add the residual between attention and MLP, and the rotated input of down_proj."""
        mlp = self.segment.mlp
        assert mlp is not None
        assert isinstance(mlp.down, BlockRotatedLinear)
        residual = self._after_attention()
        return residual, mlp.down.rotated(self.graph, self._activated(mlp, residual))

    def second_half(self) -> ir.Value:
        """Add down_proj of a segment that is cut before it, and the residual after the layer."""
        mlp = self.segment.mlp
        assert mlp is not None
        assert isinstance(mlp.down, BlockRotatedLinear)
        activated, residual = self.inputs[contract.ACTIVATED], self.inputs[contract.RESIDUAL]
        return self._after_mlp(mlp, mlp.down.linear, activated, residual)

    def before_experts(self) -> Sequence[ir.Value]:
        """Add the residual between attention and experts, and the rows that these read."""
        experts = self.segment.experts
        assert experts is not None
        residual = self._after_attention()
        # an output of its own where nothing is computed
        norm = experts.norm
        x = self._normed(norm, residual) if norm else self.graph.op("Identity", residual)
        if experts.leave is not None:
            x = self._times(x, experts.leave)
        if experts.weight is not None:
            x = self.graph.op("Mul", x, self.graph.weight(experts.weight))
        return residual, x

    def with_experts(self) -> ir.Value:
        """Add the residual after a layer, from what its experts give."""
        experts, added = self.segment.experts, self.inputs[contract.EXPERTS]
        assert experts is not None
        if experts.enter is not None:
            added = self._times(added, experts.enter)
        added = self._normed(experts.post_norm, added)
        return self.graph.op("Add", self.inputs[contract.RESIDUAL], added)

    def _after_attention(self) -> ir.Value:
        graph, laurel, before = self.graph, self.segment.laurel, self._before()
        attended = _apply(graph, self.segment.output, self.inputs[contract.ATTENTION])
        residual = graph.op("Add", before, self._normed(self.segment.output_norm, attended))
        if laurel is None:
            return residual
        x = self._normed(laurel.before, before)
        added = _apply(graph, laurel.right, _apply(graph, laurel.left, x))
        total = graph.op("Sum", residual, x, self._normed(laurel.norm, added))
        return graph.op("Mul", total, graph.constant(0.5**0.5, np.float32))

    def _before(self) -> ir.Value:
        """Return the residual before the layer, or the stream that it computes."""
        residual, streams = self.inputs[contract.RESIDUAL], self.segment.streams
        if streams is None:
            return residual
        author = StreamAuthor(self.graph, streams, self.style)
        return author.first(author.split(residual))

    def _after_mlp(
        self, mlp: Mlp, down: Linear, activated: ir.Value, residual: ir.Value
    ) -> ir.Value:
        added = self._normed(mlp.post_norm, _apply(self.graph, down, activated))
        return self.graph.op("Add", residual, added)

    def _activated(self, mlp: Mlp, residual: ir.Value) -> ir.Value:
        """Add the MLP up to the input of down_proj."""
        graph = self.graph
        x = mlp.up.activation(graph, self._normed(mlp.norm, residual))
        activation = _ACTIVATIONS[mlp.activation]
        if mlp.gate is None:
            return activation(graph, mlp.up.apply(graph, x))
        gate, up = mlp.gate.apply(graph, x), mlp.up.apply(graph, x)
        if mlp.cutoff is not None:
            gate = _exceeding(graph, gate, mlp.cutoff)
        return graph.op("Mul", activation(graph, gate), up)

    def _enter(self, x: ir.Value, scale: float) -> ir.Value:
        if scale != 1:
            x = self.graph.op("Mul", x, self.graph.constant(scale, np.float32))
        if self.segment.enter is not None:
            return self._times(x, self.segment.enter)
        # the graph needs an output besides its input, even if nothing is computed
        return self.graph.op("Identity", x) if scale == 1 else x

    def _times(self, x: ir.Value, matrix: Array) -> ir.Value:
        return self.graph.op("MatMul", x, self.graph.weight(matrix))

    def _normed(self, norm: Norm | None, x: ir.Value) -> ir.Value:
        return x if norm is None else norm.apply(self.graph, x, self.style)


def _apply(graph: GraphBuilder, linear: Linear | None, x: ir.Value) -> ir.Value:
    assert linear is not None
    return linear.apply(graph, linear.activation(graph, x))


def _exceeding(graph: GraphBuilder, gate: ir.Value, deviations: float) -> ir.Value:
    """Add what gates exceed the mean and so many standard deviations of their row by."""

    def mean(x: ir.Value) -> ir.Value:
        return graph.op("ReduceMean", x, graph.constant([-1], np.int64))

    off = graph.op("Sub", gate, mean(gate))
    deviation = graph.op("Sqrt", mean(graph.op("Mul", off, off)))
    cutoff = graph.op("Mul", deviation, graph.constant(deviations, np.float32))
    return graph.op("Relu", graph.op("Sub", off, cutoff))


def _silu(graph: GraphBuilder, x: ir.Value) -> ir.Value:
    return graph.op("Mul", x, graph.op("Sigmoid", x))


def _gelu(graph: GraphBuilder, x: ir.Value) -> ir.Value:
    squares = graph.op("Mul", x, x)
    factor = graph.op("Mul", squares, graph.constant(_GELU_CUBIC, np.float32))
    factor = graph.op("Add", factor, graph.constant(_GELU_LINEAR, np.float32))
    return graph.op("Mul", x, graph.op("Sigmoid", graph.op("Mul", x, factor)))


_ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu}
