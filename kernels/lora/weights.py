"""Packed matrices of an adapter, in pairs of bfloat16.

A 32-bit word has one number in its low half and one in its high half, so that a vector of words is
two vectors of floats after a shift or a mask.

    A  [rank, inputs / 32, 16]: numbers i and i + 16 of each 32 inputs
    B  [outputs / 16, rank / 2, 16]: ranks 2 k and 2 k + 1 of each of 16 outputs

Ranks are padded with zeros to a multiple of 4. Rounding to bfloat16 moves a number by at most
0.4 %, and these are numbers of a change of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.linear import PANEL
from edgellm.kernels.quantized import GROUP

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
# Linear layers that an adapter may change, in the order of call.h.
CHANGED = ("q", "k", "v", "o", "gate", "up", "down", "q_gate")
_RANKS = 4


@dataclass(frozen=True)
class LowRank:
    """Change of a linear layer, `y += b (a x)`.

    Attributes:
        a: `[rank, inputs]`.
        b: `[outputs, rank]`.
    """

    a: Floats
    b: Floats


@dataclass(frozen=True)
class PackedChange:
    """Change of a linear layer in packed matrices.

    Attributes:
        rank: rank with its padding.
    """

    a: Words
    b: Words
    rank: int
    outputs: int
    inputs: int


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """Matrices of an adapter for all layers of a model.

    Attributes:
        layers: changes of each layer, by the names of `CHANGED`.
        digest: SHA-256 of all matrices and their places.
    """

    layers: Sequence[Mapping[str, PackedChange]]
    digest: str

    @property
    def rank(self) -> int:
        """Largest rank of all changes, with its padding."""
        return max((c.rank for layer in self.layers for c in layer.values()), default=_RANKS)

    @property
    def nbytes(self) -> int:
        changes = [change for layer in self.layers for change in layer.values()]
        return sum(change.a.nbytes + change.b.nbytes for change in changes)


def pack_adapter(layers: Sequence[Mapping[str, LowRank]]) -> AdapterWeights:
    """Pack the changes of each layer.

    Raises:
        ValueError: another linear layer than those of `CHANGED`, or matrices whose shapes do not
            fit each other, or the panels of linear layers.
    """
    others = {name for layer in layers for name in layer} - {*CHANGED}
    if others:
        raise ValueError(f"an adapter of {', '.join(sorted(others))}; allowed are {CHANGED}")
    packed = [
        {name: _packed(f"layers.{i}.{name}", layer[name]) for name in CHANGED if name in layer}
        for i, layer in enumerate(layers)
    ]
    digest = hashlib.sha256()
    for index, layer in enumerate(packed):
        for name, change in layer.items():
            digest.update(f"{index}.{name} {change.a.shape} {change.b.shape}\n".encode())
            digest.update(change.a.tobytes())
            digest.update(change.b.tobytes())
    return AdapterWeights(packed, digest.hexdigest())


def packed_bytes(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the bytes of a packed change whose matrices have these shapes."""
    rank = -(-a[0] // _RANKS) * _RANKS
    return 2 * rank * (a[-1] + b[0])


def rounded(values: Floats) -> Floats:
    """Round to bfloat16, ties to even."""
    return (_halves(values).astype(np.uint32) << 16).view(np.float32)


def _packed(name: str, change: LowRank) -> PackedChange:
    (rank, inputs), (outputs, of_b) = change.a.shape, change.b.shape
    if rank != of_b or rank < 1 or inputs % GROUP or outputs % PANEL:
        raise ValueError(
            f"{name}: A {change.a.shape} and B {change.b.shape}; needed are one rank, inputs in "
            f"groups of {GROUP} and outputs in panels of {PANEL}"
        )
    padded = -(-rank // _RANKS) * _RANKS
    a, b = np.zeros((padded, inputs), np.uint16), np.zeros((outputs, padded), np.uint16)
    a[:rank], b[:, :rank] = _halves(change.a), _halves(change.b)
    groups = a.reshape(padded, inputs // GROUP, 2, GROUP // 2)
    panels = b.reshape(outputs // PANEL, PANEL, padded // 2, 2).transpose(0, 2, 1, 3)
    return PackedChange(
        _words(groups[:, :, 0], groups[:, :, 1]),
        _words(panels[..., 0], panels[..., 1]),
        padded,
        outputs,
        inputs,
    )


def _halves(values: Floats) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _words(low: NDArray[np.uint16], high: NDArray[np.uint16]) -> Words:
    return np.ascontiguousarray(low.astype(np.uint32) | high.astype(np.uint32) << 16)
