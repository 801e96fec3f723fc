"""Experts within a limit of memory (`memory.h`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from edgellm.kernels.native import address


@dataclass(frozen=True)
class ExpertUse:
    """Uses of experts by layers: an expert counts once for each layer of each step.

    Attributes:
        hits: number of experts that were in memory.
        reads: number of experts that were read from the disk, or from the system's own cache of it.
        bytes_read: size of these.
    """

    hits: int = 0
    reads: int = 0
    bytes_read: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the experts that were in memory; 1 where none was used."""
        return self.hits / (self.hits + self.reads) if self.hits + self.reads else 1.0

    def since(self, before: ExpertUse) -> ExpertUse:
        return ExpertUse(
            self.hits - before.hits,
            self.reads - before.reads,
            self.bytes_read - before.bytes_read,
        )


class _ExpertMemory(ctypes.Structure):
    """Experts in memory; the fields are those of call.h, in their order."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("limit", "resident", "clock")),
        *((name, ctypes.c_int64) for name in ("hits", "reads", "bytes_read")),
        *((name, ctypes.c_void_p) for name in ("used", "holders")),
        ("stride", ctypes.c_int32),
    ]


class ExpertMemory:
    """Experts of a model that stay in memory: those used last, up to a limit.

    The others are given back to the system, which reads them again when they are used: their
    weights must be mapped from a file.
    """

    def __init__(self, limit: int, *, layers: int, experts: int) -> None:
        """Begin with no expert in memory.

        Args:
            limit: bytes of experts in memory. Layers that need more at once go beyond it as long as
                steps compute them.
            layers: number of the model's layers.
            experts: largest number of experts of a layer.
        """
        self._used = np.zeros((layers, experts), np.int64)
        self._holders = np.zeros((layers, experts), np.int32)
        self._struct = _ExpertMemory(
            limit=limit, used=address(self._used), holders=address(self._holders), stride=experts
        )

    @property
    def pointer(self) -> int:
        """Address of what C++ reads and changes; valid as long as this object."""
        return ctypes.addressof(self._struct)

    @property
    def resident(self) -> int:
        """Bytes of experts in memory."""
        return int(self._struct.resident)

    @property
    def use(self) -> ExpertUse:
        """Uses of experts so far."""
        return ExpertUse(self._struct.hits, self._struct.reads, self._struct.bytes_read)
