"""The KV cache in device memory, states among it: the same bytes as the host's, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray

from edgellm.kernels.kv_blocks import KVBlocks, KVFormat, SealedBlocks, Sealing, row_format
from edgellm.kernels.state_blocks import StateBlocks

_DTYPES: dict[KVFormat, torch.dtype] = {
    "int8": torch.int8,
    "int4": torch.uint8,
    "f16": torch.float16,
    "f32": torch.float32,
}

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
class DeviceBlocks(_DevicePool):
    """Copy of a pool's blocks in device memory, with arrays of the same shapes.

    Attributes:
        host: the pool on the host.
        k_scale, v_scale: scales; float formats have `k` here, because kernels need a pointer.
        key_offset: copy of the host's key offset, if there is one.
    """

    host: KVBlocks
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    key_offset: torch.Tensor | None = None

    @classmethod
    def like(cls, host: KVBlocks, device: str) -> DeviceBlocks:
        """Allocate as many blocks as the host's pool has, with undefined contents."""
        dtype = _DTYPES[row_format(host.format)]
        k, v = (torch.empty(a.shape, dtype=dtype, device=device) for a in (host.k, host.v))
        offset = None if host.key_offset is None else torch.tensor(host.key_offset, device=device)
        if host.k_scale is None:
            return cls(host, k, v, k, k, offset)
        shape = host.k_scale.shape
        k_scale, v_scale = (
            torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)
        )
        return cls(host, k, v, k_scale, v_scale, offset)

    @property
    def format(self) -> KVFormat:
        return self.host.format

    @property
    def row_format(self) -> KVFormat:
        return row_format(self.host.format)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, NDArray[Any]]]:
        host = self.host
        yield self.k, host.k
        yield self.v, host.v
        if host.k_scale is not None and host.v_scale is not None:
            yield self.k_scale, host.k_scale
            yield self.v_scale, host.v_scale


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
class DeviceSealed(_DevicePool):
    """Copy of a pool of sealed blocks in device memory, with arrays of the same shapes.

    Attributes:
        host: the pool on the host.
    """

    host: SealedBlocks
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    @classmethod
    def like(cls, host: SealedBlocks, device: str) -> DeviceSealed:
        """Allocate as many blocks as the host's pool has, with undefined contents."""
        k, v = (torch.empty(x.shape, dtype=torch.uint8, device=device) for x in (host.k, host.v))
        scales = (
            torch.empty(x.shape, dtype=torch.float16, device=device)
            for x in (host.k_scale, host.v_scale)
        )
        return cls(host, k, v, *scales)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, NDArray[Any]]]:
        yield from zip((self.k, self.v, self.k_scale, self.v_scale), self.host.arrays, strict=True)


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
