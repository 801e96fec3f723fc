"""Timings and counts of an answer while it is on its way."""

from __future__ import annotations

import time
from dataclasses import replace

from edgellm.backends.batch import Rows
from edgellm.backends.trace import TaskRecord
from edgellm.engine.loaded_model import LoadedModel
from edgellm.engine.speculation import Speculation
from edgellm.machine import peak_memory_bytes
from edgellm.results import Stats


class AnswerStats:
    """Collector of the timings and counts in `Stats`.

    Attributes:
        start: time at which the answer was asked for, on the clock of `time.perf_counter`.
        cached: number of prompt tokens not computed for it; None until it is begun.
        computed: number of computed prompt tokens, with those that were lost and computed again.
        steps: number of decode steps and of accepted draft tokens.
        dropped: number of tokens that a full context has forgotten.
        preempted: number of times that the answer gave its place to others.
    """

    def __init__(self, prompt_tokens: int, *, dropped: int = 0) -> None:
        self.start = time.perf_counter()
        self.cached: int | None = None
        self.computed = self.steps = self.preempted = 0
        self.dropped = dropped
        self._prompt_tokens = prompt_tokens
        self._prefill_s = self._decode_s = self._ttft_s = self._queued_s = 0.0
        self._places: dict[str, int] = {}
        self._tasks: list[TaskRecord] = []

    def begun(self, cached: int) -> None:
        """Note that the answer has a place in the KV cache; no effect after a preemption."""
        if self.cached is None:
            self.cached, self._queued_s = cached, time.perf_counter() - self.start

    def first_token(self) -> None:
        self._ttft_s = time.perf_counter() - self.start

    def decoded(self, seconds: float) -> None:
        """Count a step that computed the token sampled last."""
        self._decode_s += seconds
        self.steps += 1

    def prefilled(self, rows: Rows, seconds: float) -> None:
        """Count a step that computed rows of the prompt."""
        self.rested(rows, seconds)
        self.computed += len(rows.hidden)
        for place, count in rows.places.items():
            self._places[place] = self._places.get(place, 0) + count

    def rested(self, rows: Rows, seconds: float) -> None:
        """Count a step that brought rows of the prompt through some of the layers."""
        self._prefill_s += seconds
        first = 1 + max((task.chunk for task in self._tasks), default=-1)
        self._tasks.extend(replace(task, chunk=first + task.chunk) for task in rows.tasks)

    def result(
        self, engine: LoadedModel, speculation: Speculation, *, tokens: int, seed: int
    ) -> Stats:
        """Return the statistics so far; `tokens`: number of sampled tokens."""
        return Stats(
            ttft_s=self._ttft_s,
            queued_s=self._queued_s,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.cached or 0,
            prompt_tokens_per_second=_rate(self.computed, self._prefill_s),
            generation_tokens=tokens,
            generation_tokens_per_second=_rate(self.steps, self._decode_s),
            peak_memory_bytes=peak_memory_bytes(),
            prefill=dict(self._places) or {engine.prefill.placement.provider: 0},
            prefill_precision=engine.prefill.precision,
            decode=f"{engine.decoder.name} {engine.decoder.precision}",
            seed=seed,
            scheduling=engine.scheduling,
            drafted_tokens=speculation.drafted,
            accepted_tokens=speculation.accepted,
            dropped_tokens=self.dropped,
            preempted=self.preempted,
            tasks=tuple(self._tasks),
        )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
