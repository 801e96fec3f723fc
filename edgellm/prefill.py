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
from edgellm.decode import DecodeBackend
from edgellm.forward import Model
from edgellm.kv_cache import Sequence
from edgellm.native_model import NativeModel
from edgellm.placement import Placement
from edgellm.planner import Costs, Piece, plan_chunks
from edgellm.providers import NATIVE

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
        on_place: called with where a chunk ran, as in `--prefill` and `--decode`, and its tokens.
    """

    progress: Progress | None = None
    cancel: threading.Event | None = None
    on_hidden: Callable[[Floats], None] | None = None
    on_place: Callable[[str, int], None] | None = None

    def chunk_done(self, place: str, hidden: Floats, done: int, total: int) -> None:
        if self.on_place is not None:
            self.on_place(place, len(hidden))
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

    def logits(self, hidden: Floats) -> Floats:
        """The LM head on hidden states `[rows, E]`: `[rows, V]`."""


class ChunkedPrefill:
    """Chunks of static size through the segments of an execution provider.

    Args:
        host: takes the first tokens of a sequence where the flavour leaves them to the host, and
            what is too short for a chunk where `costs` say so.
        costs: of the chunks and of `host`.
    """

    def __init__(self, model: Model, host: DecodeBackend, costs: Costs) -> None:
        self.model = model
        self._host = host
        self._costs = costs
        self.flavour = model.segments.flavour

    @property
    def placement(self) -> Placement:
        return self.model.segments.placement

    def run(self, tokens: SequenceOf[int], sequence: Sequence, hooks: Hooks = NO_HOOKS) -> Floats:
        done = 0
        for piece in self._plan(len(tokens), len(sequence)):
            part = tokens[done : done + piece.count]
            if piece.size is None:
                place = self._host.name
                hidden = self._host.forward(part, sequence, cancel=hooks.cancel)
            else:
                place = self.placement.provider
                hidden = self.model.forward(part, sequence, chunk=piece.size, cancel=hooks.cancel)
            done += piece.count
            hooks.chunk_done(place, hidden, done, len(tokens))
        last: Floats = self.logits(hidden[-1:])[0]
        return last

    def _plan(self, count: int, start: int) -> list[Piece]:
        """How `count` tokens are cut that come after `start` others."""
        first = min(count, max(0, self.model.segments.host_tokens - start))
        rest = plan_chunks(count - first, self._costs)
        return [Piece(None, first), *rest] if first else rest

    def logits(self, hidden: Floats) -> Floats:
        return self.model.head.logits(hidden)


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
            hooks.chunk_done(NATIVE, hidden, end, len(tokens))
        last: Floats = logits[0]
        return last

    def logits(self, hidden: Floats) -> Floats:
        return self._model.head.logits(hidden)
