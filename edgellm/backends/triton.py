"""The Triton back end: packed weights in kernels on a GPU, the twin of the native back end.

The back end needs torch, triton and a device that they find, with room for weights and KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Rows, Span, StepBackend, cut, reserved, step_span
from edgellm.backends.packed_weights import open_packed_weights
from edgellm.backends.registry import TRITON
from edgellm.backends.selection import Parts
from edgellm.cache.kv_cache import KVCache
from edgellm.errors import CancelledError, MemoryEstimateError, UnsupportedModelError
from edgellm.kernels.gpu import device as gpu_device
from edgellm.kernels.linear import PackedWeights, rows_of
from edgellm.kernels.lora import AdapterWeights
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.step import StepSpan, Weights
from edgellm.store.manifest import forget_pages

Floats = NDArray[np.float32]


class TritonModel(StepBackend):
    """A model whose tokens go through the fused step on the device's side of the KV cache."""

    name = TRITON
    exact_rows = False  # tiles depend on the number of rows

    def __init__(
        self, weights: Weights, ropes: SequenceOf[RopeTable], cache: KVCache, *, device: str
    ) -> None:
        """Copy the weights to the device.

        Args:
            ropes: RoPE tables that layers name by their index, for the whole context.

        Raises:
            MemoryEstimateError: weights and KV cache do not fit on the device.
        """
        _check_fits(weights, cache, device)
        self._embedding, self._device = weights.embedding, device
        from edgellm.kernels.step.gpu import MAX_ROWS, DeviceStep  # imports torch and triton

        self.best_rows = self._most = MAX_ROWS  # launches of so many rows are captured
        self._step = DeviceStep(weights, ropes, cache.use_device(device), device)
        self._step.warm_up()

    def _run(self, spans: SequenceOf[Span], should_stop: Callable[[], bool] | None) -> list[Rows]:
        with reserved(spans):
            for span in spans:
                span.sequence.use_device()
            results = self._candidates(spans)
            if results is None:
                results = self._rows(spans, should_stop)
            for span in spans:
                span.sequence.commit(span.tokens)
        return results

    def _rows(self, spans: SequenceOf[Span], should_stop: Callable[[], bool] | None) -> list[Rows]:
        states, logits, every = [], [], any(span.all_states for span in spans)
        for call in _calls(spans, self._most):
            result = self._step.run(call, all_states=every, should_stop=should_stop)
            if result is None:
                raise CancelledError("cancelled between two layers")
            states.append(result[0])
            logits.append(result[1])
        return cut(spans, _joined(states), _joined(logits))

    def _candidates(self, spans: SequenceOf[Span]) -> list[Rows] | None:
        """Return only the best logits of next tokens; None: more is wanted."""
        calls = [step_span(span) for span in spans]
        if not (all(span.candidates for span in spans) and self._step.takes_best(calls)):
            return None
        nothing = np.empty((1, 0), np.float32)
        return [Rows(nothing, [best]) for best in self._step.best(calls)]

    def embed(self, tokens: SequenceOf[int]) -> Floats:
        return rows_of(self._embedding, tokens)

    def load_adapter(self, adapter: AdapterWeights) -> None:
        """See `StepBackend.load_adapter`; it is copied to the device."""
        reason = gpu_device.too_large(self._device, {"for the adapter": adapter.nbytes})
        if reason is not None:
            raise MemoryEstimateError(
                f"triton: {reason}. Unload another adapter, or take a smaller `cache_size`"
            )
        try:
            self._step.load_adapter(adapter)
        except ValueError as error:
            raise UnsupportedModelError(
                f"triton: {error}; load the model with `prefill` and `decode` native"
            ) from None

    def linear(self, x: Floats, weight: PackedWeights, *, fine: bool = False) -> Floats:
        """See `StepBackend.linear`; the weight is copied to the device."""
        return self._step.linear(x, weight, fine=fine)

    def logits(self, hidden: Floats) -> Floats:
        return self._step.logits(hidden)


def _calls(spans: SequenceOf[Span], most: int) -> Iterator[list[StepSpan]]:
    """Iterate calls of at most `most` rows, with spans cut where a call is full."""
    call: list[StepSpan] = []
    room = most
    for span in spans:
        whole, first = step_span(span), 0
        while first < len(span.tokens):
            part = span.tokens[first : first + room]
            left = len(span.tokens) - first - len(part)
            rows = min(len(part), max(0, span.logit_rows - left))
            start = whole.start + first
            states = span.sequence.states(start, start + len(part))
            each = replace(whole, tokens=part, start=start, logit_rows=rows, states=states)
            plain = min(max(whole.adapter_start - first, 0), len(part))
            call.append(replace(each, adapter_start=plain))
            first, room = first + len(part), room - len(part)
            if room == 0:
                yield call
                call, room = [], most
    if call:
        yield call


def _joined(parts: SequenceOf[Floats]) -> Floats:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_fits(weights: Weights, cache: KVCache, device: str) -> None:
    reason = gpu_device.too_large(
        device, {"for weights": weights.nbytes, "for the KV cache": cache.nbytes}
    )
    if reason is not None:
        raise MemoryEstimateError(
            f"triton: {reason}. Choose a smaller `ctx_size`, `cache_size` or another `kv_format`, "
            "or `decode` and `prefill` native"
        )


def open_model(parts: Parts) -> TritonModel:
    """Open the model; see `TritonModel`."""
    weights = open_packed_weights(parts.bundle, [group.group for group in parts.cache.groups])
    model = TritonModel(weights, parts.ropes, parts.cache, device=gpu_device.require())
    forget_pages(weights.embedding.data)  # the file that all were copied from
    return model
