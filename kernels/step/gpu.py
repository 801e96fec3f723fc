"""The fused step in Triton: embedding to logits for one token or some; `gpu_layer.py` has a layer.

The launches of one token, and of a whole chunk, are captured in CUDA graphs: tokens, position and
block table stand in device memory, so one capture serves every step. The best tokens after one can
be found there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from edgellm.kernels.checks import block_ids, check_rope, indices
from edgellm.kernels.gpu.capture import Captured
from edgellm.kernels.gpu.device import on_device
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks
from edgellm.kernels.kv_blocks import BLOCK, BlockTable
from edgellm.kernels.linear.gpu import DevicePackedWeights, Peaks, embed, linear
from edgellm.kernels.linear.packed import PackedWeights
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.sampling import Logits
from edgellm.kernels.sampling.gpu import LogitRow
from edgellm.kernels.step.gpu_layer import Buffers, DeviceLayer, DeviceRope, Place
from edgellm.kernels.step.gpu_norm import DeviceNorm, normalize
from edgellm.kernels.step.weights import Weights, check_pools, check_rows, check_weights

Floats = NDArray[np.float32]
# Tokens in one call at most: what the buffers are made for.
MAX_ROWS = 512


class _Inputs:
    """What changes from step to step, in one piece of device memory and so in one copy.

    Attributes:
        start: `[1]` int32.
        tokens: `[MAX_ROWS]`.
        tables: block ids in each pool, `[pools, blocks]`.
    """

    def __init__(self, vocabulary: int, pools: Sequence[int], blocks: int, device: str) -> None:
        """`pools` is how many blocks each of them has, `blocks` how many a table may have."""
        self._vocabulary = vocabulary
        self._pools = pools
        self._first = 1 + MAX_ROWS  # of the tables
        self._host = torch.zeros(self._first + len(pools) * blocks, dtype=torch.int64)
        self._device = self._host.to(device, copy=True)
        self.start = self._device[:1].view(torch.int32)[:1]
        self.tokens = self._device[1 : self._first]
        self.tables = self._device[self._first :].view(len(pools), blocks)

    def set(self, tables: Sequence[BlockTable], tokens: Sequence[int], start: int) -> None:
        """Copy them to the device.

        Raises:
            ValueError: a token, a block or a position that is not there, or too many of them.
        """
        room = self.tables.shape[1]
        longest = max(map(len, tables))
        if not 1 <= len(tokens) <= MAX_ROWS or longest > room or len(tables) != len(self.tables):
            raise ValueError(
                f"{len(tokens)} tokens in {len(tables)} tables of {longest} blocks; there is room "
                f"for 1 to {MAX_ROWS}, and for {len(self.tables)} tables of {room}"
            )
        host = self._host.numpy()
        host[1 : 1 + len(tokens)] = indices(tokens, self._vocabulary, "token id")
        rows = host[self._first :].reshape(self.tables.shape)
        for row, table, blocks in zip(rows, tables, self._pools, strict=True):
            row[: len(table)] = block_ids(table, blocks, start=start, tokens=len(tokens))
        host[0] = start
        self._device.copy_(self._host)


class DeviceStep:
    """A model in device memory, ready for `run` on the blocks of its pools."""

    def __init__(
        self,
        weights: Weights,
        rope_tables: Sequence[RopeTable],
        pools: Sequence[DeviceBlocks],
        device: str,
    ) -> None:
        """Copy the weights to the device.

        Args:
            rope_tables: those that `LayerWeights.rope` counts.
            pools: those that `LayerWeights.pool` counts.

        Raises:
            ValueError: a part that does not fit the others.
        """
        check_weights(weights, ropes=len(rope_tables))
        check_pools(weights, [pool.host for pool in pools])
        head_dim, kv_heads = pools[0].host.head_dim, pools[0].host.kv_heads
        for table in rope_tables:
            check_rope(table, head_dim, 0)
        self._weights = weights
        self._device = device
        ropes = [DeviceRope.of(table, device) for table in rope_tables]
        count = len(weights.layers)
        self._layers = [DeviceLayer.of(weights, index, ropes, device) for index in range(count)]
        self._final_norm = DeviceNorm.of(weights.final_norm, weights.final_norm_bias, device)
        self._embedding = DevicePackedWeights.of(weights.embedding, device)
        tied = weights.head is weights.embedding
        self._head = self._embedding if tied else DevicePackedWeights.of(weights.head, device)
        self._positions = min(len(table.cos) for table in rope_tables)
        tables = -(-self._positions // BLOCK)
        counts = [pool.host.count for pool in pools]
        self._inputs = _Inputs(weights.embedding.outputs, counts, tables, device)
        self._places = [
            Place(pool, table, self._inputs.start)
            for pool, table in zip(pools, self._inputs.tables, strict=True)
        ]
        self._buffers = Buffers.empty(weights, rows=MAX_ROWS, kv_heads=kv_heads, device=device)
        self._row = LogitRow.empty(weights.head.outputs, device)
        self._one = Captured(self._launch_one, device)
        self._chunk = Captured(self._launch_chunk, device)
        self._pack = Captured(self._row.pack, device)

    def run(
        self,
        tables: Sequence[BlockTable],
        tokens: Sequence[int],
        start: int,
        *,
        logit_rows: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> tuple[Floats, Floats] | None:
        """Write K and V of `tokens` at positions `start ..` and compute what follows them.

        Args:
            tables: the sequence's block ids in each pool, those of the new positions among them.
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
        self._inputs.set(tables, tokens, start)
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
            self._head_into(buffers.states[count - logit_rows :], logits)
        return _host(buffers.states), _host(logits)

    def best(self, tables: Sequence[BlockTable], token: int, start: int) -> Logits:
        """`run` for one token; of the logits, the best come to the host and not all."""
        self._check_positions(start + 1)
        self._inputs.set(tables, [token], start)
        self._one()
        self._pack()
        return self._row.best()

    def logits(self, hidden: Floats) -> Floats:
        """The LM head on states `[rows, E]`: `[rows, V]`."""
        parts = []
        for first in range(0, len(hidden), MAX_ROWS):
            states = on_device(hidden[first : first + MAX_ROWS], self._device)
            logits = torch.empty((len(states), self._head.outputs), device=self._device)
            self._head_into(states, logits)
            parts.append(_host(logits))
        return np.concatenate(parts)

    def linear(self, x: Floats, weight: PackedWeights) -> Floats:
        """Some rows `[M, K]` through a weight that is copied for it: `[M, N]`."""
        rows = on_device(x, self._device)
        out = torch.empty((len(x), weight.outputs), device=self._device)
        linear(rows, DevicePackedWeights.of(weight, self._device), out, self._buffers.halves)
        return _host(out)

    def _check_positions(self, end: int) -> None:
        if end > self._positions:
            raise ValueError(f"position {end} is beyond the {self._positions} of the RoPE table")

    def _launch_chunk(self) -> None:
        self._through_layers(self._buffers, None)

    def _launch_one(self) -> None:
        buffers = self._buffers.of(1)
        self._through_layers(buffers, None)
        self._head_into(buffers.states, self._row.logits, peaks=self._row.peaks)

    def _through_layers(self, buffers: Buffers, should_stop: Callable[[], bool] | None) -> bool:
        """Tokens to states; False if it was stopped on the way."""
        weights = self._weights
        embed(self._embedding, self._inputs.tokens, buffers.x, scale=weights.embedding_scale)
        for layer in self._layers:
            if should_stop is not None and should_stop():
                return False
            layer.run(buffers, self._places)
        normalize(buffers.x, self._final_norm, buffers.states, epsilon=weights.epsilon)
        return True

    def _head_into(
        self, states: torch.Tensor, logits: torch.Tensor, *, peaks: Peaks | None = None
    ) -> None:
        """The LM head on states `[rows, E]`, into `logits` `[rows, V]`; see `linear`."""
        cap = self._weights.logit_softcap
        linear(states, self._head, logits, self._buffers.halves, softcap=cap, peaks=peaks)


def _host(tensor: torch.Tensor) -> Floats:
    """A copy on the host, also where the device is the host."""
    copy: Floats = tensor.cpu().numpy().copy()
    return copy
