"""Decode back ends: one token in, logits out, on the same KV cache as prefill."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.forward import Model
from edgellm.backends.registry import NATIVE
from edgellm.backends.step_model import StepModel
from edgellm.cache.sequence import Sequence
from edgellm.kernels.sampling import Logits
from edgellm.store.bundle import PACKED

Floats = NDArray[np.float32]


class DecodeBackend(Protocol):
    """What the decode loop needs.

    Attributes:
        name: as in `--decode`.
        precision: of its weights.
        exact_rows: whether a token's result has the same bits however many come with it, and some
            of them take less than each alone: whether drafts can be checked.
    """

    name: str
    precision: str
    exact_rows: bool

    def forward(
        self,
        tokens: SequenceOf[int],
        sequence: Sequence,
        *,
        cancel: threading.Event | None = None,
    ) -> Floats:
        """Append tokens; gives the hidden states after the final norm, `[len(tokens), E]`.

        Raises:
            CancelledError: `cancel` was set.
        """

    def step(self, token: int, sequence: Sequence) -> Floats:
        """Append `token` to the sequence and give the logits after it, `[V]`."""

    def best(self, token: int, sequence: Sequence) -> Logits | None:
        """`step` where the best logits are found sooner than all of them are there; elsewhere None,
        and nothing is appended."""

    def steps(self, tokens: SequenceOf[int], sequence: Sequence) -> Floats:
        """Append tokens to the sequence and give the logits after each, `[n, V]`."""


class SegmentDecoder:
    """Segments at chunk size 1 in ONNX Runtime: needs no compiler and no device."""

    exact_rows = False

    def __init__(self, model: Model, *, name: str, precision: str) -> None:
        self._model = model
        self.name = name
        self.precision = precision

    def forward(
        self,
        tokens: SequenceOf[int],
        sequence: Sequence,
        *,
        cancel: threading.Event | None = None,
    ) -> Floats:
        rows = [
            self._model.forward([token], sequence, chunk=1, cancel=cancel).copy()
            for token in tokens
        ]
        return np.concatenate(rows)

    def step(self, token: int, sequence: Sequence) -> Floats:
        hidden = self._model.forward([token], sequence, chunk=1)
        logits: Floats = self._model.head.logits(hidden)[0]
        return logits

    def best(self, token: int, sequence: Sequence) -> Logits | None:
        return None

    def steps(self, tokens: SequenceOf[int], sequence: Sequence) -> Floats:
        return np.stack([self.step(token, sequence) for token in tokens])


class StepDecoder:
    """The fused step: all layers of a token in one call, in C++ or in Triton kernels."""

    precision = PACKED

    def __init__(self, model: StepModel, *, name: str) -> None:
        self.model = model
        self.name = name
        self.exact_rows = name == NATIVE  # on a GPU one row has a kernel of its own

    def forward(
        self,
        tokens: SequenceOf[int],
        sequence: Sequence,
        *,
        cancel: threading.Event | None = None,
    ) -> Floats:
        hidden, _ = self.model.forward(tokens, sequence, cancel=cancel)
        return hidden

    def step(self, token: int, sequence: Sequence) -> Floats:
        row: Floats = self.steps([token], sequence)[0]
        return row

    def best(self, token: int, sequence: Sequence) -> Logits | None:
        return self.model.best(token, sequence)

    def steps(self, tokens: SequenceOf[int], sequence: Sequence) -> Floats:
        _, logits = self.model.forward(tokens, sequence, logit_rows=len(tokens))
        return logits
