"""One chunk through all layers: segment, attention on the shared KV cache, segment, ..."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from edgellm.errors import CancelledError
from edgellm.kernels import rope
from edgellm.kernels.attention import attend
from edgellm.kernels.kv_append import append_rotated
from edgellm.kv_cache import Sequence
from edgellm.segments import ChunkBuffers, ModelHead, Segments

Floats = NDArray[np.float32]


class Model:
    """A flavour ready to run: segments, embedding and head, and a RoPE table for the context."""

    def __init__(
        self, segments: Segments, head: ModelHead, table: rope.RopeTable, *, threads: int
    ) -> None:
        self.segments = segments
        self.config = segments.config
        self.head = head
        self._table = table
        self._threads = threads
        self._blas = ThreadpoolController()

    def forward(
        self,
        tokens: SequenceOf[int],
        sequence: Sequence,
        *,
        chunk: int,
        cancel: threading.Event | None = None,
    ) -> Floats:
        """Run up to `chunk` tokens at the end of `sequence` and count them into it.

        Returns:
            The hidden states after the final norm, `[len(tokens), E]`; overwritten by the next
            call.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
            CancelledError: `cancel` was set; the sequence is as it was.
        """
        sequence.reserve(len(tokens))
        # ONNX Runtime's pool spins between segments; BLAS threads would wait for the same cores
        # (846 against 1,750 tokens/s at pp512 on two cores, with attention in numpy).
        with self._blas.limit(limits=1, user_api="blas"):
            hidden = self._run(tokens, sequence, self.segments.buffers(chunk), cancel)
        sequence.commit(tokens)
        return hidden

    def _run(
        self,
        tokens: SequenceOf[int],
        sequence: Sequence,
        buffers: ChunkBuffers,
        cancel: threading.Event | None,
    ) -> Floats:
        count = len(tokens)
        buffers.x[:count] = self.head.embed(tokens)
        buffers.x[count:] = 0
        buffers.attention[count:] = 0
        for layer in range(self.config.layers):
            if cancel is not None and cancel.is_set():
                raise CancelledError("cancelled between two layers")
            buffers.segments[layer]()
            self._attention(buffers, count, layer, sequence)
        buffers.segments[self.config.layers]()
        return buffers.hidden[:count]

    def _attention(self, buffers: ChunkBuffers, count: int, layer: int, sequence: Sequence) -> None:
        """RoPE, append to the cache, attend; the padding of the chunk takes no part."""
        config, start = self.config, len(sequence)
        q = append_rotated(
            sequence.blocks,
            sequence.table,
            layer,
            start,
            buffers.qkv[:count].reshape(count, -1, config.head_dim),
            self._table,
            threads=self._threads,
        )
        attended = attend(
            sequence.blocks,
            sequence.table,
            layer,
            q,
            start,
            window=config.sliding_window,
            threads=self._threads,
        )
        buffers.attention[:count] = attended.reshape(count, -1)
