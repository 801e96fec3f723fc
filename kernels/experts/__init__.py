"""Mixture of experts: a router sends each row through a few of many MLPs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgellm.kernels.native import address

__all__ = ["ExpertMemory", "ExpertUse", "Routing", "Scores"]


# Scores of a row's experts: the softmax of their logits, or the sigmoid of each.
Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Choice of experts for a row from the router's logits (Shazeer et al., arXiv:1701.06538).

    Attributes:
        experts: number of experts.
        used: number of experts that a row goes through: those with the best scores.
        normalized: whether the scores of a row's chosen experts are divided by their sum. With
            softmax that is the softmax of the chosen logits alone.
        scale: factor of the sum of the experts' outputs.
        bias: whether the logits have a bias.
        selection_bias: whether the scores have a bias that counts in the choice alone
            (Wang et al., arXiv:2408.15664).
        scaled: whether the share of each expert is multiplied by a number of its own.
        groups, used_groups: number of groups of as many experts each, and of those that a row's
            experts are chosen from: those with the best expert or, of sigmoids, the best two
            together (DeepSeek-V2 and V3, arXiv:2405.04434, arXiv:2412.19437).
    """

    experts: int
    used: int
    normalized: bool = True
    scale: float = 1.0
    scores: Scores = "softmax"
    bias: bool = False
    selection_bias: bool = False
    scaled: bool = False
    groups: int = 1
    used_groups: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether the softmax of the logits alone makes choice and shares."""
        return self == Routing(
            experts=self.experts, used=self.used, normalized=self.normalized, scale=self.scale
        )


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
