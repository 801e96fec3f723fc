"""Parts that all back ends of one engine are opened with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.backends.selection import Selection
from edgellm.cache.kv_cache import KVCache
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
