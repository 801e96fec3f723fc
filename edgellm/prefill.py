"""Prefill: a prompt into the KV cache, in chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.bundle import PANELS
from edgellm.forward import Model
from edgellm.kv_cache import Sequence
from edgellm.native_model import NativeModel
from edgellm.planner import Costs, plan_chunks
from edgellm.providers import NATIVE, Placement

Floats = NDArray[np.float32]
Progress = Callable[[int, int], None]
# Tokens in one call of the native kernels, which take any number; buffers grow with it. A prompt of
# 512 at once was 9 % faster than 128 at a time (SmolLM2-135M, two cores).
NATIVE_CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a caller has done between chunks.

    Attributes:
        progress: called with tokens done and in all.
        cancel: set it to stop; finished chunks stay in the sequence.
        on_hidden: called with each chunk's hidden states `[n, E]`, padding left out.
    """

    progress: Progress | None = None
    cancel: threading.Event | None = None
    on_hidden: Callable[[Floats], None] | None = None

    def chunk_done(self, hidden: Floats, done: int, total: int) -> None:
        if self.on_hidden is not None:
            self.on_hidden(hidden)
        if self.progress is not None:
            self.progress(done, total)


NO_HOOKS = Hooks()


class Prefill(Protocol):
    """What sessions need.

    Attributes:
        placement: where it runs.
        flavour: the precision of its weights.
    """

    flavour: str

    @property
    def placement(self) -> Placement: ...

    def run(self, tokens: SequenceOf[int], sequence: Sequence, hooks: Hooks = NO_HOOKS) -> Floats:
        """Evaluate `tokens` at the end of `sequence`.

        Returns:
            The logits of the last token, `[V]`; no other row goes through the LM head.

        Raises:
            ContextOverflowError, CacheFullError: they do not fit.
            CancelledError: `hooks.cancel` was set.
        """

    def where(self, tokens: int, computed: int) -> dict[str, int]:
        """Where the first `computed` of a prompt's `tokens` run: counts by back end."""

    def logits(self, hidden: Floats) -> Floats:
        """The LM head on hidden states `[rows, E]`: `[rows, V]`."""


class ChunkedPrefill:
    """Chunks of static size through the segments of an execution provider.

    Args:
        native: takes what is too short for a chunk, where that is cheaper; or None.
        costs: of the chunks and of `native`.
    """

    def __init__(self, model: Model, native: NativeModel | None, costs: Costs) -> None:
        self._model = model
        self._native = native
        self._costs = costs
        self.flavour = model.segments.flavour

    @property
    def placement(self) -> Placement:
        return self._model.segments.placement

    def run(self, tokens: SequenceOf[int], sequence: Sequence, hooks: Hooks = NO_HOOKS) -> Floats:
        done = 0
        for piece in plan_chunks(len(tokens), self._costs):
            part = tokens[done : done + piece.count]
            if piece.size is None and self._native is not None:
                hidden, _ = self._native.forward(part, sequence, cancel=hooks.cancel)
            else:
                chunk = piece.size or max(self._model.segments.chunk_sizes)
                hidden = self._model.forward(part, sequence, chunk=chunk, cancel=hooks.cancel)
            done += piece.count
            hooks.chunk_done(hidden, done, len(tokens))
        last: Floats = self.logits(hidden[-1:])[0]
        return last

    def where(self, tokens: int, computed: int) -> dict[str, int]:
        found = {self.placement.provider: 0}
        for piece in plan_chunks(tokens, self._costs):
            count = min(piece.count, computed)
            place = NATIVE if piece.size is None else self.placement.provider
            found[place] = found.get(place, 0) + count
            computed -= count
        return {place: count for place, count in found.items() if count} or found

    def logits(self, hidden: Floats) -> Floats:
        return self._model.head.logits(hidden)


class NativePrefill:
    """The fused step on many tokens at once; nothing is padded."""

    flavour = PANELS

    def __init__(self, model: NativeModel) -> None:
        self._model = model

    @property
    def placement(self) -> Placement:
        return Placement(NATIVE, {})

    def run(self, tokens: SequenceOf[int], sequence: Sequence, hooks: Hooks = NO_HOOKS) -> Floats:
        for start in range(0, len(tokens), NATIVE_CHUNK):
            end = min(start + NATIVE_CHUNK, len(tokens))
            hidden, logits = self._model.forward(
                tokens[start:end], sequence, logit_rows=int(end == len(tokens)), cancel=hooks.cancel
            )
            hooks.chunk_done(hidden, end, len(tokens))
        last: Floats = logits[0]
        return last

    def where(self, tokens: int, computed: int) -> dict[str, int]:
        return {NATIVE: computed}

    def logits(self, hidden: Floats) -> Floats:
        return self._model.head.logits(hidden)
