"""Chunks through all layers: segment, attention on the shared KV cache, segment, ..."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from edgellm.backends.batch import Span, reserved
from edgellm.backends.chunk import Chunk, RunningChunk, RunningSpan, begun
from edgellm.backends.executor import execute
from edgellm.backends.host_attention import HostAttention
from edgellm.backends.schedule import WINDOW, Policy, Step, Task
from edgellm.backends.segments import ModelHead, Segments
from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence

Floats = NDArray[np.float32]
Done = Callable[[Floats], None]


class Model:
    """A precision ready to run: segments, embedding and head, and what is between segments."""

    def __init__(
        self, segments: Segments, head: ModelHead, attention: HostAttention, *, threads: int
    ) -> None:
        """`attention` has RoPE tables for the whole context."""
        self.segments = segments
        self.config = segments.config
        self.head = head
        self._attention = attention
        self._threads = threads
        self._blas = ThreadpoolController()
        self._actions = self._program()
        self.steps = [step for step, _ in self._actions]
        self._seconds: dict[tuple[int, int], float] = {}  # by chunk size and step, last time

    def forward(
        self,
        tokens: SequenceOf[int],
        sequence: Sequence,
        *,
        chunk: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> Floats:
        """Run up to `chunk` tokens at the end of `sequence` and count them into it.

        Returns:
            The hidden states after the final norm, `[len(tokens), E]`; overwritten by the next
            call.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
            CancelledError: `should_stop` said so; the sequence is as it was.
        """
        states: list[Floats] = []
        only = Chunk([Span(sequence, tokens)], chunk)
        self.run([only], on_done=states.append, should_stop=should_stop)
        return states[0]

    def run(
        self,
        chunks: SequenceOf[Chunk],
        *,
        policy: Policy = "serial",
        on_done: Done | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[TaskRecord]:
        """Run chunks at the end of their sequences, several at a time if the policy lets them.

        Spans of one sequence in chunks that follow each other go one behind the other.

        Args:
            on_done: called with each chunk's hidden states `[n, E]`, in their order, once it has
                been counted into its sequences; overwritten when it returns.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
            CancelledError: `should_stop` said so; sequences hold the chunks that were finished.
        """
        jobs = begun(
            chunks, lambda index: self.segments.buffers(chunks[index].size, slot=index % WINDOW)
        )

        def act(task: Task) -> None:
            self._actions[task.step][1](jobs[task.chunk])
            if on_done is not None and task.step == len(self.steps) - 1:
                on_done(self.hidden(jobs[task.chunk]))

        # ONNX Runtime's pool spins between segments; BLAS threads would wait for the same cores
        # (846 against 1,750 tokens/s at pp512 on two cores, with attention in numpy).
        with (
            self.queue(),
            self._blas.limit(limits=1, user_api="blas"),
            reserved([span for chunk in chunks for span in chunk.spans], windowed=False),
        ):
            records = execute(
                self.steps,
                len(jobs),
                act,
                policy=policy,
                seconds=lambda task: self._seconds.get((chunks[task.chunk].size, task.step), 0.0),
                should_stop=should_stop,
            )
        self._learn(chunks, records)
        return records

    def profile(
        self, tokens: SequenceOf[int], sequence: Sequence, *, size: int, start: int
    ) -> list[float]:
        """Seconds of each step of a chunk that comes after `start` tokens.

        They need not be there: attention reads zeros.

        Args:
            sequence: an empty one, which it is afterwards as well.
        """
        span = RunningSpan(sequence, tokens, start, slice(0, len(tokens)))
        chunk = RunningChunk([span], self.segments.buffers(size))

        def act(task: Task) -> None:
            self._actions[task.step][1](chunk)

        count = start + len(tokens)
        with (
            self.queue(),
            self._blas.limit(limits=1, user_api="blas"),
            sequence.reserved(count, windowed=False),
        ):
            sequence.open_seen(start)
            sequence.open(count)
            # memory that is touched for the first time would cost more than attention
            for table in sequence.tables:
                table.store.blocks.clear(table.held)
            records = execute(self.steps[:-1], 1, act, policy="serial", seconds=lambda _: 0.0)
        return [*(record.end_s - record.start_s for record in records), 0.0]

    def _program(self) -> list[tuple[Step, Callable[[RunningChunk], None]]]:
        """The steps of a chunk, and what is done in each."""
        actions: list[tuple[Step, Callable[[RunningChunk], None]]] = []
        actions.append((Step("embedding", "host"), self.embed))
        for position, part in enumerate(self.segments.parts):
            layer = part.index - 1
            if part.half == "down":
                shadow = partial(self._shadow, part.index, position % 2)
                actions.append((Step(f"shadow {layer}", "host"), shadow))
            elif part.index:
                attention = partial(self.attend, layer)
                actions.append((Step(f"attention {layer}", "host", ordered=True), attention))
            name = f"segment {part.index}{part.half and f' {part.half}'}"
            actions.append((Step(name, "accelerator"), partial(_segment, position)))
        actions.append((Step("commit", "host", ordered=True), _commit))
        return actions

    def queue(self) -> AbstractContextManager[object]:
        """Around what is launched on a device; nothing on the host."""
        return nullcontext()

    def embed(self, chunk: RunningChunk) -> None:
        """The first step of a chunk: room in the cache, and rows of the embedding."""
        for span in chunk.spans:
            span.sequence.open(span.start + len(span.tokens))
            span.sequence.use_host()
        buffers, count = chunk.buffers, len(chunk.tokens)
        buffers.x[:count] = self.head.embed(chunk.tokens)
        buffers.x[count:] = 0
        buffers.attention[count:] = 0

    def attend(self, layer: int, chunk: RunningChunk) -> None:
        """RoPE, append to the cache, attend; the padding of the chunk takes no part."""
        for span in chunk.spans:
            chunk.buffers.attention[span.rows] = self._attention(
                layer,
                *span.sequence.view(layer),
                span.start,
                chunk.buffers.qkv[span.rows],
                threads=self._threads,
            )

    def _shadow(self, segment: int, residual: int, chunk: RunningChunk) -> None:
        """What the grid of down_proj clips, into the residual that its product is added to."""
        # span by span: the inputs that a product takes are those that any of its rows needs
        for span in chunk.spans:
            activated = chunk.buffers.activated[span.rows]
            correction = self.segments.shadows[segment].correction(activated)
            if correction is not None:
                chunk.buffers.residuals[residual][span.rows] += correction

    def hidden(self, chunk: RunningChunk) -> Floats:
        hidden: Floats = chunk.buffers.hidden[: len(chunk.tokens)]
        return hidden

    def _learn(self, chunks: SequenceOf[Chunk], records: SequenceOf[TaskRecord]) -> None:
        step_of = {step.name: index for index, step in enumerate(self.steps)}
        for record in records:
            key = chunks[record.chunk].size, step_of[record.name]
            self._seconds[key] = record.end_s - record.start_s


def _segment(position: int, chunk: RunningChunk) -> None:
    chunk.buffers.segments[position]()


def _commit(chunk: RunningChunk) -> None:
    for span in chunk.spans:
        span.sequence.commit(span.tokens)
