"""The KV cache on host and device: the same blocks twice, copied between the two when needed."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.cache.groups import Side
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks


class Replica:
    """A copy of a group's blocks on a device, with the side that wrote to each block last.

    Blocks have the same numbers and bytes on host and device, so a sequence's table serves both,
    and each side finds the prefixes that the other has computed.
    """

    def __init__(self, host: KVBlocks, device: str) -> None:
        self.host = host
        self.device = DeviceBlocks.like(host, device)
        self._newer: dict[int, Side] = {}

    def use(self, side: Side, table: Sequence[int], length: int) -> None:
        """Bring a sequence's `length` tokens to `side`, which is going to write after them."""
        held = table[: -(-length // BLOCK)]
        stale = [block for block in held if self._newer.get(block, side) != side]
        if stale and side == "device":
            self.device.fetch(stale)
        elif stale:
            self.device.give(stale)
        for block in stale:
            del self._newer[block]
        for block in table[length // BLOCK :]:
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
