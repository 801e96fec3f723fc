"""The CUDA back end: chunks through graphs of ONNX Runtime, attention in Triton, on one device.

The back end needs onnxruntime-gpu beside torch and triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.backends import providers
from edgellm.backends.host_attention import HostAttention
from edgellm.backends.parts import Parts, require_one_size
from edgellm.backends.segments import ModelHead
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
        UnsupportedModelError: the sizes of layers differ.
    """
    require_one_size(parts.bundle.config, "`prefill` cuda takes")
    place = device.require()
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
    return DeviceModel(segments, head, attention, cache=parts.cache, queue=queue)
