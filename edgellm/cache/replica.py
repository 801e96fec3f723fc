"""The KV cache on host and device: the same blocks twice, copied between the two when needed."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.cache.groups import Blocks, Side
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks, DevicePool, DeviceSealed, DeviceStates
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks, SealedBlocks


class Replica:
    """A copy of a group's blocks on a device, with the side that wrote to each block last.

    Blocks have the same numbers and bytes on host and device, so a sequence's table serves both,
    and each side finds the prefixes that the other has computed.
    """

    def __init__(self, host: Blocks, device: str) -> None:
        self.host = host
        self.device: DevicePool
        if isinstance(host, KVBlocks):
            self.device = DeviceBlocks.like(host, device)
        elif isinstance(host, SealedBlocks):
            self.device = DeviceSealed.like(host, device)
        else:
            self.device = DeviceStates.like(host, device)
        self._newer: dict[int, Side] = {}

    def use(self, side: Side, table: Sequence[int], length: int) -> None:
        """Bring a sequence's `length` tokens to `side`, which is going to write after them."""
        self.bring(side, table[: -(-length // BLOCK)])
        self.write(side, table[length // BLOCK :])

    def bring(self, side: Side, blocks: Sequence[int]) -> None:
        """Bring what was written to blocks to `side`, which is going to read it."""
        stale = [block for block in blocks if self._newer.get(block, side) != side]
        if stale and side == "device":
            self.device.fetch(stale)
        elif stale:
            self.device.give(stale)
        for block in stale:
            del self._newer[block]

    def write(self, side: Side, blocks: Sequence[int]) -> None:
        """Note that `side` is going to write to blocks."""
        for block in blocks:
            self._newer[block] = side

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` tokens of a block on each side where they are current."""
        side = self._newer.get(source)
        if side != "device":
            self.host.copy_rows(source, target, rows)
        if side != "host":
            self.device.copy_block(source, target)
        if side is None:
            self._newer.pop(target, None)
        else:
            self._newer[target] = side
