"""Graphs of ONNX Runtime, chunk by chunk, on any execution provider, with attention on the host.

The back end needs a provider that is there and runs a small graph; the CPU provider needs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.backends import providers
from edgellm.backends.forward import Host, Model
from edgellm.backends.host_attention import HostAttention, head_norms
from edgellm.backends.parts import Parts
from edgellm.backends.providers import CPU, CUDA
from edgellm.backends.segments import Head, ModelHead, Segments
from edgellm.backends.self_test import check_once
from edgellm.store import key_basis
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import PACKED, map_arrays


def require(name: str) -> None:
    """See `BackendFile.require`."""
    providers.require(name)


def open_models(
    parts: Parts,
    precisions: Sequence[str],
    packed_head: ModelHead | None,
    host: Host | None,
) -> dict[str, Model]:
    """Open the models of some precisions; return them by precision.

    Args:
        packed_head: LM head and embedding in packed weights, where these are open; precisions that
            round theirs to int8 have no other one beside it.
        host: what computes experts and mixers with states, of a model that has some.
    """
    bundle, selection = parts.bundle, parts.selection
    prefill_precision = selection.prefill_precision(bundle.config)
    heads = _heads(bundle, precisions, packed_head)
    norms = key_basis.open_head_norms(bundle.path, bundle.manifest.keys)
    weights = head_norms(bundle.config, norms.__getitem__)
    attention = HostAttention(bundle.config, parts.ropes, weights, _sinks(bundle))
    models: dict[str, Model] = {}
    for precision in precisions:
        head = heads[bundle.precision(precision).head or ""]
        runs_prefill = precision == prefill_precision
        if runs_prefill and selection.prefill == CUDA:
            from edgellm.backends import cuda

            models[precision] = cuda.open_model(parts, precision, head=head, attention=attention)
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
    host: Host | None,
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


def _sinks(bundle: Bundle) -> dict[int, NDArray[np.float32]]:
    """Map the attention sinks of each layer that has some; they stand beside the packed weights."""
    config = bundle.config
    layers = [index for index, attention in config.attentions.items() if attention.sinks]
    if not layers:
        return {}
    arrays = map_arrays(bundle.path, bundle.precision(PACKED).arrays)
    return {index: arrays[f"layers.{index}.sinks"] for index in layers}


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
