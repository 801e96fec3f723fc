"""Packed matrices of an adapter in int8.

    A  [rank / 4, inputs / 16, 4, 16]: 16 inputs of 4 ranks in turn
    B  [outputs / 16, rank, 16]: each rank of 16 outputs

A rank has one scale, which is that of its row of A times that of its column of B. Ranks are padded
with zeros to a multiple of 4, and outputs to whole panels. Of a linear layer whose heads are
computed each by itself the matrices of all heads lie one behind the other. Rounding moves a change
of random matrices by 1 %, as much as it moves weights in int8: a small part of a change of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.linear import PANEL
from edgellm.kernels.quantized import GROUP

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]
# Linear layers that an adapter may change, in the order of call.h.
CHANGED = (
    *("q", "k", "v", "o", "gate", "up", "down", "q_gate"),
    *("query_down", "key_up", "value_up"),
    *("conv_in", "mamba_in", "mamba_o", "delta_qkv", "delta_z", "delta_a", "delta_b"),
    *("shared_gate", "shared_up", "shared_down"),
)
_RANKS, _LANES, _BY_HEADS = 4, 16, 3
_LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class LowRank:
    """Change of a linear layer, `y += b (a x)`.

    Where each head has inputs and outputs of its own, as in attention over latents, one of the two
    matrices is that of each head `[H, ...]`, and the other one that of all.

    Attributes:
        a: `[rank, inputs]`, or `[H, rank, inputs]`.
        b: `[outputs, rank]`, or `[H, outputs, rank]`.
    """

    a: Floats
    b: Floats


@dataclass(frozen=True)
class PackedChange:
    """Change of a linear layer in packed matrices.

    Attributes:
        scale: scales of the ranks `[H, rank]`, one row if all heads have the same.
        rank: rank with its padding.
        outputs, inputs: of a head, where there are some.
        heads: heads that have matrices of their own; 0: the layer is one.
    """

    a: Codes
    b: Codes
    scale: Floats
    rank: int
    outputs: int
    inputs: int
    heads: int = 0

    @property
    def steps(self) -> tuple[int, int, int]:
        """Numbers between what heads have of A, B and scales; 0 where all have the same."""
        a, b = (x[0].size if x.ndim > plain else 0 for x, plain in ((self.a, 4), (self.b, 3)))
        return a, b, self.rank if self.heads else 0


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
        return sum(x.nbytes for change in changes for x in (change.a, change.b, change.scale))


def pack_adapter(layers: Sequence[Mapping[str, LowRank]]) -> AdapterWeights:
    """Pack the changes of each layer.

    Raises:
        ValueError: another linear layer than those of `CHANGED`, or matrices whose shapes do not
            fit each other, or the groups of linear layers.
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
            for array in (change.a, change.b, change.scale):
                digest.update(array.tobytes())
    return AdapterWeights(_side_by_side(packed), digest.hexdigest())


def _side_by_side(layers: Sequence[Mapping[str, PackedChange]]) -> list[dict[str, PackedChange]]:
    """Return changes whose matrices lie in one piece of memory, in the order of computation.

    Each begins with a cache line.
    """
    parts = ("a", "scale", "b")
    every = [getattr(x, part) for layer in layers for x in layer.values() for part in parts]
    memory = np.empty(sum(-(-x.nbytes // _LINE) for x in every) * _LINE + _LINE, np.uint8)
    first = -memory.ctypes.data % _LINE

    def moved(array: NDArray[Any]) -> NDArray[Any]:
        nonlocal first
        view = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        first += -(-array.nbytes // _LINE) * _LINE
        return view

    def layer_moved(layer: Mapping[str, PackedChange]) -> dict[str, PackedChange]:
        first = {name: (moved(x.a), moved(x.scale)) for name, x in layer.items()}
        return {
            name: replace(x, a=first[name][0], scale=first[name][1], b=moved(x.b))
            for name, x in layer.items()
        }

    return [layer_moved(layer) for layer in layers]


def packed_bytes(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the bytes of a packed change whose matrices have these shapes."""
    rank = -(-a[0] // _RANKS) * _RANKS
    return rank * (a[-1] + b[0] + 4)


def rounded(values: Floats, *, axis: int) -> tuple[Codes, Floats]:
    """Round to int8, ties to even; return codes, and scales of what lies along an axis."""
    scale = np.abs(values).max(axis, keepdims=True) / np.float32(127)
    codes = np.rint(values / np.where(scale > 0, scale, 1)).astype(np.int8)
    return codes, scale.squeeze(axis)


def _packed(name: str, change: LowRank) -> PackedChange:
    (rank, inputs), (outputs, of_b) = change.a.shape[-2:], change.b.shape[-2:]
    heads = {len(each) for each in (change.a, change.b) if each.ndim == _BY_HEADS}
    if rank != of_b or rank < 1 or inputs % GROUP or len(heads) > 1:
        raise ValueError(
            f"{name}: A {change.a.shape} and B {change.b.shape}; needed are one rank, one number "
            f"of heads, and inputs in groups of {GROUP}"
        )
    padded, panels = -(-rank // _RANKS) * _RANKS, -(-outputs // PANEL)
    a = np.zeros((*change.a.shape[:-2], padded, inputs), np.int8)
    b = np.zeros((*change.b.shape[:-2], panels * PANEL, padded), np.int8)
    a[..., :rank, :], of_a = rounded(change.a, axis=-1)
    b[..., :outputs, :rank], scale = rounded(change.b, axis=-2)
    scale = np.atleast_2d(of_a * scale)
    blocks = a.reshape(*a.shape[:-2], padded // _RANKS, _RANKS, inputs // _LANES, _LANES)
    lanes = b.reshape(*b.shape[:-2], panels, PANEL, padded)
    return PackedChange(
        np.ascontiguousarray(blocks.swapaxes(-3, -2)),
        np.ascontiguousarray(lanes.swapaxes(-2, -1)),
        np.pad(scale, ((0, 0), (0, padded - rank))),
        padded,
        outputs,
        inputs,
        heads=max(heads, default=0),
    )
