"""The fused step as a back end: all layers of all rows in one call, in C++ or in Triton kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Rows, Span
from edgellm.backends.providers import Placement
from edgellm.backends.registry import NATIVE
from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence
from edgellm.kernels.experts import ExpertMemory
from edgellm.kernels.linear import PackedWeights
from edgellm.kernels.lora import AdapterWeights
from edgellm.store.manifest import PACKED

Floats = NDArray[np.float32]


class StepModel(Protocol):
    """A model in kernels that take packed weights: `NativeModel` or `TritonModel`.

    Attributes:
        best_rows: number of tokens that one call computes best; None: as many as suit the cache.
        expert_memory: experts in memory, where there is a limit for them; else None.
    """

    best_rows: int | None
    expert_memory: ExpertMemory | None

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        """See `Backend.run`."""

    def load_adapter(self, adapter: AdapterWeights) -> None:
        """Make an adapter ready for rows that have it.

        Raises:
            UnsupportedModelError: it changes what the kernels do not change.
            MemoryEstimateError: there is no room for it.
        """

    def linear(self, x: Floats, weight: PackedWeights, *, fine: bool = False) -> Floats:
        """Multiply rows `[rows, K]` to `[rows, N]` as the step does, for the self-test.

        Args:
            fine: whether activations keep 16 bits where others are rounded to fewer.
        """

    def logits(self, hidden: Floats) -> Floats:
        """Return the LM head's logits `[rows, V]` for hidden states `[rows, E]`."""


class StepBackend:
    """A model in the fused step as a back end, see `Backend`; no rows are padded."""

    precision = PACKED
    row_multiple = chunk_rows = 1

    def __init__(self, model: StepModel, *, name: str) -> None:
        self.model = model
        self.name = name
        self.exact_rows = name == NATIVE  # on a GPU tiles depend on the number of rows

    @property
    def placement(self) -> Placement:
        return Placement(self.name, {})

    def rows_at_once(self, sequence: Sequence) -> int:
        return self.model.best_rows or sequence.rows_at_once

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        start = time.perf_counter()
        results = self.model.run(spans, should_stop=should_stop)
        task = TaskRecord(f"{self.name} step", 0, "host", start, time.perf_counter())
        return [
            replace(rows, places={self.name: len(rows.hidden)}, tasks=(task,)) for rows in results
        ]

    def logits(self, hidden: Floats) -> Floats:
        return self.model.logits(hidden)
