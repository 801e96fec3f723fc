"""Chunks through the layers: segment, attention or another mixer on the cache, segment, ..."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from edgellm.backends.batch import Span, reserved
from edgellm.backends.chunk import Chunk, RunningChunk, RunningSpan, begun
from edgellm.backends.host_attention import HostAttention
from edgellm.backends.schedule import WINDOW, Policy, Processor, Schedule, Step, Task, one_by_one
from edgellm.backends.segments import ChunkBuffers, ModelHead, Segments
from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence
from edgellm.errors import CancelledError
from edgellm.graphs.fields import key_of

if TYPE_CHECKING:
    from edgellm.backends.native import NativeModel

Floats = NDArray[np.float32]
Done = Callable[[Floats], None]


Action = tuple[Step, Callable[[RunningChunk], None]]


class Model:
    """A precision ready to run: segments, embedding, LM head, and attention between segments."""

    def __init__(
        self,
        segments: Segments,
        head: ModelHead,
        attention: HostAttention,
        *,
        threads: int,
        host: NativeModel | None = None,
    ) -> None:
        """Take over the parts; `attention` has RoPE tables for the whole context.

        Args:
            host: C++ kernels for the experts and mixers with states of a model that has some.
        """
        self._host = host
        self.segments = segments
        self.config = segments.config
        self.head = head
        self._attention = attention
        self._threads = threads
        self._blas = ThreadpoolController()
        self._actions = self._program()
        self.steps = [step for step, _ in self._actions]
        self._readers = self._reading_steps()
        self._seconds: dict[tuple[int, str], float] = {}  # latest, by chunk size and step

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
            CancelledError: `should_stop` returned true; the sequence is as it was.
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

        Spans of one sequence in consecutive chunks follow each other in the sequence. All chunks go
        through the same layers; with a group of layers (see `Span`), `serial` takes several chunks
        through a segment before it takes them through the next segment.

        Args:
            on_done: called with each chunk's hidden states `[n, E]`, in the order of the chunks,
                once its tokens are counted into their sequences; overwritten after it returns.
                After a group with more layers behind it, called with the rows that rest (see
                `_resting`); their tokens are not counted.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
            CancelledError: `should_stop` returned true; sequences hold the finished chunks.
        """
        jobs = begun(
            chunks, lambda index: self.segments.buffers(chunks[index].size, slot=index % WINDOW)
        )
        layers = _layers_of(chunks)
        actions = self._actions if layers is None else self._through(layers)
        steps = [step for step, _ in actions]
        whole = layers is not None or not self._readers
        asked = [whole or chunk.asked for chunk in chunks]

        def left(task: Task) -> bool:
            """Whether a chunk leaves before a step, as no step behind it is asked for."""
            return not asked[task.chunk] and task.step in self._readers

        def act(task: Task) -> None:
            job = jobs[task.chunk]
            if not left(task):
                actions[task.step][1](job)
            if on_done is not None and task.step == len(steps) - 1:
                on_done(self._leaving(job, layers) if asked[task.chunk] else self._zeros(job))

        # ONNX Runtime's pool spins between segments; BLAS threads would wait for the same cores
        # (846 against 1,750 tokens/s at pp512 on two cores, with attention in numpy).
        with (
            self.queue(),
            self._blas.limit(limits=1, user_api="blas"),
            reserved([span for chunk in chunks for span in chunk.spans], windowed=False),
        ):
            records = execute(
                steps,
                len(jobs),
                act,
                policy=policy,
                seconds=lambda task: self._seconds.get(
                    (chunks[task.chunk].size, steps[task.step].name), 0.0
                ),
                # weights stay in caches: 512 rows of SmolLM2-135M take 2 to 6 % less on the CPU
                together=1 if layers is None else WINDOW,
                should_stop=should_stop,
            )
        readers = {self.steps[step].name for step in self._readers}
        records = [each for each in records if asked[each.chunk] or each.name not in readers]
        for record in records:
            size = chunks[record.chunk].size
            self._seconds[size, record.name] = record.end_s - record.start_s
        return records

    def profile(
        self, tokens: SequenceOf[int], sequence: Sequence, *, size: int, start: int
    ) -> list[float]:
        """Return the seconds of each step of a chunk that comes after `start` tokens.

        The tokens before the chunk need not be computed: attention reads zeros in their place.

        Args:
            sequence: an empty sequence, which is empty afterwards as well.
        """
        span = RunningSpan(sequence, tokens, start, slice(0, len(tokens)))
        chunk = RunningChunk([span], self.segments.buffers(size))

        def act(task: Task) -> None:
            self._actions[task.step][1](chunk)
            self.wait()

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

    def _program(self) -> list[Action]:
        """Return the steps of a chunk, each with the function that performs it."""
        actions: list[Action] = []
        actions.append((Step("embedding", "host"), self.embed))
        for position, part in enumerate(self.segments.parts):
            layer = part.index - 1
            if part.half == "down":
                shadow = partial(self._shadow, part.index, position % 2)
                actions.append((Step(f"shadow {layer}", "host"), shadow))
            elif part.half == "behind":
                experts = partial(self._add_experts, layer)
                actions.append((Step(f"experts {layer}", "host"), experts))
            elif part.index:
                mix = partial(self.attend, layer)
                actions.append((Step(self._mixer_at(layer), "host", ordered=True), mix))
            name = f"segment {part.index}{part.half and f' {part.half}'}"
            actions.append((Step(name, "accelerator"), partial(_segment, position)))
        actions.append((Step("commit", "host", ordered=True), _commit))
        return actions

    def _reading_steps(self) -> range:
        """Return the steps behind the last layer with K and V or a state of its own, where others
        come behind it: later rows need nothing of them."""
        attentions = self.config.attentions
        shared = [i for i, each in attentions.items() if each.kv_from is not None]
        own = sorted({*range(self.config.layer_count)} - {*shared})
        if own[-1] + 1 == self.config.layer_count:
            return range(0)
        first = [step.name for step in self.steps].index(self._mixer_at(own[-1])) + 1
        return range(first, len(self.steps) - 1)

    def _through(self, layers: range) -> list[Action]:
        """Return the steps of a chunk through a group of layers.

        Groups are cut just before the mixer of a layer, where rows rest.
        """
        names = [step.name for step, _ in self._actions]
        actions = self._actions
        if layers.stop < self.config.layer_count:
            actions = actions[: names.index(self._mixer_at(layers.stop))]
            actions.append((Step("rest", "host", ordered=True), _rest))  # chunk by chunk
        if layers.start:
            actions = actions[names.index(self._mixer_at(layers.start)) :]
            actions.insert(0, (Step("enter", "host"), partial(self._enter, layers.start)))
        return actions

    def _mixer_at(self, layer: int) -> str:
        """Return the name of the step between two segments."""
        here = self.config.layers[layer]
        mixers = [here.mixer] if here.beside is None else [here.mixer, here.beside]
        return f"{'+'.join(key_of(type(mixer)) for mixer in mixers)} {layer}"

    def queue(self) -> AbstractContextManager[object]:
        """Return a context for launches on a device; it does nothing on the host."""
        return nullcontext()

    def wait(self) -> None:
        """Wait until a device has computed what was launched; there is nothing on the host."""

    def embed(self, chunk: RunningChunk) -> None:
        """Perform the first step of a chunk: make room in the cache and read embedding rows."""
        _open(chunk)
        buffers, count = chunk.buffers, len(chunk.tokens)
        buffers.x[:count] = self.head.embed(chunk.tokens)
        buffers.x[count:] = 0
        if self.config.layer_embedding is not None:
            assert self._host is not None
            buffers.layer_rows[:count] = self._host.layer_rows(chunk.tokens)
            buffers.layer_rows[count:] = 0
        clear_behind(chunk)

    def _enter(self, layer: int, chunk: RunningChunk) -> None:
        """Perform the first step of a chunk whose rows rested before the attention of `layer`."""
        _open(chunk)
        buffers, count = chunk.buffers, len(chunk.tokens)
        resting = self._resting(layer, buffers)
        ends = np.cumsum([array.shape[1] for array in resting])[:-1]
        for span in chunk.spans:
            assert span.entering is not None
            for array, rows in zip(resting, np.split(span.entering, ends, axis=1), strict=True):
                array[span.rows] = rows
        resting[0][count:] = 0
        clear_behind(chunk)

    def _leaving(self, chunk: RunningChunk, layers: range | None) -> Floats:
        """Return a chunk's hidden states, or its rows that rest before the attention of a layer."""
        if layers is None or layers.stop == self.config.layer_count:
            return self.hidden(chunk)
        resting = self._resting(layers.stop, chunk.buffers)
        return np.concatenate([array[: len(chunk.tokens)] for array in resting], axis=1)

    def _resting(self, layer: int, buffers: ChunkBuffers) -> list[Floats]:
        """Return what graphs behind the mixer of a layer need of those before: the residual first,
        then Q, K and V, and embeddings for the layers from there on."""
        residual = sum(part.index <= layer for part in self.segments.parts) % 2
        embedded = [] if self.config.layer_embedding is None else buffers.embedded[layer:]
        return [buffers.residuals[residual], buffers.qkv[layer], *embedded]

    def attend(self, layer: int, chunk: RunningChunk) -> None:
        """Apply RoPE, append to the cache and attend, or take rows through a mixer with states.

        The padding of the chunk takes no part.
        """
        here = self.config.layers[layer]
        # of a mixer beside attention the columns behind those of attention
        given, mixed = (here.attention.inputs, here.attention.outputs) if here.attends else (0, 0)
        for span in chunk.spans:
            rows, sequence = chunk.buffers.qkv[layer][span.rows], span.sequence
            out = chunk.buffers.attention[layer][span.rows]
            if here.attends:
                out[:, :mixed] = self._attention(
                    layer,
                    *sequence.view(layer),
                    span.start,
                    rows[:, :given],
                    threads=self._threads,
                )
            if here.state_mixer is not None:
                assert self._host is not None
                states = sequence.states_of(layer, span.start, span.start + len(span.tokens))
                out[:, mixed:] = self._host.mix(
                    layer, rows[:, given:], states, threads=self._threads
                )

    def _shadow(self, segment: int, residual: int, chunk: RunningChunk) -> None:
        """Add the product of the inputs that down_proj's grid clips to down_proj's residual."""
        # span by span: a product takes every input that any of its rows needs
        for span in chunk.spans:
            activated = chunk.buffers.activated[segment - 1][span.rows]
            correction = self.segments.shadows[segment].correction(activated)
            if correction is not None:
                chunk.buffers.residuals[residual][span.rows] += correction

    def _add_experts(self, layer: int, chunk: RunningChunk) -> None:
        """Take rows through the experts that the router chooses for each; padding takes no part."""
        assert self._host is not None
        buffers, count = chunk.buffers, len(chunk.tokens)
        rows = buffers.normed[:count]
        buffers.experts[:count] = self._host.experts(layer, rows, threads=self._threads)
        buffers.experts[count:] = 0

    def _zeros(self, chunk: RunningChunk) -> Floats:
        """Return hidden states that are not asked for."""
        return np.zeros((len(chunk.tokens), self.config.hidden_size), np.float32)

    def hidden(self, chunk: RunningChunk) -> Floats:
        hidden: Floats = chunk.buffers.hidden[: len(chunk.tokens)]
        return hidden


def clear_behind(chunk: RunningChunk) -> None:
    """Write zeros where padding reads the attention."""
    arrays = {id(array): array for array in chunk.buffers.attention}
    for array in arrays.values():
        array[len(chunk.tokens) :] = 0


def _layers_of(chunks: SequenceOf[Chunk]) -> range | None:
    """Return the layers that all chunks go through; None: all layers."""
    groups = [span.group for chunk in chunks for span in chunk.spans]
    (layers,) = {None if group is None else group.layers for group in groups} or {None}
    return layers


def _open(chunk: RunningChunk) -> None:
    for span in chunk.spans:
        span.sequence.open(span.start + len(span.tokens))
        span.sequence.use_host()


def _segment(position: int, chunk: RunningChunk) -> None:
    chunk.buffers.segments[position]()


def _rest(_: RunningChunk) -> None:
    """Do nothing: `Model.run` takes the rows that rest from the buffers behind this step."""


def _commit(chunk: RunningChunk) -> None:
    for span in chunk.spans:
        span.sequence.commit(span.tokens)


Run = Callable[[Task], None]


def execute(
    steps: SequenceOf[Step],
    chunks: int,
    run: Run,
    *,
    policy: Policy,
    seconds: Callable[[Task], float],
    together: int = 1,
    should_stop: Callable[[], bool] | None = None,
) -> list[TaskRecord]:
    """Run every task; return their records in the order in which the tasks ended.

    The calling thread is the host, and another thread waits for the accelerator; `serial` needs no
    second thread. Results do not depend on the policy.

    Args:
        together: chunks that `serial` takes through a step together, see `one_by_one`.

    Raises:
        CancelledError: `should_stop` returned true; no task is still running.
        BaseException: an error of `run`; raised once the other processor is idle.
    """
    records: list[TaskRecord] = []

    def perform(task: Task) -> None:
        if should_stop is not None and should_stop():
            raise CancelledError("cancelled between two layers")
        start = time.perf_counter()
        run(task)
        end, step = time.perf_counter(), steps[task.step]
        records.append(TaskRecord(step.name, task.chunk, step.processor, start, end))

    if policy == "serial":
        for task in one_by_one(len(steps), chunks, together=together):
            perform(task)
    elif chunks:
        _Shared(perform, Schedule(steps, chunks, policy=policy, seconds=seconds)).run()
    return records


class _Shared:
    """A schedule that two threads work on."""

    def __init__(self, perform: Run, schedule: Schedule) -> None:
        self._perform = perform
        self._schedule = schedule
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Work as the host, beside a thread for the accelerator, until both are idle."""
        accelerator = threading.Thread(target=self._work, args=("accelerator",))
        accelerator.start()
        self._work("host")
        accelerator.join()  # its task uses buffers that the caller will use again
        if self._error is not None:
            raise self._error

    def _work(self, processor: Processor) -> None:
        """Perform the tasks of one processor until all are done or one has failed."""
        try:
            while (task := self._wait_for_task(processor)) is not None:
                self._perform(task)
                with self._changed:
                    self._schedule.finish(task)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _wait_for_task(self, processor: Processor) -> Task | None:
        with self._changed:
            while self._error is None and not self._schedule.finished:
                task = self._schedule.take(processor)
                if task is not None:
                    return task
                self._changed.wait()
            return None
