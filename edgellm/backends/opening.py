"""Opening of the selected models; the files of kernels are imported when they are chosen.

Graphs of ONNX Runtime run on any execution provider, with attention on the host, or with `cuda` in
Triton on the device, which needs onnxruntime-gpu beside torch and triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import StepBackend
from edgellm.backends.forward import Model
from edgellm.backends.host_attention import HostAttention, head_norms
from edgellm.backends.providers import CPU, CUDA
from edgellm.backends.registry import NATIVE, TRITON
from edgellm.backends.segments import Head, ModelHead, Segments
from edgellm.backends.selection import Parts
from edgellm.backends.self_test import check_once, require_segments
from edgellm.errors import MemoryEstimateError
from edgellm.graphs.contract import WEIGHTS_FILE
from edgellm.kernels.gpu import device
from edgellm.store import key_basis
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import PACKED, map_arrays
from edgellm.store.precision_support import needs_host

if TYPE_CHECKING:
    from edgellm.backends.device_model import DeviceModel  # imports torch
    from edgellm.backends.native import NativeModel


# Back ends of packed weights, by name, and models of ONNX Runtime graphs, by precision.
Steps = Mapping[str, StepBackend]
Graphs = Mapping[str, Model]


def open_models(parts: Parts) -> tuple[Steps, Graphs]:
    """Open the selected models; a model that serves both prefill and decode is opened once."""
    selection, config = parts.selection, parts.bundle.config
    chosen = {selection.prefill, selection.host(config)}
    steps: dict[str, StepBackend] = {}
    host: NativeModel | None = None
    if NATIVE in chosen:
        from edgellm.backends import native

        steps[NATIVE] = host = native.open_model(parts)
    if TRITON in chosen:
        from edgellm.backends import triton

        steps[TRITON] = triton.open_model(parts)
    precisions = selection.graph_precisions(config)
    if not precisions:
        return steps, {}
    head = steps.get(TRITON) or steps.get(NATIVE)
    return steps, _open_graphs(parts, precisions, head, host if needs_host(config) else None)


def _open_graphs(
    parts: Parts,
    precisions: Sequence[str],
    packed_head: ModelHead | None,
    host: NativeModel | None,
) -> dict[str, Model]:
    """Open the models of some precisions; return them by precision.

    Args:
        packed_head: LM head and embedding in packed weights, where these are open; precisions that
            round theirs to int8 have no other one beside it.
        host: see `Model`.
    """
    bundle, selection = parts.bundle, parts.selection
    prefill_precision = selection.prefill_precision(bundle.config)
    heads = _heads(bundle, precisions, packed_head)
    norms = key_basis.open_head_norms(bundle.path, bundle.manifest.keys)
    weights = head_norms(bundle.config, norms.__getitem__)

    def vector(name: str) -> NDArray[np.float32]:
        return map_arrays(bundle.path, {name: bundle.precision(PACKED).arrays[name]})[name]

    attention = HostAttention.of(bundle.config, parts.ropes, weights, vector)
    models: dict[str, Model] = {}
    for precision in precisions:
        head = heads[bundle.precision(precision).head or ""]
        runs_prefill = precision == prefill_precision
        if runs_prefill and selection.prefill == CUDA:
            models[precision] = open_on_device(parts, precision, head=head, attention=attention)
        else:
            models[precision] = _open_model(
                parts,
                precision,
                head=head,
                attention=attention,
                host=host,
                runs_prefill=runs_prefill,
            )
    return models


def _open_model(
    parts: Parts,
    precision: str,
    *,
    head: ModelHead,
    attention: HostAttention,
    host: NativeModel | None,
    runs_prefill: bool,
) -> Model:
    """Open a precision on the provider of prefill, or on the CPU if only decode runs it."""
    options, selection = parts.options, parts.selection
    segments = Segments(
        parts.bundle,
        precision,
        provider=selection.prefill if runs_prefill else CPU,
        threads=parts.threads,
        provider_options=options.provider_options if runs_prefill else {},
        allow_fallback=options.allow_fallback,
        progress=parts.progress,
    )
    check_once(parts.bundle, segments, parts.progress)
    # with two devices, attention has a thread of its own beside those of decode
    two = selection.scheduling(options.scheduling) == "two_devices"
    on_one = runs_prefill and (selection.shares_cpu or two)
    threads = 1 if on_one else parts.threads
    return Model(segments, head, attention, threads=threads, host=host)


def open_on_device(
    parts: Parts, precision: str, *, head: ModelHead, attention: HostAttention
) -> DeviceModel:
    """Open a precision on the device.

    Args:
        attention: attention whose RoPE tables and norms are copied to the device.

    Raises:
        MemoryEstimateError: weights and KV cache do not fit on the device.
        ProviderError: a segment computes something else than on the CPU.
    """
    # chunks share inputs, Q and partial sums, which the next one writes
    assert parts.selection.policy == "serial"
    place = device.require()
    _check_fits(parts, precision, place)
    from edgellm.backends.device_model import DeviceModel, DeviceSegments, Queue  # imports torch

    queue = Queue(place)
    segments = DeviceSegments(
        parts.bundle,
        precision,
        queue=queue,
        threads=parts.threads,
        provider_options=parts.options.provider_options,
        allow_fallback=parts.options.allow_fallback,
    )
    # at every start: nothing is compiled that could be marked as checked
    require_segments(parts.bundle, segments, parts.progress)
    return DeviceModel(segments, head, attention, cache=parts.cache, queue=queue)


def _check_fits(parts: Parts, precision: str, place: str) -> None:
    """Refuse what needs more memory than the device has.

    A session for each segment and chunk size has its own copy of the weights. What the provider
    takes for its own work comes on top.
    """
    bundle, sizes = parts.bundle, parts.bundle.precision(precision).chunk_sizes
    weights = len(sizes) * bundle.manifest.files[f"{precision}/{WEIGHTS_FILE}"].bytes
    needed = {
        f"for weights of {precision} in {len(sizes)} chunk sizes": weights,
        "for the KV cache": parts.cache.nbytes,
    }
    reason = device.too_large(place, needed)
    if reason is not None:
        raise MemoryEstimateError(
            f"cuda: {reason}. Choose a smaller `precision` or `ctx_size`, or `prefill` triton, "
            "which has the weights once"
        )


def _heads(
    bundle: Bundle, precisions: Sequence[str], packed: ModelHead | None
) -> Mapping[str, ModelHead]:
    """Open the LM heads of some precisions; return them by kind.

    Packed weights are the one in int8. A float32 one they may have rounded.
    """
    kinds = {bundle.precision(precision).head for precision in precisions}
    return {
        kind: packed if packed is not None and kind == "int8" else Head(bundle, kind)
        for kind in kinds
        if kind is not None
    }
