"""Chunks through segments of ONNX Runtime and attention in Triton, without leaving the device.

Segments read and write torch tensors; RoPE, append and attention take these tensors. All work is
queued on one CUDA stream: the host waits when a chunk's hidden states are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgellm.backends.chunk import RunningChunk, RunningSpan
from edgellm.backends.forward import Model, clear_behind
from edgellm.backends.host_attention import HostAttention
from edgellm.backends.providers import CPU, CUDA
from edgellm.backends.segments import ModelHead, Run, Segments
from edgellm.backends.thread_pool import onnx_runtime
from edgellm.cache.kv_cache import KVCache
from edgellm.kernels.attention.gpu import Partials, attend
from edgellm.kernels.attention.gpu_tiles import Tiling
from edgellm.kernels.gpu.device import on_device
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks
from edgellm.kernels.kv_append.gpu import DeviceNorms, append_rotated
from edgellm.kernels.step import StepSpan
from edgellm.kernels.step.gpu_inputs import SpanInputs
from edgellm.store.bundle import Bundle

Floats = NDArray[np.float32]


class Queue:
    """The device, and the stream on which segments and kernels are queued.

    The CPU stands in for the device where kernels are interpreted; then there is no stream.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.provider = CPU if device == "cpu" else CUDA
        # ONNX Runtime takes no default stream from its user
        self._stream = None if device == "cpu" else torch.cuda.Stream(device)

    @property
    def settings(self) -> dict[str, str]:
        """Options of the execution provider that put its work on the stream."""
        stream = self._stream
        return {} if stream is None else {"user_compute_stream": str(stream.cuda_stream)}

    @contextmanager
    def current(self) -> Iterator[None]:
        """Yield while launches go to the stream, behind all launches before them.

        At the end, also after an error or a cancellation, all of them have been computed: the
        blocks of their sequences are used next on another stream.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self.done()

    def done(self) -> None:
        """Wait until all queued work has been computed."""
        if self._stream is not None:
            self._stream.synchronize()


class DeviceSegments(Segments):
    """Segments that are bound to device memory."""

    def __init__(
        self,
        bundle: Bundle,
        precision: str,
        *,
        queue: Queue,
        threads: int,
        provider_options: Mapping[str, str],
        allow_fallback: bool = False,
    ) -> None:
        self._device = torch.device(queue.device)
        super().__init__(
            bundle,
            precision,
            provider=queue.provider,
            threads=threads,
            provider_options={**queue.settings, **provider_options},
            allow_fallback=allow_fallback,
        )

    def _zeros(self, chunk: int, width: int) -> torch.Tensor:
        return torch.zeros((chunk, width), dtype=torch.float32, device=self._device)

    def _bound(self, session: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Run:
        ort = onnx_runtime()

        binding = session.io_binding()
        place = self._device.type, self._device.index or 0, np.float32
        for name, tensor in inputs.items():
            binding.bind_input(name, *place, tuple(tensor.shape), tensor.data_ptr())
        for name, tensor in outputs.items():
            binding.bind_output(name, *place, tuple(tensor.shape), tensor.data_ptr())
        options = ort.RunOptions()
        # later work is queued behind a run, so the host need not wait
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")

        def run() -> None:
            session.run_with_iobinding(binding, options)

        return run


class DeviceModel(Model):
    """`Model` on the device's side of the KV cache; chunks run one after the other."""

    def __init__(
        self,
        segments: DeviceSegments,
        head: ModelHead,
        attention: HostAttention,
        *,
        cache: KVCache,
        queue: Queue,
    ) -> None:
        """Copy RoPE tables and norms of `attention` to the device."""
        super().__init__(segments, head, attention, threads=1)
        config, device = self.config, queue.device
        self._queue = queue
        self._places = cache.places
        pools = cache.use_device(device)
        self._ropes = [
            (on_device(table.cos, device), on_device(table.sin, device))
            for table in attention.ropes
        ]
        self._norms = [
            None if norms is None else DeviceNorms.of(norms, config.head_dim, device)
            for norms in attention.norms
        ]
        rows = max(segments.chunk_sizes)
        blocks = next(pool for pool in pools if isinstance(pool, DeviceBlocks))
        self._tiling = Tiling.of(blocks, config.heads)
        self._inputs = SpanInputs(
            pools,
            tilings=[self._tiling],
            rows=rows,
            positions=len(attention.ropes[0].cos),
            vocabulary=config.vocab_size,
            device=device,
        )
        self._q = torch.empty((rows, config.heads, config.head_dim), device=device)
        self._partials = Partials.empty(
            tokens=rows,
            kinds=[(config.heads, config.kv_heads, config.head_dim)],
            device=device,
        )

    def queue(self) -> AbstractContextManager[object]:
        """Return the context in which tasks are launched.

        Times of tasks in `run` are those of launching; `profile` waits for each.
        """
        return self._queue.current()

    def wait(self) -> None:
        self._queue.done()

    def embed(self, chunk: RunningChunk) -> None:
        for span in chunk.spans:
            span.sequence.open(span.start + len(span.tokens))
            span.sequence.use_device()
        self._inputs.set([_step_span(span) for span in chunk.spans])
        buffers, count = chunk.buffers, len(chunk.tokens)
        buffers.x[:count] = torch.from_numpy(self.head.embed(chunk.tokens)).to(self._q.device)
        buffers.x[count:] = 0
        clear_behind(chunk)

    def attend(self, layer: int, chunk: RunningChunk) -> None:
        attention, count = self.config.layers[layer].attention, len(chunk.tokens)
        heads = -1, attention.head_dim
        pool, slot = self._places[layer]
        place = self._inputs.places[pool]
        work = self._inputs.work([len(span.tokens) for span in chunk.spans])[self._tiling]
        cos, sin = self._ropes[attention.rope]
        append_rotated(
            place.blocks,
            place.tables,
            slot,
            work.rows,
            chunk.buffers.qkv[layer][:count].view(count, *heads),
            cos,
            sin,
            self._q[:count],
            norms=self._norms[layer],
        )
        attend(
            place.blocks,
            place.tables,
            slot,
            self._q[:count],
            work,
            chunk.buffers.attention[layer][:count].view(count, *heads),
            self._partials,
            window=attention.window,
            scale=attention.scale,
            softcap=attention.softcap,
        )

    def hidden(self, chunk: RunningChunk) -> Floats:
        self.wait()
        hidden: Floats = chunk.buffers.hidden[: len(chunk.tokens)].cpu().numpy()
        return hidden


def _step_span(span: RunningSpan) -> StepSpan:
    tables = span.sequence.block_tables
    return StepSpan(tables=tables, tokens=span.tokens, start=span.start, logit_rows=0)
