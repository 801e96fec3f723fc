"""Estimate of the memory that a model takes."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from edgellm.errors import MemoryEstimateError
from edgellm.graphs.contract import WEIGHTS_FILE
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import PACKED

# A process with all libraries imported and no model: 110 MB on Linux with Python 3.11.
_BASE_BYTES = 110 << 20


@dataclass(frozen=True)
class MemoryEstimate:
    """Resident bytes of a loaded model with a full context."""

    weights: int
    kv_cache: int
    base: int = _BASE_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.base


def estimate(bundle: Bundle, *, precisions: set[str], kv_cache_bytes: int) -> MemoryEstimate:
    """Estimate the memory of a model loaded in these precisions.

    ONNX Runtime keeps a repacked copy of each weight beside the mapped file, so its weights count
    twice. That is an upper bound: the default model, with 222 MB of weights, took 323 MB.
    """
    heads = {bundle.precision(precision).head for precision in precisions}
    if PACKED in precisions:
        heads -= {"int8"}  # packed weights have an int8 head
    folders = [*precisions, *(f"head-{head}" for head in heads if head is not None)]
    files = bundle.manifest.files
    weights = sum(
        files[f"{folder}/{WEIGHTS_FILE}"].bytes * (1 if folder == PACKED else 2)
        for folder in folders
    )
    return MemoryEstimate(weights, kv_cache_bytes)


def check_fits(needed: MemoryEstimate) -> None:
    """Refuse to load a model that would be killed for memory later.

    Raises:
        MemoryEstimateError: it needs more than is available now.
    """
    available = psutil.virtual_memory().available
    if needed.total > available:
        raise MemoryEstimateError(
            f"about {_mib(needed.total)} MiB would be needed (weights {_mib(needed.weights)}, KV "
            f"cache {_mib(needed.kv_cache)}), but {_mib(available)} MiB are available; choose a "
            "smaller `ctx_size` or a smaller `kv_format`"
        )


def _mib(count: int) -> int:
    return count >> 20
