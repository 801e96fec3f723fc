"""The back end of segments of single tokens, which needs no compiler and no device."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Rows, Span, logits_of
from edgellm.backends.forward import Model
from edgellm.backends.placement import Placement
from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence

Floats = NDArray[np.float32]


class TokenBackend:
    """Segments at chunk size 1 in ONNX Runtime, one token after the other; see `Backend`."""

    exact_rows = False
    row_multiple = chunk_rows = 1

    def __init__(self, model: Model, *, name: str) -> None:
        self._model = model
        self.name = name
        self.precision = model.segments.precision

    @property
    def placement(self) -> Placement:
        return self._model.segments.placement

    def rows_at_once(self, sequence: Sequence) -> int:
        return sequence.rows_at_once

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        return [self._run(span, should_stop) for span in spans]

    def _run(self, span: Span, should_stop: Callable[[], bool] | None) -> Rows:
        start = time.perf_counter()
        states = np.concatenate(
            [
                self._model.forward([token], span.sequence, chunk=1, should_stop=should_stop).copy()
                for token in span.tokens
            ]
        )
        last = states[len(states) - span.logit_rows :]
        (logits,) = logits_of([span], self.logits(last)) if span.logit_rows else [()]
        task = TaskRecord(f"{self.name} step", 0, "host", start, time.perf_counter())
        return Rows(states, logits, {self.name: len(states)}, [task])

    def logits(self, hidden: Floats) -> Floats:
        return self._model.head.logits(hidden)
