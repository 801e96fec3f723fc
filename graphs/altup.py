"""Several residual streams in graphs (AltUp): predicted before a layer, and corrected behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.graphs.builder import Array, GraphBuilder, Norm, NormStyle
from edgellm.graphs.latent_linear import multiplied_heads
from edgellm.graphs.linear import Linear

# Least mean square of a stream that is brought to the magnitude of another.
_LEAST = 1e-5


@dataclass(frozen=True, kw_only=True)
class AltUp:
    """Small matrices around a layer that computes the first of S streams.

    Attributes:
        norm: norm of what the router reads.
        router, predict, correct: `[E, S]`, `[S, S * S]` and `[S, S]`, to multiply rows with.
        scale: factors of the first stream `[E]` where embeddings of a layer's own read it.
    """

    norm: Norm
    router: Array
    predict: Array
    correct: Array
    scale: Array


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Work of a segment on the residual streams of a model that has several.

    Attributes:
        count: number of streams, S.
        width: width of a stream, E.
        behind: matrices around the layer before the segment; None in segment 0.
        before: matrices around the layer behind the segment; None in the last one.
        enter: projection of the embedding to all streams but the first (segment 0), or None.
        leave: matrices `[S - 1, E, E]` that take these back (last segment), or None.
    """

    count: int
    width: int
    behind: AltUp | None = None
    before: AltUp | None = None
    enter: Linear | None = None
    leave: Array | None = None


@dataclass(frozen=True)
class StreamAuthor:
    """Author of the parts of a graph that compute with streams, `[C, S, E]`."""

    graph: GraphBuilder
    streams: Streams
    style: NormStyle

    def split(self, rows: ir.Value) -> ir.Value:
        """Return streams that lie side by side, `[C, S * E]`, one behind the other."""
        return self._shaped(rows, -1, self.streams.count, self.streams.width)

    def joined(self, streams: ir.Value) -> ir.Value:
        """Return streams side by side."""
        return self._shaped(streams, -1, self.streams.count * self.streams.width)

    def first(self, streams: ir.Value) -> ir.Value:
        """Return the stream that layers compute, `[C, E]`."""
        return self.graph.op("Gather", streams, self.graph.constant(0, np.int64), axis=1)

    def entered(self, x: ir.Value, enter: Linear) -> ir.Value:
        """Return the streams before layer 0, from the first one."""
        others = enter.apply(self.graph, enter.activation(self.graph, x))
        first = self._shaped(x, -1, 1, self.streams.width)
        split = self._shaped(others, -1, self.streams.count - 1, self.streams.width)
        return self._levelled(first, split)

    def predicted(self, altup: AltUp, streams: ir.Value) -> ir.Value:
        """Return what a layer expects of the streams."""
        graph, count = self.graph, self.streams.count
        factors = self._routed(altup, self.first(streams), altup.predict)
        mixed = graph.op("MatMul", self._shaped(factors, -1, count, count), streams)
        return graph.op("Add", streams, mixed)

    def corrected(self, altup: AltUp, predicted: ir.Value, made: ir.Value) -> ir.Value:
        """Return the streams behind a layer that made `made [C, E]` of the first one."""
        graph = self.graph
        factors = self._routed(altup, made, altup.correct)
        factors = graph.op("Add", factors, graph.constant(1.0, np.float32))
        off = graph.op("Sub", made, self.first(predicted))
        off = self._shaped(off, -1, 1, self.streams.width)
        added = graph.op("Mul", self._shaped(factors, -1, self.streams.count, 1), off)
        return graph.op("Add", predicted, added)

    def with_added(self, streams: ir.Value, added: ir.Value) -> ir.Value:
        """Return the streams with `added [C, E]` in all but the first."""
        first, others = self._parts(streams)
        added = self._shaped(added, -1, 1, self.streams.width)
        return self.graph.op("Concat", first, self.graph.op("Add", others, added), axis=1)

    def left(self, streams: ir.Value, leave: Array) -> ir.Value:
        """Return the mean of the streams behind the last layer."""
        first, others = self._parts(streams)
        levelled = self._levelled(first, multiplied_heads(self.graph, others, leave))
        axes = self.graph.constant([1], np.int64)
        return self.graph.op("ReduceMean", levelled, axes, keepdims=0)

    def _routed(self, altup: AltUp, x: ir.Value, matrix: Array) -> ir.Value:
        graph, normed = self.graph, altup.norm.apply(self.graph, x, self.style)
        routes = graph.op("Tanh", graph.op("MatMul", normed, graph.weight(altup.router)))
        return graph.op("MatMul", routes, graph.weight(matrix))

    def _levelled(self, first: ir.Value, others: ir.Value) -> ir.Value:
        """Return all streams, the others brought to the magnitude of the first one."""
        graph = self.graph
        own, theirs = (
            graph.op("ReduceMean", graph.op("Mul", x, x), graph.constant([-1], np.int64))
            for x in (first, others)
        )
        theirs = graph.op("Max", theirs, graph.constant(_LEAST, np.float32))
        scales = graph.op("Sqrt", graph.op("Div", own, theirs))
        return graph.op("Concat", first, graph.op("Mul", others, scales), axis=1)

    def _parts(self, streams: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the first stream `[C, 1, E]` and the others."""
        ends = [self.graph.constant([at], np.int64) for at in (0, 1, self.streams.count)]
        axis = ends[1]
        return (
            self.graph.op("Slice", streams, ends[0], ends[1], axis),
            self.graph.op("Slice", streams, ends[1], ends[2], axis),
        )

    def _shaped(self, x: ir.Value, *shape: int) -> ir.Value:
        return self.graph.op("Reshape", x, self.graph.constant(shape, np.int64))
