"""The fused step in Triton: embedding to logits for rows of sequences; `gpu_layer.py` has a layer.

CUDA graphs capture the launches of a decode step of some sequences, and of a whole chunk of one
sequence. Tokens, positions and block tables stand in device memory, so one capture serves every
step. The best next tokens can be selected on the device, too.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from edgellm.kernels.altup.gpu import DeviceStreams
from edgellm.kernels.checks import check_rope
from edgellm.kernels.gpu.device import on_device
from edgellm.kernels.gpu.kv_blocks import DevicePool
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.linear.gpu import DevicePackedWeights, Peaks, embed, linear
from edgellm.kernels.linear.packed import PackedWeights
from edgellm.kernels.lora import AdapterWeights
from edgellm.kernels.lora.gpu import MAX_RANK, Added, StepAdapters
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.sampling import Logits
from edgellm.kernels.sampling.gpu import LogitRows
from edgellm.kernels.state_blocks import StateBlocks, StateView
from edgellm.kernels.step.checks import check_adapter, check_pools, check_weights
from edgellm.kernels.step.gpu_buffers import Buffers
from edgellm.kernels.step.gpu_inputs import SpanInputs
from edgellm.kernels.step.gpu_layer import DeviceLayer, DeviceRope
from edgellm.kernels.step.gpu_layer_input import LayerEmbeddings
from edgellm.kernels.step.gpu_norm import DeviceNorm, normalize
from edgellm.kernels.step.span import StepSpan
from edgellm.kernels.step.weights import Weights

Floats = NDArray[np.float32]
# Held while a graph is captured, of which torch has one at a time in a process.
_CAPTURE = threading.Lock()
# Largest number of tokens in one call, which the buffers are made for.
MAX_ROWS = 512
# Largest number of sequences in a captured decode step.
DECODE_ROWS = 32
# Linear layers of attention over latents that adapters do not change here.
_OF_LATENTS = {"q", "k", "v", "query_down", "key_up", "value_up"}
# Numbers of sequences whose steps are captured before the first answer.
WARM_ROWS = (1, 2, 4, 8, 16, 32)


class Captured:
    """Function that queues work on a device, captured as a CUDA graph in its first call.

    The function must always do the same with the same memory, and read all differences from that
    memory. Without a device, where kernels are interpreted, it is called every time.
    """

    def __init__(self, launch: Callable[[], None], device: str) -> None:
        self._launch = launch
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        self._launch()  # compiles the kernels, which must not happen in a capture
        if self._device == "cpu":
            return
        graph = torch.cuda.CUDAGraph()
        # torch captures one graph at a time; other threads may go on and allocate memory. Ctrl-C is
        # raised in the main thread only, which captures nothing once a model is loaded
        with _CAPTURE:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch()
        self._graph = graph


class DeviceStep:
    """Model in device memory for fused steps on the blocks of its pools."""

    def __init__(
        self,
        weights: Weights,
        rope_tables: Sequence[RopeTable],
        pools: Sequence[DevicePool],
        device: str,
    ) -> None:
        """Copy the weights to the device.

        Args:
            rope_tables: RoPE tables, which `LayerWeights.rope` indexes.
            pools: pools, which `LayerWeights.pool` indexes.

        Raises:
            ValueError: a part does not fit the others.
        """
        check_weights(weights, ropes=len(rope_tables))
        check_pools(weights, [pool.host for pool in pools])
        attending = [layer for layer in weights.layers if layer.mixer is None]
        if not attending:
            raise ValueError("no layer attends; needed is one or more")
        for layer in attending:
            check_rope(rope_tables[layer.rope], layer.head_dim, 0)
        self._weights = weights
        self._pools = [pool.host for pool in pools]
        self._device = device
        ropes = [DeviceRope.of(table, device) for table in rope_tables]
        self._embeddings = LayerEmbeddings.of(weights, rows=MAX_ROWS, device=device)
        self._streams = DeviceStreams.of(weights.streams, device)
        self._layers = [
            DeviceLayer.of(weights, index, ropes, pools, self._embeddings, device)
            for index in range(len(weights.layers))
        ]
        self._final_norm = DeviceNorm.of(weights.final_norm, weights.final_norm_bias, device)
        self._embedding = DevicePackedWeights.of(weights.embedding, device)
        tied = weights.head is weights.embedding
        self._head = self._embedding if tied else DevicePackedWeights.of(weights.head, device)
        tilings = {layer.tiling: None for layer in self._layers if layer.tiling is not None}
        positions = self._positions = min(len(table.cos) for table in rope_tables)

        def inputs(rows: int) -> SpanInputs:
            return SpanInputs(
                pools,
                tilings=tilings,
                rows=rows,
                positions=positions,
                vocabulary=weights.embedding.outputs,
                device=device,
            )

        # decode has inputs of its own, which are small and nearly the same from step to step
        self._inputs, self._decode_inputs = inputs(MAX_ROWS), inputs(DECODE_ROWS)
        self._buffers = Buffers.empty(weights.layers, rows=MAX_ROWS, device=device)
        self._logits = LogitRows.empty(DECODE_ROWS, weights.head.outputs, device)
        changed = [each for layer in self._layers for each in layer.readers]
        self._adapters = StepAdapters(changed, rows=MAX_ROWS, device=device)
        # layers behind the last one with K and V of its own read those of others: rows whose
        # results are not asked for need not enter them; a state is a result as well
        own = [n for n, layer in enumerate(weights.layers) if layer.kv_from is None]
        hybrid = any(isinstance(pool, StateBlocks) for pool in self._pools)
        self._readers = len(weights.layers) if hybrid else own[-1] + 1
        # by tiles of adapters, and by the layer where rows leave or by number of rows
        self._chunk: dict[tuple[int, int], Captured] = {}
        self._decode: dict[tuple[int, int], Captured] = {}
        self._pack: dict[int, Captured] = {}  # by number of rows

    def warm_up(self) -> None:
        """Compile the kernels, and capture a chunk and steps of the usual numbers of sequences.

        An answer would wait for that, for up to 25 seconds. The first blocks of the pools are
        overwritten.
        """
        if self._device == "cpu":
            return
        counts = [pool.count for pool in self._pools if not isinstance(pool, StateBlocks)]
        reach = min(MAX_ROWS, self._positions, min(counts) * BLOCK)

        def first(rows: int) -> StepSpan:
            states = [
                StateView(pool, None, ((rows, 0),)) if isinstance(pool, StateBlocks) else None
                for pool in self._pools
            ]
            tables = [list(range(-(-reach // BLOCK)))] * len(states)
            tokens = [0] * rows
            return StepSpan(tables=tables, tokens=tokens, start=0, logit_rows=1, states=states)

        for rows in WARM_ROWS:
            if rows <= MAX_ROWS:
                self.best([first(1)] * rows)
        self.run([first(reach)], all_states=False)

    def run(
        self,
        spans: Sequence[StepSpan],
        *,
        all_states: bool = True,
        should_stop: Callable[[], bool] | None = None,
    ) -> tuple[Floats, Floats] | None:
        """Write K and V of the tokens of each span, and compute their hidden states and logits.

        Args:
            spans: spans of different sequences, or spans that do not see each other's new tokens;
                up to `MAX_ROWS` tokens in all.
            all_states: whether all hidden states are asked for; else those of rows without logits
                may be zeros, and they leave before the last layers that read K and V of others.
            should_stop: called before each layer; once in a chunk of `MAX_ROWS` tokens of one
                sequence, and never in a decode step of up to `DECODE_ROWS` sequences.

        Returns:
            Hidden states after the final norm `[tokens, E]` and logits `[logit_rows, V]`, span
            after span; None: it was stopped.

        Raises:
            ValueError: a token, block or position does not exist, or there are too many tokens.
        """
        counts = [len(span.tokens) for span in spans]
        if self.takes_best(spans):
            self._next(spans)
            logits = self._logits.logits[: len(spans)]
            return _host(self._buffers.states[: len(spans)]), _host(logits)
        self._set(self._inputs, spans)
        tiles = self._set_adapters(spans)
        buffers = self._buffers.of(sum(counts), self._added(tiles))
        asked = [span.logit_rows for span in spans]
        leave = not all_states and asked != counts and self._readers < len(self._layers)
        end = self._readers if leave else len(self._layers)
        if counts == [MAX_ROWS]:
            if should_stop is not None and should_stop():
                return None
            key = tiles, end
            if key not in self._chunk:
                self._chunk[key] = Captured(partial(self._launch_chunk, *key), self._device)
            self._chunk[key]()
        elif not self._through_layers(self._inputs, counts, buffers, should_stop, range(end)):
            return None
        rows = [
            row
            for last, n in zip(itertools.accumulate(counts), asked, strict=True)
            for row in range(last - n, last)
        ]
        if leave:
            return self._rest(spans, rows, buffers, should_stop)
        states = buffers.states[rows]
        return _host(buffers.states), self._logits_of(states)

    def _rest(
        self,
        spans: Sequence[StepSpan],
        rows: Sequence[int],
        buffers: Buffers,
        should_stop: Callable[[], bool] | None,
    ) -> tuple[Floats, Floats] | None:
        """Take the last rows of spans through the layers behind those that all went through.

        Args:
            rows: their places among all rows.
        """
        hidden = np.zeros(buffers.x.shape, np.float32)
        last = [span.last_rows(span.logit_rows) for span in spans if span.logit_rows]
        if not last:
            return hidden, self._logits_of(buffers.states[:0])
        counts = [span.logit_rows for span in last]
        self._inputs.set(last)
        added = self._added(self._set_adapters(last))
        index = torch.tensor(rows, device=self._device)
        buffers.keep(index)
        if self._embeddings is not None:
            self._embeddings.keep(index)
        few, layers = self._buffers.of(len(rows), added), range(self._readers, len(self._layers))
        if not self._through_layers(self._inputs, counts, few, should_stop, layers):
            return None
        hidden[rows] = _host(few.states)
        return hidden, self._logits_of(few.states)

    def _logits_of(self, states: torch.Tensor) -> Floats:
        logits = torch.empty((len(states), self._head.outputs), device=self._device)
        if len(states):
            self._head_into(states, logits)
        return _host(logits)

    def best(self, spans: Sequence[StepSpan]) -> list[Logits]:
        """Run one token of each span as `run` does, and copy only the best logits to the host.

        Raises:
            ValueError: as in `run`, or a span has several tokens or no row of logits, or there are
                more than `DECODE_ROWS` spans.
        """
        if not self.takes_best(spans):
            counts = [(len(span.tokens), span.logit_rows) for span in spans]
            raise ValueError(
                f"{len(spans)} spans with tokens and rows of logits {counts}; the best are found "
                f"for one token and row each of 1 to {DECODE_ROWS} spans"
            )
        self._next(spans)
        rows = len(spans)
        logits = self._logits.of(rows)
        if rows not in self._pack:
            self._pack[rows] = Captured(logits.pack, self._device)
        self._pack[rows]()
        return logits.best()

    def takes_best(self, spans: Sequence[StepSpan]) -> bool:
        """Whether the spans are next tokens, and no more than a captured step takes."""
        each = all(len(span.tokens) == 1 == span.logit_rows for span in spans)
        return each and 1 <= len(spans) <= min(DECODE_ROWS, MAX_ROWS)

    def logits(self, hidden: Floats) -> Floats:
        """Apply the LM head to states `[rows, E]`: `[rows, V]`."""
        firsts = range(0, len(hidden), MAX_ROWS)
        parts = (on_device(hidden[first : first + MAX_ROWS], self._device) for first in firsts)
        return np.concatenate([self._logits_of(states) for states in parts])

    def linear(self, x: Floats, weight: PackedWeights, *, fine: bool = False) -> Floats:
        """Multiply rows `[M, K]` by a weight, copied to the device for this call: `[M, N]`.

        Args:
            fine: see `linear` of `linear/gpu.py`.
        """
        rows = on_device(x, self._device)
        out = torch.empty((len(x), weight.outputs), device=self._device)
        panels = DevicePackedWeights.of(weight, self._device)
        linear(rows, panels, out, self._buffers.rows, fine=fine)
        return _host(out)

    def _set(self, inputs: SpanInputs, spans: Sequence[StepSpan]) -> None:
        """Copy spans to the device, and what tokens have for each layer."""
        inputs.set(spans)
        if self._embeddings is not None:
            self._embeddings.set([token for span in spans for token in span.tokens])

    def _next(self, spans: Sequence[StepSpan]) -> None:
        """Run one token of each span by a captured graph; states and logits stay on the device."""
        rows = len(spans)
        self._set(self._decode_inputs, spans)
        # as many tiles as rows, some of them without rows, so that one graph takes all adapters
        key = rows if self._set_adapters(spans) else 0, rows
        if key not in self._decode:
            self._decode[key] = Captured(partial(self._launch_next, *key), self._device)
        self._decode[key]()

    def _launch_next(self, tiles: int, rows: int) -> None:
        buffers = self._buffers.of(rows, self._added(tiles))
        every = range(len(self._layers))
        self._through_layers(self._decode_inputs, [1] * rows, buffers, None, every)
        logits = self._logits.of(rows)
        self._head_into(buffers.states, logits.logits, peaks=logits.peaks)

    def _launch_chunk(self, tiles: int, end: int) -> None:
        buffers = self._buffers.of(MAX_ROWS, self._added(tiles))
        self._through_layers(self._inputs, [MAX_ROWS], buffers, None, range(end))

    def load_adapter(self, adapter: AdapterWeights) -> None:
        """Copy an adapter to the device, where it stays as long as there is the adapter.

        Raises:
            ValueError: it is for another model, or changes what Triton kernels do not change.
        """
        if adapter in self._adapters:
            return
        check_adapter(adapter, self._weights)
        if adapter.rank > MAX_RANK:
            raise ValueError(f"an adapter of rank {adapter.rank}; there is room for {MAX_RANK}")
        for index, changes in enumerate(adapter.layers):
            latent = self._weights.layers[index].latent is not None
            others = changes.keys() & _OF_LATENTS if latent else ()
            if others:
                raise ValueError(
                    f"the adapter changes layers.{index}.{min(others)}, which reads latents"
                )
        self._adapters.load(adapter)

    def _set_adapters(self, spans: Sequence[StepSpan]) -> int:
        """Copy what says which rows have which adapter; return the tiles, 0: no row has one."""
        if all(span.adapter is None for span in spans):
            return 0
        for span in spans:
            if span.adapter is not None:
                self.load_adapter(span.adapter)
        parts = (
            ((None, span.adapter_start), (span.adapter, len(span.tokens) - span.adapter_start))
            for span in spans
        )
        return self._adapters.set([run for both in parts for run in both])

    def _added(self, tiles: int) -> Added | None:
        return self._adapters.of(tiles) if tiles else None

    def _through_layers(
        self,
        inputs: SpanInputs,
        counts: Sequence[int],
        buffers: Buffers,
        should_stop: Callable[[], bool] | None,
        layers: range,
    ) -> bool:
        """Take spans with `counts` tokens through layers; False: it was stopped on the way."""
        weights, work = self._weights, inputs.work(counts)
        sizes = len(counts), sum(counts)
        states = {number: rows.of(*sizes) for number, rows in inputs.states.items()}
        if layers.start == 0:
            embed(self._embedding, inputs.tokens, buffers.x, scale=weights.embedding_scale)
            if self._embeddings is not None:
                self._embeddings.enter(buffers.x, buffers.rows)
            if self._streams is not None:
                self._streams.enter(buffers.x, buffers.streams, buffers.rows)
        ready, here = False, self._layers[layers.start : layers.stop]
        for layer, after in zip(here, [*here[1:], None], strict=True):
            if should_stop is not None and should_stop():
                return False
            ready = layer.run(buffers, inputs.places, states, work, ready=ready, after=after)
        if layers.stop < len(self._layers):
            return True
        if self._streams is not None:
            self._streams.leave(buffers.streams, buffers.x, buffers.rows)
        normalize(buffers.x, self._final_norm, buffers.states, epsilon=weights.epsilon)
        return True

    def _head_into(
        self, states: torch.Tensor, logits: torch.Tensor, *, peaks: Peaks | None = None
    ) -> None:
        """Apply the LM head to states `[rows, E]`, into `logits` `[rows, V]`; see `linear`."""
        cap = self._weights.logit_softcap
        linear(states, self._head, logits, self._buffers.rows, softcap=cap, fine=True, peaks=peaks)


def _host(tensor: torch.Tensor) -> Floats:
    """Copy a tensor to a new array on the host, even if the device is the host."""
    copy: Floats = tensor.to("cpu", copy=True).numpy()
    return copy
