"""Parts that all back ends of one engine are opened with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.backends.selection import Selection
from edgellm.cache.kv_cache import KVCache
from edgellm.errors import UnsupportedModelError
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.experts.routing import not_on_gpu
from edgellm.kernels.rope import RopeTable
from edgellm.options import EngineOptions
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bundle, options, KV cache and the other parts that the back ends of one engine share.

    Attributes:
        ropes: RoPE tables that layers name by their index, for the whole context.
        threads: CPU threads of the process.
        progress: callback told while graphs are compiled for an accelerator.
    """

    bundle: Bundle
    options: EngineOptions
    selection: Selection
    cache: KVCache
    ropes: Sequence[RopeTable]
    threads: int
    progress: ProgressCallback | None


def why_not_on_gpu(config: ModelConfig) -> str | None:
    """Return why the Triton kernels cannot compute a model; None: they can."""
    if not config.has_equal_heads:
        return "the layers of the model differ in heads or their width"
    routings = (layer.experts for layer in config.layers if layer.experts is not None)
    unknown = sorted({name for routing in routings for name in not_on_gpu(routing)})
    if unknown:
        return f"its routers have {' and '.join(unknown)}, which Triton kernels do not compute"
    return None


def require_on_gpu(config: ModelConfig, backend: str) -> None:
    """Refuse a model that the Triton kernels cannot compute.

    Args:
        backend: option that wants them, such as "`decode` triton".

    Raises:
        UnsupportedModelError: they cannot.
    """
    reason = why_not_on_gpu(config)
    if reason is not None:
        raise UnsupportedModelError(
            f"{backend} cannot compute {config.model_type}: {reason}. Take `decode` native, and "
            "`prefill` native or cpu"
        )
