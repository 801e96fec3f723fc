"""The fused step in C++ (`cpu.h`): embedding to logits for one or more tokens, in one call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.altup.native import AltUpLayer
from edgellm.kernels.checks import check_rope, indices
from edgellm.kernels.experts import ExpertMemory
from edgellm.kernels.experts.native import (
    ROUTER_VECTORS,
    SHARED_VECTORS,
    RouterLayer,
    SharedExpertLayer,
)
from edgellm.kernels.kv_append.native import NormPointers
from edgellm.kernels.latent.native import LatentLayer
from edgellm.kernels.linear import PANEL
from edgellm.kernels.linear.native import LinearLayer, layer_of
from edgellm.kernels.lora import AdapterWeights
from edgellm.kernels.lora.native import NativeAdapter
from edgellm.kernels.native import KV, Rope, address
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.step.checks import Pool, check_adapter, check_pools, check_weights
from edgellm.kernels.step.native_mixers import MIXERS
from edgellm.kernels.step.native_spans import NativeSpan, span_parts
from edgellm.kernels.step.span import LayerGroup, StepSpan, check_group, check_spans
from edgellm.kernels.step.weights import (
    ACTIVATIONS,
    VECTORS,
    Laurel,
    LayerInput,
    LayerWeights,
    Weights,
)

Floats = NDArray[np.float32]

# Callback of C++, in the thread that called C++.
_ShouldStop = ctypes.CFUNCTYPE(ctypes.c_int32)


class _LayerInput(ctypes.Structure):
    """Weights for embeddings of a layer's own; the fields are those of call.h, in their order."""

    _fields_ = [
        *((name, LinearLayer) for name in ("context", "gate", "output")),
        ("post_norm", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, given: LayerInput | None) -> _LayerInput:
        if given is None:
            return cls()
        linears = given.context, given.gate, given.output
        return cls(*map(layer_of, linears), address(given.post_norm))


class _Laurel(ctypes.Structure):
    """Weights of what a layer adds beside attention; the fields are those of call.h."""

    _fields_ = [
        *((name, LinearLayer) for name in ("left", "right")),
        ("post_norm", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, given: Laurel | None) -> _Laurel:
        if given is None:
            return cls()
        return cls(layer_of(given.left), layer_of(given.right), address(given.post_norm))


class _Layer(ctypes.Structure):
    """Weights of a layer; the fields are those of call.h, in their order."""

    _fields_ = [
        *((name, LinearLayer) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, LinearLayer) for name in ("output_gate", "beside_o")),
        *((name, ctypes.c_void_p) for name in VECTORS),
        ("head_norms", NormPointers),
        ("latent", LatentLayer),
        ("router", RouterLayer),
        ("shared", SharedExpertLayer),
        ("sinks", ctypes.c_void_p),
        ("input", _LayerInput),
        ("laurel", _Laurel),
        ("altup", AltUpLayer),
        *((structure.__name__, structure) for structure, _ in MIXERS.values()),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "output_scale", "cutoff")),
        *((name, ctypes.c_int32) for name in ("heads", "window", "rope", "activation")),
        *((name, ctypes.c_int32) for name in ("pool", "slot", "beside_pool", "beside_slot")),
        *((name, ctypes.c_int32) for name in ("mixer", "state_size")),
    ]


class _Transformer(ctypes.Structure):
    """Weights of a model; the fields are those of call.h, in their order."""

    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        ("final_norm", ctypes.c_void_p),
        ("final_norm_bias", ctypes.c_void_p),
        ("embedding", LinearLayer),
        ("head", LinearLayer),
        ("layer_table", LinearLayer),
        ("layer_norm", ctypes.c_void_p),
        *((name, LinearLayer) for name in ("streams_enter", "streams_leave")),
        ("expert_memory", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("layer_count", "hidden", "streams")),
        *((name, ctypes.c_float) for name in ("epsilon", "embedding_scale", "logit_softcap")),
    ]


class _Call(ctypes.Structure):
    """Arguments of one step; the fields are those of call.h, in their order."""

    _fields_ = [
        ("model", ctypes.POINTER(_Transformer)),
        ("pools", ctypes.POINTER(KV)),
        ("ropes", ctypes.POINTER(Rope)),
        ("spans", ctypes.POINTER(NativeSpan)),
        *((name, ctypes.c_void_p) for name in ("tokens", "entering", "states", "logits")),
        ("workspace", ctypes.c_void_p),
        ("should_stop", _ShouldStop),
        *((name, ctypes.c_int32) for name in ("span_count", "count", "logit_rows", "threads")),
        *((name, ctypes.c_int32) for name in ("first_layer", "last_layer")),
    ]


class _ExpertsCall(ctypes.Structure):
    """Arguments of the experts of a layer; the fields are those of call.h, in their order."""

    _fields_ = [
        ("model", ctypes.POINTER(_Transformer)),
        *((name, ctypes.c_void_p) for name in ("x", "y", "workspace")),
        *((name, ctypes.c_int32) for name in ("layer", "count", "threads")),
    ]


def _layer(layer: LayerWeights, slot: int, beside_slot: int) -> _Layer:
    """Return the structure of a layer, in which V takes 16-bit activations.

    V and the LM head take 16-bit activations, for 3 % of a prompt's work together. Rounding all
    inputs to 8 bits costs a KL divergence to float32 of 0.0030 (SmolLM2-135M, 2,048 tokens), of
    which V's 192 outputs a layer are 0.0005 and the head 0.0010.
    """
    attends = layer.mixer is None
    mixer = layer.beside if layer.mixer is None else layer.mixer
    return _Layer(
        layer_of(layer.q),
        layer_of(layer.k, fine=layer.v is None),
        layer_of(layer.v, fine=True),
        layer_of(layer.o),
        layer_of(layer.gate),
        layer_of(layer.up),
        layer_of(layer.down),
        layer_of(layer.q_gate),
        layer_of(layer.mamba_o),
        *(address(getattr(layer, name)) for name in VECTORS),
        NormPointers.of(layer.head_norms, layer.head_dim if attends else 0),
        LatentLayer.of(layer.latent),
        RouterLayer.of(layer.routing, [getattr(layer, name) for name in ROUTER_VECTORS]),
        SharedExpertLayer.of(layer.shared, [getattr(layer, name) for name in SHARED_VECTORS]),
        address(layer.sinks),
        _LayerInput.of(layer.input),
        _Laurel.of(layer.laurel),
        AltUpLayer.of(layer.altup),
        *(
            structure.of(mixer) if isinstance(mixer, kind) else structure()
            for kind, (structure, _) in MIXERS.items()
        ),
        layer.head_dim**-0.5 if attends and layer.scale is None else layer.scale or 0.0,
        layer.softcap or 0.0,
        layer.output_scale,
        -math.inf if layer.cutoff is None else layer.cutoff,
        layer.heads,
        layer.window or 0,
        layer.rope,
        ACTIVATIONS.index(layer.activation),
        layer.pool,
        slot,
        layer.beside_pool,
        beside_slot,
        [type(None), *MIXERS].index(type(layer.mixer)),
        0 if mixer is None else mixer.state_size,
    )


def _answers(should_stop: Callable[[], bool], errors: list[BaseException]) -> Iterator[bool]:
    """Yield the answer of `should_stop` each time that C++ asks; an exception is kept, and stops.

    ctypes would print and drop an exception. The exception of a signal handler, such as
    KeyboardInterrupt, is raised at the first instruction of any Python function that is called,
    before the function could enter a `try`, or when a loop goes back. A generator goes on within
    the `try` that it has entered.

    Args:
        errors: list that gets the exception.
    """
    stop = False
    while True:
        try:
            while True:
                yield stop
                stop = should_stop()
        except GeneratorExit:
            raise
        except BaseException as error:
            errors.append(error)
            stop = True


class FusedStep:
    """Model for fused steps on the blocks of its pools; keeps its weights alive.

    Several threads may run it at the same time, on different blocks.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: Weights,
        ropes: Sequence[RopeTable],
        pools: Sequence[Pool],
        *,
        expert_memory: int | None = None,
    ) -> None:
        """Take the addresses of all parts.

        Args:
            ropes: RoPE tables, which `LayerWeights.rope` indexes.
            pools: pools, which `LayerWeights.pool` indexes, and behind them those of sealed blocks.
            expert_memory: bytes of experts that stay in memory, see `ExpertMemory`; None: all do.

        Raises:
            ValueError: a part does not fit the others.
        """
        check_weights(weights, ropes=len(ropes))
        check_pools(weights, pools)
        for layer in weights.layers:
            if layer.mixer is None:
                check_rope(ropes[layer.rope], layer.head_dim, 0)
        self._library = library
        self._weights = weights
        self._ropes = list(ropes)
        self._positions = min(len(table.cos) for table in ropes)
        self._rope_pointers = (Rope * len(ropes))(*map(Rope.of, ropes))
        self._pools = list(pools)
        self._pool_pointers = KV.of_pools(pools)
        layers = map(_layer, weights.layers, weights.slots, weights.beside_slots)
        self._layers = (_Layer * len(weights.layers))(*layers)
        table, streams = weights.layer_table, weights.streams
        counts = [0 if each.routing is None else each.routing.experts for each in weights.layers]
        self.expert_memory: ExpertMemory | None = None
        if expert_memory is not None and any(counts):
            self.expert_memory = ExpertMemory(
                expert_memory, layers=len(counts), experts=max(counts)
            )
        self._model = _Transformer(
            self._layers,
            address(weights.final_norm),
            address(weights.final_norm_bias),
            layer_of(weights.embedding),
            layer_of(weights.head, fine=True),
            layer_of(None if table is None else table.table),
            None if table is None else address(table.norm),
            layer_of(None if streams is None else streams.enter),
            layer_of(None if streams is None else streams.leave),
            None if self.expert_memory is None else self.expert_memory.pointer,
            len(weights.layers),
            weights.embedding.inputs,
            weights.stream_count,
            weights.epsilon,
            weights.embedding_scale,
            weights.logit_softcap or 0.0,
        )
        self._workspaces: list[NDArray[np.uint8]] = []  # free ones, of ended calls
        self._adapters: WeakKeyDictionary[AdapterWeights, NativeAdapter] = WeakKeyDictionary()

    def run(
        self,
        spans: Sequence[StepSpan],
        *,
        threads: int = 1,
        should_stop: Callable[[], bool] | None = None,
        group: LayerGroup | None = None,
    ) -> tuple[Floats, Floats] | None:
        """Write K and V of the tokens of each span, and compute their hidden states and logits.

        The results of a token have the same bits with any number of other tokens, and in any number
        of groups of layers.

        Args:
            spans: spans of different sequences, or spans that do not see each other's new tokens.
            should_stop: called before each layer; an exception stops the step, and is raised again.
            group: layers that all spans go through; None: all layers.

        Returns:
            Hidden states after the final norm `[tokens, E]`, or the residual that enters the layer
            behind the group, of several streams side by side `[tokens, S * E]`, and logits
            `[logit_rows, V]`, span after span; None: it was stopped.

        Raises:
            ValueError: a token, block, position or layer does not exist, or an adapter is for
                another model.
        """
        weights = self._weights
        check_spans(spans, pools=len(self._pools))
        tokens = [token for span in spans for token in span.tokens]
        ids = indices(tokens, weights.embedding.outputs, "token id")
        parts = [
            span_parts(
                span,
                self._pools,
                layers=len(weights.layers),
                positions=self._positions,
                most_heads=weights.most_heads,
            )
            for span in spans
        ]
        rows = sum(span.logit_rows for span in spans)
        layers, hidden = len(weights.layers), weights.embedding.inputs
        group = group or LayerGroup(layers=range(layers))
        width = weights.stream_count * hidden
        check_group(group, layers=layers, rows=len(ids), width=width, logit_rows=rows)
        errors: list[BaseException] = []
        callback = _ShouldStop()
        if should_stop is not None:
            answers = _answers(should_stop, errors)
            next(answers)
            callback = _ShouldStop(answers.__next__)
        ends = group.layers.stop == layers
        states = np.empty((len(ids), hidden if ends else width), np.float32)
        width = -(-weights.head.outputs // PANEL) * PANEL
        logits = np.empty((rows, width), np.float32)
        call = _Call(
            ctypes.pointer(self._model),
            self._pool_pointers,
            self._rope_pointers,
            (NativeSpan * len(spans))(
                *(
                    each.span(span, self._adapter(span.adapter))
                    for span, each in zip(spans, parts, strict=True)
                )
            ),
            address(ids),
            address(group.entering),
            address(states),
            address(logits),
            None,
            callback,
            len(spans),
            len(ids),
            rows,
            threads,
            group.layers.start,
            group.layers.stop,
        )
        workspace = self._workspace(self._library.edgellm_step_workspace(ctypes.byref(call)))
        call.workspace = address(workspace)
        done = self._library.edgellm_step(ctypes.byref(call))
        self._workspaces.append(workspace)
        if errors:
            raise errors.pop()
        if not done:
            return None
        return states, logits[:, : weights.head.outputs]

    def experts(self, layer: int, x: Floats, *, threads: int = 1) -> Floats:
        """Take rows `[n, E]` through a layer's experts, a shared one among them.

        The rows are normalized, but where an MLP stands beside the experts, each behind a norm of
        its own: these are rows of the residual, and both are added. The results of a row have the
        same bits with any number of other rows.

        Raises:
            ValueError: the layer has no experts, or the rows have another width.
        """
        hidden = self._weights.embedding.inputs
        if self._weights.layers[layer].routing is None:
            raise ValueError(f"layer {layer} has no experts")
        if x.ndim != 2 or x.shape[1] != hidden:
            raise ValueError(f"rows are {x.shape}; needed are {hidden} numbers in each")
        rows = np.ascontiguousarray(x, np.float32)
        y = np.empty_like(rows)
        model = ctypes.pointer(self._model)
        call = _ExpertsCall(model, address(rows), address(y), None, layer, len(rows), threads)
        workspace = self._workspace(self._library.edgellm_experts_workspace(ctypes.byref(call)))
        call.workspace = address(workspace)
        self._library.edgellm_experts(ctypes.byref(call))
        self._workspaces.append(workspace)
        return y

    def _workspace(self, size: int) -> NDArray[np.uint8]:
        """Return a workspace of at least `size` bytes that no other call uses."""
        try:
            workspace = self._workspaces.pop()
        except IndexError:  # the first call, or other threads use all
            workspace = np.empty(0, np.uint8)
        return workspace if workspace.nbytes >= size else np.empty(size, np.uint8)

    def _adapter(self, adapter: AdapterWeights | None) -> int | None:
        """Return the address of an adapter, which is checked when it is first used.

        Raises:
            ValueError: the adapter is for another model.
        """
        if adapter is None:
            return None
        known = self._adapters.get(adapter)
        if known is None:
            check_adapter(adapter, self._weights)
            known = self._adapters[adapter] = NativeAdapter(adapter)
        return known.address
