"""The KV cache in device memory, states among it: the same bytes as the host's, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from edgellm.kernels.kv_blocks import SEALED, KVBlocks, KVFormat, SealedBlocks, Sealing
from edgellm.kernels.state_blocks import StateBlocks

# Sizes of a span and of a row of `DeviceStateRows`.
STATE_SPAN_FIELDS = 4
STATE_ROW_FIELDS = 2
# Bytes of an array that change sides in one copy, which waits; both sides have room for them.
_AT_ONCE = 64 << 20


class _DevicePool:
    """Copy of a pool's blocks in device memory."""

    def fetch(self, ids: Sequence[int]) -> None:
        """Copy blocks from the host."""
        for ours, theirs, part in self._parts(ids):
            blocks = torch.from_numpy(theirs[part]).to(ours.device)
            ours[torch.tensor(part, device=ours.device)] = blocks

    def give(self, ids: Sequence[int]) -> None:
        """Copy blocks to the host."""
        for ours, theirs, part in self._parts(ids):
            theirs[part] = ours[torch.tensor(part, device=ours.device)].cpu().numpy()

    def copy_block(self, source: int, target: int) -> None:
        for ours, _ in self._pairs():
            ours[target].copy_(ours[source])

    def _parts(self, ids: Sequence[int]) -> Iterator[tuple[torch.Tensor, NDArray[Any], list[int]]]:
        """Iterate pairs of arrays with the blocks to copy at once, as many as `_AT_ONCE` holds."""
        for ours, theirs in self._pairs():
            count = max(1, _AT_ONCE // theirs[0].nbytes)
            for first in range(0, len(ids), count):
                yield ours, theirs, list(ids[first : first + count])

    def _pairs(self) -> Iterator[tuple[torch.Tensor, NDArray[Any]]]:
        """Iterate the arrays on the device, and those on the host."""
        raise NotImplementedError


@dataclass(frozen=True)
class _DeviceRows(_DevicePool):
    """Copy of K, V and their scales, with arrays of the same shapes.

    Attributes:
        host: the pool on the host.
        k_scale, v_scale: scales; float formats have `k` here, because kernels need a pointer.
    """

    host: KVBlocks | SealedBlocks
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    def _pairs(self) -> Iterator[tuple[torch.Tensor, NDArray[Any]]]:
        # of float formats the host has two
        return zip((self.k, self.v, self.k_scale, self.v_scale), self.host.arrays, strict=False)


@dataclass(frozen=True)
class DeviceBlocks(_DeviceRows):
    """Copy of a pool's blocks in device memory.

    Attributes:
        key_offset: copy of the host's key offset, if there is one.
    """

    host: KVBlocks
    key_offset: torch.Tensor | None = None

    @classmethod
    def like(cls, host: KVBlocks, device: str) -> DeviceBlocks:
        """Allocate as many blocks as the host's pool has, with undefined contents."""
        k, v, *scales = _like(host.arrays, device)
        offset = None if host.key_offset is None else torch.tensor(host.key_offset, device=device)
        k_scale, v_scale = scales or (k, k)
        return cls(host, k, v, k_scale, v_scale, offset)

    @property
    def format(self) -> KVFormat:
        return self.host.format

    @property
    def row_format(self) -> KVFormat:
        """Format of rows as they are written: int8 where blocks are sealed later."""
        return "int8" if self.format in SEALED else self.format


@dataclass(frozen=True)
class DeviceSealed(_DeviceRows):
    """Copy of a pool of sealed blocks in device memory."""

    host: SealedBlocks

    @classmethod
    def like(cls, host: SealedBlocks, device: str) -> DeviceSealed:
        """Allocate as many blocks as the host's pool has, with undefined contents."""
        return cls(host, *_like(host.arrays, device))


def _like(arrays: Sequence[NDArray[Any]], device: str) -> list[torch.Tensor]:
    """Allocate arrays of the same shapes and types."""
    return [torch.empty_like(torch.from_numpy(array), device=device) for array in arrays]


@dataclass(frozen=True)
class DeviceStates(_DevicePool):
    """Copy of a pool of states in device memory, with an array of the same shape.

    Attributes:
        host: the pool on the host.
    """

    host: StateBlocks
    states: torch.Tensor

    @classmethod
    def like(cls, host: StateBlocks, device: str) -> DeviceStates:
        """Allocate as many blocks as the host's pool has, with undefined contents."""
        return cls(host, torch.empty(host.states.shape, dtype=torch.float32, device=device))

    def _pairs(self) -> Iterator[tuple[torch.Tensor, NDArray[Any]]]:
        yield self.states, self.host.states


@dataclass(frozen=True)
class SealedPlace:
    """Sealed blocks of the sequences of a step.

    Attributes:
        blocks: pool of the blocks.
        tables: ids of the sealed blocks of each sequence `[S, blocks]` int64, on the device.
        sealing: bits of a number in them.
    """

    blocks: DeviceSealed
    tables: torch.Tensor
    sealing: Sealing

    @property
    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """K, V and their scales as kernels read them: keys that are not packed are int8."""
        blocks = self.blocks
        k = blocks.k if self.sealing.channels else blocks.k.view(torch.int8)
        return k, blocks.v, blocks.k_scale, blocks.v_scale


DevicePool = DeviceBlocks | DeviceStates | DeviceSealed


@dataclass(frozen=True)
class DeviceStateRows:
    """Rows of a step, and the blocks of a pool that their states are read from and written to.

    Attributes:
        pool: pool with the states.
        spans: `[S, STATE_SPAN_FIELDS]` int32: first row of a span, its number of rows, and the
            block with the states before them, -1 for zeros. The last field is 0.
        rows: `[C, STATE_ROW_FIELDS]` int32: span of a row, and the block that takes the states
            after it, or -1.
    """

    pool: DeviceStates
    spans: torch.Tensor
    rows: torch.Tensor

    def of(self, spans: int, rows: int) -> DeviceStateRows:
        """Return the first spans and rows."""
        return replace(self, spans=self.spans[:spans], rows=self.rows[:rows])


@triton.jit
def key_places(row: tl.tensor, e: tl.tensor, ROW: tl.constexpr) -> tl.tensor:
    """Return where elements `e` of a key lie in a head's block, whose rows have ROW elements."""
    return (row // 16 * (16 * ROW) + row % 16 * 4) + (e // 4 * 64 + e % 4)


@triton.jit
def value_places(row: tl.tensor, e: tl.tensor, ROW: tl.constexpr) -> tl.tensor:
    """Return where elements `e` of a value lie in a head's block, whose rows have ROW elements."""
    return row // 4 * (4 * ROW) + row % 4 + e * 4
