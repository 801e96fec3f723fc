"""Parts that all back ends of one engine are opened with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.backends.selection import Selection
from edgellm.cache.kv_cache import KVCache
from edgellm.errors import UnsupportedModelError
from edgellm.graphs.config import ModelConfig
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


def require_one_size(config: ModelConfig, takes: str) -> None:
    """Refuse a model whose layers differ in heads or widths.

    Args:
        takes: text that says which back end takes only such models.

    Raises:
        UnsupportedModelError: they differ.
    """
    if not config.has_layers_of_one_size:
        raise UnsupportedModelError(
            f"the layers of the model differ in heads or widths; {takes} layers of "
            "one size. Take `decode` native, and `prefill` native or cpu"
        )
