"""The fused step in Triton: embedding to logits for one token or some, seven launches a layer.

Q, K and V are one launch where their weights are of one kind, else two or three. The launches of
one token, and of a whole chunk, are captured in CUDA graphs: tokens, position and block table stand
in device memory, so one capture serves every step. The best tokens after one can be found there
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgellm.kernels.attention.gpu import Partials, attend
from edgellm.kernels.checks import block_ids, check_rope, indices
from edgellm.kernels.gpu.capture import Captured
from edgellm.kernels.gpu.device import on_device
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks
from edgellm.kernels.kv_append.gpu import append_rotated
from edgellm.kernels.kv_blocks import BLOCK, BlockTable
from edgellm.kernels.linear.gpu import DevicePanels, Rows, embed, linear, stackable
from edgellm.kernels.linear.panels import Panels
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.sampling import Logits
from edgellm.kernels.sampling.gpu import LogitRow
from edgellm.kernels.step.weights import (
    LayerWeights,
    Weights,
    check_blocks,
    check_rows,
    check_weights,
)

Floats = NDArray[np.float32]
# Tokens in one call at most: what the buffers are made for.
MAX_ROWS = 512


@dataclass(frozen=True)
class _Layer:
    """A layer's weights in device memory; see `LayerWeights`.

    Attributes:
        projections: Q, K and V, neighbours stacked where that can be done.
    """

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    projections: Sequence[DevicePanels]
    o: DevicePanels
    gate: DevicePanels
    up: DevicePanels
    down: DevicePanels
    qkv_bias: torch.Tensor | None

    @classmethod
    def of(cls, layer: LayerWeights, device: str) -> _Layer:
        return cls(
            on_device(layer.attention_norm, device),
            on_device(layer.mlp_norm, device),
            _stacked([layer.q, layer.k, layer.v], device),
            DevicePanels.of(layer.o, device),
            DevicePanels.of(layer.gate, device),
            DevicePanels.of(layer.up, device),
            DevicePanels.of(layer.down, device),
            None if layer.qkv_bias is None else on_device(layer.qkv_bias, device),
        )


@dataclass(frozen=True)
class _Buffers:
    """Room for `rows` tokens on their way through the layers."""

    x: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    attended: torch.Tensor
    activated: torch.Tensor
    states: torch.Tensor
    halves: Rows
    partials: Partials

    def of(self, rows: int) -> _Buffers:
        """The part for the first `rows` tokens."""
        return _Buffers(
            self.x[:rows],
            self.qkv[:rows],
            self.q[:rows],
            self.attended[:rows],
            self.activated[:rows],
            self.states[:rows],
            self.halves,
            self.partials,
        )


class _Inputs:
    """What changes from step to step, in one piece of device memory and so in one copy.

    Attributes:
        start: `[1]` int32.
        tokens: `[MAX_ROWS]`.
        table: block ids.
    """

    def __init__(self, vocabulary: int, pool: int, blocks: int, device: str) -> None:
        """`pool` is how many blocks there are, `blocks` how many a table may have."""
        self._vocabulary = vocabulary
        self._pool = pool
        self._host = torch.zeros(1 + MAX_ROWS + blocks, dtype=torch.int64)
        self._device = self._host.to(device, copy=True)
        self.start = self._device[:1].view(torch.int32)[:1]
        self.tokens = self._device[1 : 1 + MAX_ROWS]
        self.table = self._device[1 + MAX_ROWS :]

    def set(self, table: BlockTable, tokens: Sequence[int], start: int) -> None:
        """Copy them to the device.

        Raises:
            ValueError: a token, a block or a position that is not there, or too many of them.
        """
        if not 1 <= len(tokens) <= MAX_ROWS or len(table) > len(self.table):
            raise ValueError(
                f"{len(tokens)} tokens in a table of {len(table)} blocks; there is room for 1 to "
                f"{MAX_ROWS} and for {len(self.table)}"
            )
        host = self._host.numpy()
        host[1 : 1 + len(tokens)] = indices(tokens, self._vocabulary, "token id")
        host[1 + MAX_ROWS : 1 + MAX_ROWS + len(table)] = block_ids(
            table, self._pool, start=start, tokens=len(tokens)
        )
        host[0] = start
        self._device.copy_(self._host)


class DeviceStep:
    """A model in device memory, ready for `run` on the blocks of one pool."""

    def __init__(
        self, weights: Weights, rope_table: RopeTable, blocks: DeviceBlocks, device: str
    ) -> None:
        check_weights(weights)
        check_blocks(weights, blocks.host)
        check_rope(rope_table, blocks.host.head_dim, 0)
        self._weights = weights
        self._blocks = blocks
        self._device = device
        self._layers = [_Layer.of(layer, device) for layer in weights.layers]
        self._final_norm = on_device(weights.final_norm, device)
        self._embedding = DevicePanels.of(weights.embedding, device)
        tied = weights.head is weights.embedding
        self._head = self._embedding if tied else DevicePanels.of(weights.head, device)
        self._cos, self._sin = (on_device(part, device) for part in rope_table)
        self._positions = len(rope_table.cos)
        tables = -(-self._positions // BLOCK)
        self._inputs = _Inputs(weights.embedding.outputs, blocks.host.count, tables, device)
        self._buffers = self._allocate(MAX_ROWS)
        self._row = LogitRow.empty(weights.head.outputs, device)
        self._one = Captured(self._launch_one, device)
        self._chunk = Captured(self._launch_chunk, device)
        self._pack = Captured(self._row.pack, device)

    def run(
        self,
        table: BlockTable,
        tokens: Sequence[int],
        start: int,
        *,
        logit_rows: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> tuple[Floats, Floats] | None:
        """Write K and V of `tokens` at positions `start ..` and compute what follows them.

        Args:
            table: the sequence's block ids, those of the new positions among them.
            logit_rows: the last so many tokens go through the LM head.
            should_stop: asked before each layer of more than one token, or before all of them for
                `MAX_ROWS`.

        Returns:
            Hidden states after the final norm `[len(tokens), E]` and logits `[logit_rows, V]`; None
            if it was stopped.

        Raises:
            ValueError: a token, a block or a position that is not there.
        """
        count = len(tokens)
        check_rows(count, logit_rows)
        self._check_positions(start + count)
        self._inputs.set(table, tokens, start)
        if count == 1 and logit_rows == 1:
            self._one()
            return _host(self._buffers.states[:1]), _host(self._row.logits)
        buffers = self._buffers.of(count)
        if count == MAX_ROWS and not (should_stop is not None and should_stop()):
            self._chunk()
        elif not self._through_layers(buffers, should_stop):
            return None
        logits = torch.empty((logit_rows, self._head.outputs), device=self._device)
        if logit_rows:
            linear(buffers.states[count - logit_rows :], self._head, logits, buffers.halves)
        return _host(buffers.states), _host(logits)

    def best(self, table: BlockTable, token: int, start: int) -> Logits:
        """`run` for one token; of the logits, the best come to the host and not all."""
        self._check_positions(start + 1)
        self._inputs.set(table, [token], start)
        self._one()
        self._pack()
        return self._row.best()

    def logits(self, hidden: Floats) -> Floats:
        """The LM head on states `[rows, E]`: `[rows, V]`."""
        found = []
        for first in range(0, len(hidden), MAX_ROWS):
            states = on_device(hidden[first : first + MAX_ROWS], self._device)
            logits = torch.empty((len(states), self._head.outputs), device=self._device)
            linear(states, self._head, logits, self._buffers.halves)
            found.append(_host(logits))
        return np.concatenate(found)

    def linear(self, x: Floats, weight: Panels) -> Floats:
        """Some rows `[M, K]` through a weight that is copied for it: `[M, N]`."""
        rows = on_device(x, self._device)
        out = torch.empty((len(x), weight.outputs), device=self._device)
        linear(rows, DevicePanels.of(weight, self._device), out, self._buffers.halves)
        return _host(out)

    def _check_positions(self, end: int) -> None:
        if end > self._positions:
            raise ValueError(f"position {end} is beyond the {self._positions} of the RoPE table")

    def _launch_chunk(self) -> None:
        self._through_layers(self._buffers, None)

    def _launch_one(self) -> None:
        buffers = self._buffers.of(1)
        self._through_layers(buffers, None)
        row = self._row
        linear(buffers.states, self._head, row.logits, buffers.halves, peaks=row.peaks)

    def _through_layers(self, buffers: _Buffers, should_stop: Callable[[], bool] | None) -> bool:
        """Tokens to states; False if it was stopped on the way."""
        weights, epsilon, x = self._weights, self._weights.epsilon, buffers.x
        embed(self._embedding, self._inputs.tokens, x)
        for index, layer in enumerate(self._layers):
            if should_stop is not None and should_stop():
                return False
            rows = buffers.halves
            qkv = buffers.qkv.view(len(x), -1)
            first = 0
            for weight in layer.projections:
                part = qkv[:, first : first + weight.outputs]
                linear(x, weight, part, rows, norm=layer.attention_norm, epsilon=epsilon)
                first += weight.outputs
            append_rotated(
                self._blocks,
                self._inputs.table,
                index,
                self._inputs.start,
                buffers.qkv,
                self._cos,
                self._sin,
                buffers.q,
                bias=layer.qkv_bias,
            )
            attend(
                self._blocks,
                self._inputs.table,
                index,
                buffers.q,
                self._inputs.start,
                buffers.attended,
                buffers.partials,
                window=weights.window,
            )
            linear(buffers.attended.view(len(x), -1), layer.o, x, rows, add=True)
            linear(
                x,
                layer.gate,
                buffers.activated,
                rows,
                norm=layer.mlp_norm,
                epsilon=epsilon,
                up=layer.up,
            )
            linear(buffers.activated, layer.down, x, rows, add=True)
        normed = torch.nn.functional.rms_norm(x, x.shape[1:], self._final_norm, epsilon)
        buffers.states.copy_(normed)
        return True

    def _allocate(self, rows: int) -> _Buffers:
        weights, host = self._weights, self._blocks.host
        hidden, intermediate = weights.embedding.inputs, weights.layers[0].gate.outputs
        heads, head_dim, kv_heads = weights.heads, host.head_dim, host.kv_heads
        inputs = max(hidden, intermediate, heads * head_dim)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        return _Buffers(
            x=empty(rows, hidden),
            qkv=empty(rows, heads + 2 * kv_heads, head_dim),
            q=empty(rows, heads, head_dim),
            attended=empty(rows, heads, head_dim),
            activated=empty(rows, intermediate),
            states=empty(rows, hidden),
            halves=Rows(empty(rows, inputs, dtype=torch.float16), empty(rows)),
            partials=Partials.empty(
                tokens=rows,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                device=self._device,
            ),
        )


def _stacked(parts: Sequence[Panels], device: str) -> list[DevicePanels]:
    runs = [[parts[0]]]
    for panels in parts[1:]:
        if stackable(runs[-1][-1], panels):
            runs[-1].append(panels)
        else:
            runs.append([panels])
    return [DevicePanels.stacked(run, device) for run in runs]


def _host(tensor: torch.Tensor) -> Floats:
    """A copy on the host, also where the device is the host."""
    found: Floats = tensor.cpu().numpy().copy()
    return found
