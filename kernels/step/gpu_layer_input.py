"""Embeddings that tokens have for each layer, in Triton; see `LayerTable`.

The table stays in the mapped file: panels with the rows of a step's tokens are copied to the device
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from edgellm.kernels.gpu.device import aligned, on_device
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.linear.gpu import FEW_ROWS, DevicePackedWeights, Rows, embed, linear
from edgellm.kernels.linear.gpu_rows import row_pointers, store_part
from edgellm.kernels.linear.packed import PANEL, PackedWeights
from edgellm.kernels.step.gpu_buffers import Buffers, kept, some
from edgellm.kernels.step.gpu_norm import DeviceNorm, normalize
from edgellm.kernels.step.weights import Activation, Weights


@dataclass(frozen=True, kw_only=True)
class LayerEmbeddings:
    """Embeddings of the tokens of a step for each of L layers, of which each has P numbers.

    Attributes:
        table: rows of all tokens, on the host.
        panels: those that have the rows of the tokens of the step, as many of each token.
        index: of these rows in them, `[rows * L]` int64.
        rows: the rows, `[rows, L * P]`.
        contexts: what is made of the residual before the first layer, `[rows, L * P]`.
        projections: what makes them, side by side.
        norm: weight of the norm of a context.
        epsilon: epsilon of that norm.
    """

    table: PackedWeights
    layers: int
    panels: DevicePackedWeights
    index: torch.Tensor
    rows: torch.Tensor
    contexts: torch.Tensor
    projections: Sequence[DevicePackedWeights]
    norm: torch.Tensor
    epsilon: float

    @classmethod
    def of(cls, weights: Weights, *, rows: int, device: str) -> LayerEmbeddings | None:
        """Allocate memory for steps of up to `rows` rows; None: a model without a table."""
        given = weights.layer_table
        inputs = [each.input for each in weights.layers if each.input is not None]
        if given is None or not inputs:
            return None
        table, layers = given.table, len(weights.layers)
        # wherever in a panel the first row of a token is
        panels = rows * (-(-(layers - 1) // PANEL) + 1)
        data = np.zeros((panels, *table.data.shape[1:]), table.data.dtype)
        memory = PackedWeights(data, panels * PANEL, table.inputs, table.kind)
        width = table.inputs * layers
        held, contexts = (torch.empty((rows, width), device=device) for _ in range(2))
        return cls(
            table=table,
            layers=layers,
            panels=DevicePackedWeights.of(memory, device),
            index=torch.zeros(rows * layers, dtype=torch.int64, device=device),
            rows=held,
            contexts=contexts,
            projections=DevicePackedWeights.runs([each.context for each in inputs], device),
            norm=on_device(given.norm, device),
            # the root of the residual's width divides a context
            epsilon=weights.epsilon * weights.embedding.inputs,
        )

    def set(self, tokens: Sequence[int]) -> None:
        """Look up the rows of the tokens of a step; where the table has none, those of token 0."""
        known, layers = np.array(tokens), self.layers
        known[known >= self.table.outputs // layers] = 0
        panel, row = np.divmod(known * layers, PANEL)
        each = len(self.panels.data) // len(self.rows)
        panels = panel[:, None] + np.arange(each)
        data = self.table.data[np.minimum(panels, len(self.table.data) - 1).ravel()]
        self.panels.data[: len(data)].copy_(torch.from_numpy(data))
        first = row + PANEL * each * np.arange(len(known))
        index = torch.from_numpy((first[:, None] + np.arange(layers)).ravel())
        self.index[: len(index)].copy_(index)

    def keep(self, index: torch.Tensor) -> None:
        """Move what some rows of the step have to the beginning."""
        for memory in (self.rows, self.contexts):
            kept(memory, index)

    def enter(self, x: torch.Tensor, rows: Rows) -> None:
        """Dequantize the rows, and make the contexts of the residual before the first layer."""
        count, first = len(x), 0
        to = self.rows[:count].view(count * self.layers, -1)
        embed(self.panels, self.index, to)
        for weight in self.projections:
            linear(x, weight, self.contexts[:count, first : first + weight.outputs], rows)
            first += weight.outputs


@triton.jit
def embedding_kernel(
    gate_ptr: tl.tensor,
    context_ptr: tl.tensor,
    row_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    epsilon: tl.tensor,
    root: tl.tensor,
    WIDTH: tl.constexpr,
    CODED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Multiply a row's activated gate by its embedding; the grid counts rows.

    Args:
        root: root of the number of elements, `size`, which WIDTH is a power of two from on.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0)
    k = tl.arange(0, WIDTH)
    inside = k < size
    at = row * stride + k
    context = tl.load(context_ptr + at, mask=inside, other=0.0)
    context *= 1.0 / tl.sqrt(tl.sum(context * context, axis=0) / size + epsilon)
    context *= tl.load(norm_ptr + k, mask=inside, other=0.0)
    both = context + root * tl.load(row_ptr + at, mask=inside, other=0.0)
    y = tl.load(gate_ptr + row * size + k, mask=inside, other=0.0) * (both * 0.7071067811865476)
    store_part(y, row, 0, size, size, (out_ptr, codes_ptr, scale_ptr, shift_ptr), CODED)


@dataclass(frozen=True, kw_only=True)
class DeviceInput:
    """Weights of what a layer adds of a token's own embedding, in device memory.

    Attributes:
        row, context: of the layer, parts of those in `embeddings`.
        scale: factor of the residual behind all.
    """

    gate: DevicePackedWeights
    output: DevicePackedWeights
    post_norm: DeviceNorm
    row: torch.Tensor
    context: torch.Tensor
    embeddings: LayerEmbeddings
    epsilon: float
    scale: float

    @classmethod
    def of(
        cls, weights: Weights, index: int, embeddings: LayerEmbeddings | None, device: str
    ) -> DeviceInput | None:
        given = weights.layers[index].input
        if given is None or embeddings is None:
            return None
        width = given.gate.outputs
        before = sum(each.input is not None for each in weights.layers[:index])
        return cls(
            gate=DevicePackedWeights.of(given.gate, device),
            output=DevicePackedWeights.of(given.output, device),
            post_norm=DeviceNorm.of(given.post_norm, None, device),
            row=embeddings.rows[:, width * index :],
            context=embeddings.contexts[:, width * before :],
            embeddings=embeddings,
            epsilon=weights.epsilon,
            scale=weights.layers[index].output_scale,
        )

    def run(
        self, buffers: Buffers, activation: Activation, *, streams: torch.Tensor | None
    ) -> None:
        """Add it to the residual.

        Args:
            streams: residual streams `[M, S, E]`, if there are some: it is made of
                `buffers.states`, and added to all but the first.
        """
        rows, width = len(buffers.x), self.gate.outputs
        gate = some(buffers.projected, rows, width)
        x = buffers.x if streams is None else buffers.states
        linear(x, self.gate, gate, buffers.rows, activation=activation)
        coded = buffers.inner if rows <= FEW_ROWS else None
        embedding_kernel[(rows,)](
            gate,
            self.context,
            self.row,
            self.embeddings.norm,
            *row_pointers(gate, coded),
            self.row.stride(0),
            width,
            self.embeddings.epsilon,
            width**0.5,
            WIDTH=aligned(width),
            CODED=coded is not None,
            num_warps=4,
            **early(),
        )
        out, norm, epsilon = buffers.states, self.post_norm, self.epsilon
        linear(gate, self.output, out, buffers.rows, coded=coded)
        if streams is None:
            normalize(out, norm, buffers.x, epsilon=epsilon, add=True, scale=self.scale)
        else:
            normalize(out, norm, out, epsilon=epsilon)
            streams[:, 1:].add_(out[:, None])
