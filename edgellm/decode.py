"""Decode back ends: one token in, logits out, on the same KV cache as prefill."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.forward import Model
from edgellm.kv_cache import Sequence


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


class PortableDecoder:
    """Segments at chunk size 1 and numpy attention: needs no compiler and no device."""

    name = "portable"

    def __init__(self, model: Model, *, flavour: str) -> None:
        self._model = model
        self.flavour = flavour

    def step(self, token: int, sequence: Sequence) -> NDArray[np.float32]:
        hidden = self._model.forward([token], sequence, chunk=1)
        logits: NDArray[np.float32] = self._model.head.logits(hidden)[0]
        return logits
