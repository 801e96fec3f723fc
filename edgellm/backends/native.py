"""The native back end: packed weights in C++ kernels, through all layers in one call.

The back end needs the extension that is compiled when edgellm is installed, and a model whose heads
fit into the registers and panels of the kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Rows, Span, StepBackend, cut, reserved, softcapped, step_span
from edgellm.backends.packed_weights import open_packed_weights
from edgellm.backends.registry import NATIVE
from edgellm.backends.selection import Parts
from edgellm.cache.groups import Blocks
from edgellm.errors import CancelledError, UnsupportedModelError
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.kv_blocks import DENSE_POSITIONS, first_dense
from edgellm.kernels.linear import PANEL, PackedWeights, rows_of
from edgellm.kernels.linear.native import linear
from edgellm.kernels.lora import AdapterWeights
from edgellm.kernels.native import MAX_HEAD_DIM, library
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.sealed_blocks import first_choosing
from edgellm.kernels.state_blocks import StateRows
from edgellm.kernels.step import FusedStep, LayerGroup, StepSpan, Weights
from edgellm.kernels.step.checks import check_adapter
from edgellm.kernels.step.native_mixers import MIXERS

Floats = NDArray[np.float32]


def open_model(parts: Parts) -> NativeModel:
    """Open the model.

    Raises:
        UnsupportedModelError: the kernels do not take the model's sizes.
    """
    compiled = library()
    assert compiled is not None
    _check_sizes(parts.bundle.config)
    mass = parts.options.prefill_mass
    if mass is not None and any(each.latent for each in parts.bundle.config.attentions.values()):
        raise UnsupportedModelError(
            f"`prefill_mass` is {mass}, and the model has latents in place of K and V, whose "
            "blocks do not tell their share of the attention; leave it out"
        )
    weights = open_packed_weights(parts.bundle, [group.group for group in parts.cache.groups])
    pools = [group.blocks for group in parts.cache.groups]
    selection = parts.selection
    # with two devices, where the CPU plays the accelerator, the host has one core
    two = selection.scheduling(parts.options.scheduling) == "two_devices"
    threads = 1 if two and selection.shares_cpu else parts.threads
    return NativeModel(
        compiled,
        weights,
        parts.ropes,
        pools,
        threads=threads,
        expert_memory=parts.options.expert_memory,
        kv_read=parts.options.kv_read,
        prefill_mass=parts.options.prefill_mass,
    )


def _check_sizes(config: ModelConfig) -> None:
    for attention in config.attentions.values():
        latent = attention.latent
        if latent is not None and latent.rank > MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"latents have {latent.rank} numbers; the native kernels take at most "
                f"{MAX_HEAD_DIM}, and nothing else computes them"
            )
        if attention.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"head_dim is {attention.head_dim}; the native kernels take at most "
                f"{MAX_HEAD_DIM}. Take `decode` portable and `prefill` cpu"
            )
        if attention.kv_size % PANEL:
            raise UnsupportedModelError(
                f"kv_heads * head_dim is {attention.kv_size}; the native kernels take multiples of "
                f"{PANEL}. Take `decode` portable and `prefill` cpu"
            )


class NativeModel(StepBackend):
    """A model whose tokens go through the fused step on the shared KV cache."""

    name = NATIVE
    exact_rows = True

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: Weights,
        ropes: SequenceOf[RopeTable],
        pools: SequenceOf[Blocks],
        *,
        threads: int,
        expert_memory: int | None = None,
        kv_read: int | None = None,
        prefill_mass: float | None = None,
    ) -> None:
        """Take over the weights.

        Args:
            ropes: RoPE tables that layers name by their index, for the whole context.
            pools: pools of KV blocks and states that layers name by their index.
            kv_read: tokens that rows of answers read at most; None: all.
            prefill_mass: share of the attention that whole blocks of prompts read; None: all.
        """
        self._library = library
        self._weights = weights
        self._step = FusedStep(library, weights, ropes, pools, expert_memory=expert_memory)
        self.expert_memory = self._step.expert_memory
        self._layers = len(weights.layers)
        # the first of the last layers that have no K and V of their own
        own = [i for i, layer in enumerate(weights.layers) if layer.kv_from is None]
        self._readers = own[-1] + 1
        self._threads = threads
        self._kv_read, self._prefill_mass = kv_read, prefill_mass

    def _run(self, spans: SequenceOf[Span], should_stop: Callable[[], bool] | None) -> list[Rows]:
        """Compute spans, all of which have the same group of layers."""
        group = spans[0].group
        assert all(span.group is group for span in spans)
        with reserved(spans):
            for span in spans:
                span.sequence.use_host()
            result = self._through(spans, group, should_stop)
            if result is None:
                raise CancelledError("cancelled between two layers")
            if group is None or group.layers.stop == self._layers:
                for span in spans:
                    self._keep_apart(span)
                    span.sequence.commit(span.tokens)
        return cut(spans, *result, threads=self._threads)

    def _keep_apart(self, span: Span) -> None:
        """Keep rows from sequences that would read another part of their context."""
        sequence = span.sequence
        if sequence.shareable is not None:
            return
        start, end = len(sequence), len(sequence) + len(span.tokens)
        first = end
        if self._kv_read is not None and span.answers:
            first = max(start, first_choosing(self._kv_read))
        elif self._prefill_mass is not None:
            first = max(start, DENSE_POSITIONS) if span.answers else first_dense(start, end)
        if first < end:
            sequence.shareable = first

    def _reading(self, span: Span) -> StepSpan:
        """Return a span in the form of the step, with the part of its context that it reads."""
        step = step_span(span)
        if not span.answers:
            return replace(step, prefill_mass=self._prefill_mass)
        if self._kv_read is None or step.start + len(step.tokens) <= first_choosing(self._kv_read):
            return step
        return replace(step, kv_read=self._kv_read, shortlists=span.shortlists)

    def _through(
        self,
        spans: SequenceOf[Span],
        group: LayerGroup | None,
        should_stop: Callable[[], bool] | None,
    ) -> tuple[Floats, Floats] | None:
        """Run the step; rows that end at the last layer with K and V of its own leave there.

        Layers behind it read K and V of others, so that rows whose results are not asked for need
        not enter them.
        """
        steps = [self._reading(span) for span in spans]

        def run(
            steps: SequenceOf[StepSpan], group: LayerGroup | None
        ) -> tuple[Floats, Floats] | None:
            return self._step.run(
                steps, threads=self._threads, should_stop=should_stop, group=group
            )

        asked = [len(each.tokens) if each.all_states else each.logit_rows for each in spans]
        lengths = [len(span.tokens) for span in spans]
        if group is not None or self._readers == self._layers or asked == lengths:
            return run(steps, group)
        first = run(
            [replace(step, logit_rows=0) for step in steps], LayerGroup(layers=range(self._readers))
        )
        if first is None:
            return None
        residual, ends = first[0], np.cumsum(lengths)
        entering = [np.arange(end - n, end) for end, n in zip(ends, asked, strict=True)]
        rows = np.concatenate(entering)
        hidden = np.zeros((len(residual), self._weights.embedding.inputs), np.float32)
        if not len(rows):
            return hidden, first[1]
        rest = [
            replace(
                step.last_rows(n),
                # no layer behind has a state
                states=[
                    view and replace(view, targets=((n, view.ids[-1]),)) for view in step.states
                ],
            )
            for step, n in zip(steps, asked, strict=True)
            if n
        ]
        layers = range(self._readers, self._layers)
        last = run(rest, LayerGroup(layers=layers, entering=residual[rows]))
        if last is None:
            return None
        hidden[rows] = last[0]
        return hidden, last[1]

    def embed(self, tokens: SequenceOf[int]) -> Floats:
        return rows_of(self._weights.embedding, tokens)

    def experts(self, layer: int, x: Floats, *, threads: int) -> Floats:
        """See `FusedStep.experts`."""
        return self._step.experts(layer, x, threads=threads)

    def mix(self, layer: int, x: Floats, states: StateRows, *, threads: int) -> Floats:
        """Take rows `[n, inputs]` of one sequence through the mixer of a layer with states."""
        here, epsilon = self._weights.layers[layer], self._weights.epsilon
        mixer = here.mixer or here.beside
        _, mix = MIXERS[type(mixer)]
        return mix(self._library, x, mixer, [states], epsilon, threads)

    def load_adapter(self, adapter: AdapterWeights) -> None:
        check_adapter(adapter, self._weights)  # the kernels read it where it is

    def layer_rows(self, tokens: SequenceOf[int]) -> Floats:
        """Return the tokens' embeddings for all layers, `[n, layers * P]`."""
        given = self._weights.layer_table
        assert given is not None
        first = np.asarray(tokens, np.int64)[:, None] * self._layers
        first[first >= given.table.outputs] = 0  # tokens that have none of their own
        rows = (first + np.arange(self._layers)).reshape(-1)
        return rows_of(given.table, rows.tolist()).reshape(len(tokens), -1)

    def linear(self, x: Floats, weight: PackedWeights, *, fine: bool = False) -> Floats:
        return linear(self._library, x, weight, fine=fine, threads=self._threads)

    def logits(self, hidden: Floats) -> Floats:
        logits = self.linear(hidden, self._weights.head, fine=True)
        return softcapped(logits, self._weights.logit_softcap)
