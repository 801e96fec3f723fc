"""Adapters in Triton: what they add to products, as rows of biases.

Two launches for linear layers with the same input: A of each row's adapter, and B, as in Punica
(Chen et al., arXiv:2310.18547). Tiles of rows that follow each other share an adapter; its address
stands beside them in device memory, so that a captured graph serves all adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from edgellm.kernels.gpu.device import interpreted, on_device
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.lora.weights import CHANGED, AdapterWeights

# Rows of a tile, and ranks of a program at a time: the sides of the smallest products of tiles.
_ROWS = 16
# Programs that share the ranks of a tile.
_SHARES = 4
# Largest rank, which sums have room for.
MAX_RANK = 512
_OUTPUTS = 64
_FIELDS = 3

Runs = Sequence[tuple[AdapterWeights | None, int]]


@dataclass(frozen=True)
class Readers:
    """Linear layers of a layer with the same input, whose outputs lie side by side.

    Attributes:
        parts: number in a directory, first output and number of outputs of each, `[P, 3]` int32.
        bias: biases that go before what adapters add, `[outputs]`; None: there are none.
        outputs, widest: number of outputs of all, and of the one with most.
    """

    parts: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    widest: int

    @classmethod
    def of(
        cls,
        layer: int,
        outputs: Mapping[str, int],
        device: str,
        bias: NDArray[np.float32] | None = None,
    ) -> Readers:
        """Describe the linear layers of these names of `CHANGED` and numbers of outputs."""
        each = list(outputs.values())
        numbers = [layer * len(CHANGED) + CHANGED.index(name) for name in outputs]
        firsts = np.cumsum([0, *each[:-1]])
        parts = np.stack([numbers, firsts, each], axis=1).astype(np.int32)
        on = None if bias is None else on_device(bias, device)
        return cls(on_device(parts, device), on, sum(each), max(each))


@dataclass(frozen=True)
class _DeviceAdapter:
    """Adapter in device memory.

    Attributes:
        directory: addresses of A, scales and B of each change, and its rank or 0,
            `[layers, changes, 4]` int64.
        arrays: what the addresses are of.
    """

    directory: torch.Tensor
    arrays: Sequence[torch.Tensor]

    @classmethod
    def of(cls, weights: AdapterWeights, device: str) -> _DeviceAdapter:
        directory = np.zeros((len(weights.layers), len(CHANGED), 4), np.int64)
        arrays: list[torch.Tensor] = []
        for index, layer in enumerate(weights.layers):
            for name, change in layer.items():
                arrays += (on_device(x, device) for x in (change.a, change.scale, change.b))
                addresses = [x.data_ptr() for x in arrays[-3:]]
                directory[index, CHANGED.index(name)] = *addresses, change.rank
        return cls(on_device(directory, device), arrays)


class StepAdapters:
    """Adapters of the rows of a step, with buffers that one group of linear layers after the other
    uses."""

    def __init__(self, readers: Sequence[Readers], *, rows: int, device: str) -> None:
        """Make room for up to `rows` rows; buffers for these groups come with the first adapter."""
        self._device = device
        self._sizes = [
            rows * max(len(each.parts) for each in readers) * MAX_RANK,
            rows * max(each.outputs for each in readers),
        ]
        self._loaded: WeakKeyDictionary[AdapterWeights, _DeviceAdapter] = WeakKeyDictionary()
        self._tiles = torch.zeros((rows, _FIELDS), dtype=torch.int64, device=device)
        self._there = np.zeros((rows, _FIELDS), np.int64)
        self._buffers: tuple[torch.Tensor, ...] = ()

    def __contains__(self, weights: AdapterWeights) -> bool:
        return weights in self._loaded

    def load(self, weights: AdapterWeights) -> None:
        """Copy an adapter to the device; it stays there as long as there are the weights."""
        if not self._buffers:
            self._buffers = tuple(torch.empty(size, device=self._device) for size in self._sizes)
        self._loaded[weights] = _DeviceAdapter.of(weights, self._device)

    def set(self, runs: Runs) -> int:
        """Copy what says which rows have which adapter; return the number of tiles.

        Args:
            runs: adapters of rows that follow each other, loaded, and how many these are.
        """
        tiles = np.zeros_like(self._there)
        count = row = 0
        for weights, rows in _joined(runs):
            address = 0
            if weights is not None:
                address = self._loaded[weights].directory.data_ptr()
            for first in range(row, row + rows, _ROWS):
                tiles[count] = address, first, min(_ROWS, row + rows - first)
                count += 1
            row += rows
        if not np.array_equal(tiles, self._there):
            self._there = tiles
            self._tiles.copy_(torch.from_numpy(tiles))
        return count

    def of(self, tiles: int) -> Added:
        """Return what computes for the first tiles, of which some may have no rows."""
        return Added(self._tiles[:tiles], *self._buffers)


@dataclass(frozen=True)
class Added:
    """Adapters of a step, which add to the outputs of linear layers; see `StepAdapters`."""

    tiles: torch.Tensor
    sums: torch.Tensor
    room: torch.Tensor

    def rows(
        self, readers: Readers, x: torch.Tensor, *, norm: torch.Tensor | None, epsilon: float
    ) -> torch.Tensor:
        """Return what adapters, and biases, add to the outputs of linear layers `[rows, outputs]`.

        Args:
            x: inputs `[rows, inputs]` float32.
            norm: weights of an RMS norm of the inputs, if any.
        """
        (rows, inputs), parts = x.shape, len(readers.parts)
        added = self.room[: rows * readers.outputs].view(rows, readers.outputs)
        tiles = len(self.tiles)
        block = triton.next_power_of_2(inputs) if interpreted() else 64  # 128 spill on sm_80
        shrink_kernel[(tiles, parts, _SHARES)](
            x,
            x if norm is None else norm,
            self.tiles,
            readers.parts,
            self.sums,
            x.stride(0),
            inputs,
            epsilon,
            NORM=norm is not None,
            PARTS=parts,
            MOST=MAX_RANK,
            ROWS=_ROWS,
            SHARES=_SHARES,
            BLOCK=block,
            **early(),
        )
        width = triton.next_power_of_2(readers.widest) if interpreted() else _OUTPUTS
        expand_kernel[(tiles, triton.cdiv(readers.widest, width), parts)](
            self.sums,
            self.tiles,
            readers.parts,
            added if readers.bias is None else readers.bias,
            added,
            readers.outputs,
            BIAS=readers.bias is not None,
            PARTS=parts,
            MOST=MAX_RANK,
            ROWS=_ROWS,
            OUTPUTS=width,
            **early(),
        )
        return added


def _joined(runs: Runs) -> list[tuple[AdapterWeights | None, int]]:
    joined: list[tuple[AdapterWeights | None, int]] = []
    for weights, rows in runs:
        if joined and joined[-1][0] is weights:
            rows += joined.pop()[1]
        if rows:
            joined.append((weights, rows))
    return joined


@triton.jit
def change_of(tile_ptr: tl.tensor, part_ptr: tl.tensor) -> tl.tensor:
    """Return the address in its directory of a tile's change of a linear layer, and the rank.

    The rank is 0 where there is none.
    """
    directory = tl.load(tile_ptr)
    entry_ptr = directory.to(tl.pointer_type(tl.int64)) + tl.load(part_ptr) * 4
    return entry_ptr, tl.load(entry_ptr + 3, mask=directory != 0, other=0).to(tl.int32)


@triton.jit
def shrink_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    part_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    stride: tl.tensor,
    inputs: tl.tensor,
    epsilon: tl.tensor,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write A f(x), with its scales, of a tile of rows; f is the RMS norm, if any.

    The grid counts tiles, linear layers, and programs that share the ranks, 16 at a time.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    tile_ptr += tl.program_id(0) * 3
    part = tl.program_id(1)
    entry_ptr, rank = change_of(tile_ptr, part_ptr + part * 3)
    count = tl.load(tile_ptr + 2)
    row = tl.load(tile_ptr + 1) + tl.arange(0, ROWS)
    there = (tl.arange(0, ROWS) < count)[:, None]
    for first in range(tl.program_id(2) * 16, rank, SHARES * 16):
        a_ptr = tl.load(entry_ptr).to(tl.pointer_type(tl.int8))
        scale_ptr = tl.load(entry_ptr + 1).to(tl.pointer_type(tl.float32))
        r = first + tl.arange(0, 16)
        acc = tl.zeros([ROWS, 16], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
        for start in range(0, inputs, BLOCK):
            k = start + tl.arange(0, BLOCK)
            inside = k < inputs
            x = tl.load(
                x_ptr + row[:, None] * stride + k[None, :], mask=there & inside[None, :], other=0.0
            )
            if NORM:
                squares += tl.sum(x * x, axis=1)
                x *= tl.load(norm_ptr + k, mask=inside, other=0.0)[None, :]
            at = (r // 4 * inputs)[None, :] * 4 + (k // 16 * 64 + k % 16)[:, None]
            a = tl.load(
                a_ptr + at + (r % 4 * 16)[None, :],
                mask=inside[:, None] & (r < rank)[None, :],
                other=0,
            )
            acc = tl.dot(x, a.to(tl.float32), acc, input_precision="tf32")
        acc *= tl.load(scale_ptr + r, mask=r < rank, other=0.0)[None, :]
        if NORM:
            acc *= (1.0 / tl.sqrt(squares / inputs + epsilon))[:, None]
        place = ((row * PARTS + part) * MOST)[:, None] + r[None, :]
        tl.store(sums_ptr + place, acc, mask=there & (r < rank)[None, :])


@triton.jit
def expand_kernel(
    sums_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    part_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    width: tl.tensor,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write biases, if any, and B times the sums of a tile of rows.

    The grid counts tiles, blocks of outputs, and linear layers.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    tile_ptr += tl.program_id(0) * 3
    part = tl.program_id(2)
    part_ptr += part * 3
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    outputs = tl.load(part_ptr + 2)
    count = tl.load(tile_ptr + 2)
    if (count == 0) | (tl.program_id(1) * OUTPUTS >= outputs):
        return
    entry_ptr, rank = change_of(tile_ptr, part_ptr)
    row = tl.load(tile_ptr + 1) + tl.arange(0, ROWS)
    there = (tl.arange(0, ROWS) < count)[:, None]
    known = n < outputs
    y = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, rank, 16):
        b_ptr = tl.load(entry_ptr + 2).to(tl.pointer_type(tl.int8))
        r = first + tl.arange(0, 16)
        place = ((row * PARTS + part) * MOST)[:, None] + r[None, :]
        sums = tl.load(sums_ptr + place, mask=there & (r < rank)[None, :], other=0.0)
        at = (n // 16 * rank * 16 + n % 16)[None, :] + (r * 16)[:, None]
        b = tl.load(b_ptr + at, mask=(r < rank)[:, None] & known[None, :], other=0)
        y = tl.dot(sums, b.to(tl.float32), y, input_precision="tf32")
    column = tl.load(part_ptr + 1) + n
    if BIAS:
        y += tl.load(bias_ptr + column, mask=known, other=0.0)[None, :]
    tl.store(y_ptr + row[:, None] * width + column[None, :], y, mask=there & known[None, :])
