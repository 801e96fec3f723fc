"""The CUDA back end: chunks through graphs of ONNX Runtime, attention in Triton, on one device.

The back end needs onnxruntime-gpu beside torch and triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.backends import providers
from edgellm.backends.host_attention import HostAttention
from edgellm.backends.segments import ModelHead
from edgellm.backends.selection import Parts
from edgellm.backends.self_test import require_segments
from edgellm.errors import MemoryEstimateError
from edgellm.graphs.contract import WEIGHTS_FILE
from edgellm.kernels.gpu import device

if TYPE_CHECKING:
    from edgellm.backends.device_model import DeviceModel


def require(name: str) -> None:
    """See `BackendFile.require`."""
    providers.require(name)
    device.require()


def open_model(
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
