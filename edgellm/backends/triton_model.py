"""A model in Triton kernels on a GPU: the twin of `native_model.py`."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence
from edgellm.errors import CancelledError, MemoryEstimateError
from edgellm.kernels.gpu.device import free_bytes
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks
from edgellm.kernels.kv_blocks import BlockTable
from edgellm.kernels.linear import PackedWeights, rows_of
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.sampling import Logits
from edgellm.kernels.step import Weights
from edgellm.kernels.step.gpu import MAX_ROWS, DeviceStep

Floats = NDArray[np.float32]


class TritonModel:
    """Runs tokens through the fused step on the device's side of the KV cache."""

    best_rows: int | None = MAX_ROWS  # for which its launches are captured

    def __init__(
        self, weights: Weights, ropes: SequenceOf[RopeTable], cache: KVCache, *, device: str
    ) -> None:
        """Copy the weights to the device.

        Args:
            ropes: the tables that layers name by their index, for the whole context.

        Raises:
            MemoryEstimateError: they and the cache do not fit there.
        """
        _check_fits(weights, cache, device)
        self._embedding = weights.embedding
        self._step = DeviceStep(weights, ropes, _pools(cache, device), device)

    def forward(
        self,
        tokens: SequenceOf[int],
        sequence: Sequence,
        *,
        logit_rows: int = 0,
        cancel: threading.Event | None = None,
    ) -> tuple[Floats, Floats]:
        """Run tokens at the end of `sequence` and count them into it; see `StepModel.forward`."""
        start, states, logits = len(sequence), [], []
        with sequence.reserved(len(tokens)):
            sequence.use_device()
            tables = _tables(sequence)
            for first in range(0, len(tokens), MAX_ROWS):
                part = tokens[first : first + MAX_ROWS]
                left = len(tokens) - first - len(part)
                result = self._step.run(
                    tables,
                    part,
                    start + first,
                    logit_rows=min(len(part), max(0, logit_rows - left)),
                    should_stop=None if cancel is None else cancel.is_set,
                )
                if result is None:
                    raise CancelledError("cancelled between two layers")
                states.append(result[0])
                logits.append(result[1])
            sequence.commit(tokens)
        return np.concatenate(states), np.concatenate(logits)

    def best(self, token: int, sequence: Sequence) -> Logits | None:
        """See `StepModel.best`."""
        start = len(sequence)
        with sequence.reserved(1):
            sequence.use_device()
            result = self._step.best(_tables(sequence), token, start)
            sequence.commit([token])
        return result

    def embed(self, tokens: SequenceOf[int]) -> Floats:
        """See `ModelHead.embed`."""
        return rows_of(self._embedding, tokens)

    def linear(self, x: Floats, weight: PackedWeights, *, fine: bool = False) -> Floats:
        """See `StepModel.linear`; the weight is copied to the device."""
        return self._step.linear(x, weight)

    def logits(self, hidden: Floats) -> Floats:
        """See `StepModel.logits`."""
        return self._step.logits(hidden)


def _pools(cache: KVCache, device: str) -> list[DeviceBlocks]:
    cache.use_device(device)
    return [group.replica.device for group in cache.groups if group.replica is not None]


def _tables(sequence: Sequence) -> list[BlockTable]:
    return [view.table for view in sequence.views]


def _check_fits(weights: Weights, cache: KVCache, device: str) -> None:
    free = free_bytes(device)
    needed = weights.nbytes + cache.nbytes
    if free is not None and needed > free:
        raise MemoryEstimateError(
            f"the device has {free >> 20} MiB free; weights take {weights.nbytes >> 20} MiB and "
            f"the KV cache {cache.nbytes >> 20} MiB. Choose a smaller `ctx_size`, "
            "`cache_size` or another `kv_format`, or `decode` native"
        )
