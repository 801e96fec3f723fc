"""Packed matrices of an adapter, in pairs of bfloat16.

A 32-bit word has one number in its low half and one in its high half, so that a vector of words is
two vectors of floats after a shift or a mask.

    A  [rank / 4, inputs / 32, 4, 16]: numbers i and i + 16 of each 32 inputs, of 4 ranks in turn
    B  [outputs / 16, rank / 2, 16]: ranks 2 k and 2 k + 1 of each of 16 outputs

Ranks are padded with zeros to a multiple of 4, and outputs to whole panels. Of a linear layer whose
heads are computed each by itself the matrices of all heads lie one behind the other. Rounding to
bfloat16 moves a number by at most 0.4 %, and these are numbers of a change of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.linear import PANEL
from edgellm.kernels.quantized import GROUP

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
# Linear layers that an adapter may change, in the order of call.h.
CHANGED = (
    *("q", "k", "v", "o", "gate", "up", "down", "q_gate"),
    *("query_down", "key_up", "value_up"),
    *("conv_in", "mamba_in", "mamba_o", "delta_qkv", "delta_z", "delta_a", "delta_b"),
    *("shared_gate", "shared_up", "shared_down"),
)
_RANKS, _BY_HEADS = 4, 3
_LINE = 16  # words of a cache line


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
        rank: rank with its padding.
        outputs, inputs: of a head, where there are some.
        heads: heads that have matrices of their own; 0: the layer is one.
    """

    a: Words
    b: Words
    rank: int
    outputs: int
    inputs: int
    heads: int = 0

    @property
    def steps(self) -> tuple[int, int]:
        """Words from one head's A, and B, to those of the next; 0 where all heads have the same."""
        a, b = (x[0].size if x.ndim > plain else 0 for x, plain in ((self.a, 4), (self.b, 3)))
        return a, b


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
            digest.update(change.a.tobytes())
            digest.update(change.b.tobytes())
    return AdapterWeights(_side_by_side(packed), digest.hexdigest())


def _side_by_side(layers: Sequence[Mapping[str, PackedChange]]) -> list[dict[str, PackedChange]]:
    """Return changes whose matrices lie in one piece of memory, in the order of computation.

    Each begins with a cache line.
    """
    every = [change for layer in layers for change in layer.values()]
    memory = np.empty(sum(x.a.size + x.b.size for x in every) + _LINE, np.uint32)
    first = -(memory.ctypes.data // memory.itemsize) % _LINE

    def moved(array: Words) -> Words:
        nonlocal first
        view = memory[first : first + array.size].reshape(array.shape)
        view[...] = array
        first += array.size
        return view

    def layer_moved(layer: Mapping[str, PackedChange]) -> dict[str, PackedChange]:
        a, b = ({name: moved(getattr(x, part)) for name, x in layer.items()} for part in "ab")
        return {name: replace(each, a=a[name], b=b[name]) for name, each in layer.items()}

    return [layer_moved(layer) for layer in layers]


def packed_bytes(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the bytes of a packed change whose matrices have these shapes."""
    rank = -(-a[0] // _RANKS) * _RANKS
    return 2 * rank * (a[-1] + b[0])


def rounded(values: Floats) -> Floats:
    """Round to bfloat16, ties to even."""
    return (_halves(values).astype(np.uint32) << 16).view(np.float32)


def _packed(name: str, change: LowRank) -> PackedChange:
    (rank, inputs), (outputs, of_b) = change.a.shape[-2:], change.b.shape[-2:]
    heads = {len(each) for each in (change.a, change.b) if each.ndim == _BY_HEADS}
    if rank != of_b or rank < 1 or inputs % GROUP or len(heads) > 1:
        raise ValueError(
            f"{name}: A {change.a.shape} and B {change.b.shape}; needed are one rank, one number "
            f"of heads, and inputs in groups of {GROUP}"
        )
    padded, panels = -(-rank // _RANKS) * _RANKS, -(-outputs // PANEL)
    a = np.zeros((*change.a.shape[:-2], padded, inputs), np.uint16)
    b = np.zeros((*change.b.shape[:-2], panels * PANEL, padded), np.uint16)
    a[..., :rank, :], b[..., :outputs, :rank] = _halves(change.a), _halves(change.b)
    blocks = a.reshape(*a.shape[:-2], padded // _RANKS, _RANKS, inputs // GROUP, 2, GROUP // 2)
    groups = blocks.swapaxes(-4, -3)
    lanes = b.reshape(*b.shape[:-2], panels, PANEL, padded // 2, 2).swapaxes(-3, -2)
    return PackedChange(
        _words(groups[..., 0, :], groups[..., 1, :]),
        _words(lanes[..., 0], lanes[..., 1]),
        padded,
        outputs,
        inputs,
        heads=max(heads, default=0),
    )


def _halves(values: Floats) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _words(low: NDArray[np.uint16], high: NDArray[np.uint16]) -> Words:
    return np.ascontiguousarray(low.astype(np.uint32) | high.astype(np.uint32) << 16)
