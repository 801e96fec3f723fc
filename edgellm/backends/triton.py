"""The Triton back end: packed weights in kernels on a GPU, the twin of the native back end.

The back end needs torch, triton and a device that they find, with room for weights and KV cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.backends.packed_weights import open_packed_weights
from edgellm.backends.parts import Parts
from edgellm.kernels.gpu import device
from edgellm.store.manifest import forget_pages

if TYPE_CHECKING:
    from edgellm.backends.triton_model import TritonModel


def require(_: str) -> None:
    """See `BackendFile.require`."""
    device.require()


def open_model(parts: Parts) -> tuple[TritonModel, TritonModel]:
    """See `StepBackendFile.open_model`."""
    place = device.require()
    from edgellm.backends.triton_model import TritonModel  # imports torch and triton

    weights = open_packed_weights(parts.bundle)
    model = TritonModel(weights, parts.ropes, parts.cache, device=place)
    forget_pages(weights.embedding.data)  # the file that all were copied from
    return model, model
