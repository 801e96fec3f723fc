"""Decode back ends: one token in, logits out, on the same KV cache as prefill."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.bundle import PANELS
from edgellm.forward import Model
from edgellm.kv_cache import Sequence
from edgellm.native_model import NativeModel
from edgellm.providers import NATIVE


class DecodeBackend(Protocol):
    """What the decode loop needs.

    Attributes:
        name: as in `--decode`.
        flavour: the precision of its weights.
    """

    name: str
    flavour: str

    def step(self, token: int, sequence: Sequence) -> NDArray[np.float32]:
        """Append `token` to the sequence and give the logits after it, `[V]`."""


class SegmentDecoder:
    """Segments at chunk size 1 in ONNX Runtime: needs no compiler and no device."""

    def __init__(self, model: Model, *, name: str, flavour: str) -> None:
        self._model = model
        self.name = name
        self.flavour = flavour

    def step(self, token: int, sequence: Sequence) -> NDArray[np.float32]:
        hidden = self._model.forward([token], sequence, chunk=1)
        logits: NDArray[np.float32] = self._model.head.logits(hidden)[0]
        return logits


class NativeDecoder:
    """The fused step: all layers of a token in one call of the C++ kernels."""

    name = NATIVE
    flavour = PANELS

    def __init__(self, model: NativeModel) -> None:
        self._model = model

    def step(self, token: int, sequence: Sequence) -> NDArray[np.float32]:
        _, logits = self._model.forward([token], sequence, logit_rows=1)
        row: NDArray[np.float32] = logits[0]
        return row
