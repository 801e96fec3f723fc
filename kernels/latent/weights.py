"""Weights of a layer that attends over latents, beside its other projections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.linear import PANEL, PackedWeights

_GROUP = 32  # inputs of a quantized matrix that share a scale


@dataclass(frozen=True, kw_only=True)
class LatentWeights:
    """Weights around latents (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434).

    A layer's `q` gives each head what RoPE turns, then `key` numbers; its `k` gives the rotated
    part that the keys of all heads share, and its `v` the latent, before its norm. A score is the
    product of the rotated parts plus that of the latent with `key_up` times those numbers.

    Attributes:
        key_up: for each head `[rank, key]`, one behind the other.
        value_up: for each head `[value, rank]`, one behind the other: values of what it attends to.
        norm: weight of the RMS norm of latents `[rank]`.
        query_down, query_norm: projection of a row to what `q` reads, `[query rank, E]`, and the
            weight of its RMS norm; None where `q` reads the row itself.
        epsilon: number added to the mean squares of both norms.
    """

    key_up: PackedWeights
    value_up: PackedWeights
    norm: NDArray[np.float32]
    epsilon: float
    query_down: PackedWeights | None = None
    query_norm: NDArray[np.float32] | None = None

    @property
    def rank(self) -> int:
        return self.value_up.inputs

    @property
    def linears(self) -> tuple[PackedWeights, ...]:
        down = () if self.query_down is None else (self.query_down,)
        return (*down, self.key_up, self.value_up)

    def check(self, *, heads: int, hidden: int) -> int:
        """Refuse parts that do not fit each other; returns the inputs of `q`.

        Raises:
            ValueError: a part does not fit; the message names it.
        """
        key, value = self.key_up.inputs, self.value_up.outputs // heads
        shapes = {"key_up": (self.key_up.outputs, heads * self.rank)}
        shapes["value_up"] = self.value_up.outputs, heads * value
        norms = {"norm": (self.norm, self.rank)}
        if self.query_down is not None and self.query_norm is not None:
            shapes["query_down"] = self.query_down.inputs, hidden
            norms["query_norm"] = self.query_norm, self.query_down.outputs
        elif self.query_down is not None or self.query_norm is not None:
            raise ValueError("query_down without query_norm, or query_norm without it")
        for name, (size, needed) in shapes.items():
            if size != needed:
                raise ValueError(f"{name} has {size}; needed are {needed}")
        for name, (norm, size) in norms.items():
            if norm.dtype != np.float32 or norm.shape != (size,):
                raise ValueError(
                    f"{name} is {norm.dtype} {norm.shape}; needed is float32 ({size},)"
                )
        if key % _GROUP or self.rank % _GROUP or value % PANEL:
            raise ValueError(
                f"heads have {key} numbers without positions, latents of {self.rank} and values of "
                f"{value}; needed are multiples of {_GROUP}, {_GROUP} and {PANEL}"
            )
        return hidden if self.query_down is None else self.query_down.outputs
