"""Alternating updates: a layer computes one of several residual streams, and predicts others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.linear import PackedWeights

__all__ = ["MOST_STREAMS", "AltUpWeights", "Streams"]

MOST_STREAMS = 8
Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class AltUpWeights:
    """Weights with which a layer predicts S streams, and corrects them (AltUp, arXiv:2301.13310).

    Attributes:
        router_norm: weight of the RMS norm of the row that the router reads, `[E]`.
        router: `[S, E]`; small matrices are multiplied with the tanh of its products.
        predict: `[S * S, S]`, gives the factors with which each stream adds all streams.
        correct: `[S, S]`, gives the factors, less one, with which each stream adds the difference
            between what the layer made of the first stream and what was predicted.
        scale: factors `[E]` of the corrected first stream where the layer's own embeddings read it.
    """

    router_norm: Floats
    router: Floats
    predict: Floats
    correct: Floats
    scale: Floats

    def check(self, *, streams: int, hidden: int) -> None:
        """Refuse parts that do not fit each other.

        Raises:
            ValueError: a part does not fit; the message names it.
        """
        shapes = {
            "router_norm": (hidden,),
            "router": (streams, hidden),
            "predict": (streams * streams, streams),
            "correct": (streams, streams),
            "scale": (hidden,),
        }
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
                raise ValueError(
                    f"altup.{name} is {array.dtype} {array.shape}; needed is float32 {shape}"
                )


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Weights that make the other streams of the first one, and bring them back behind all layers.

    Attributes:
        enter, leave: a matrix `[E, E]` for each stream but the first, one behind the other.
    """

    enter: PackedWeights
    leave: PackedWeights

    @property
    def count(self) -> int:
        """Number of streams, the first one among them."""
        return 1 + self.enter.outputs // self.enter.inputs

    def check(self, hidden: int) -> None:
        """Refuse matrices that do not fit each other.

        Raises:
            ValueError: a matrix does not fit; the message names it.
        """
        count = self.count
        if not 2 <= count <= MOST_STREAMS:
            raise ValueError(f"{count} streams; 2 to {MOST_STREAMS} are needed")
        for name, linear in (("enter", self.enter), ("leave", self.leave)):
            shape, needed = (linear.outputs, linear.inputs), ((count - 1) * hidden, hidden)
            if shape != needed:
                raise ValueError(f"streams.{name} is {shape}; needed is {needed}")
