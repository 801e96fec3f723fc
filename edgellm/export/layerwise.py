"""A model one segment at a time, for those who must not hold all of it.

Every text sees a segment before the next one is opened, so the weights of one are in memory,
however large the model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs.config import ModelConfig
from edgellm.kernels import rope
from edgellm.kernels.attention import attend
from edgellm.kernels.kv_append import append_rotated
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks, allocate

Floats = NDArray[np.float32]


class WindowAttention:
    """Attention within one text of up to `window` tokens; K and V are not rounded."""

    def __init__(self, config: ModelConfig, window: int) -> None:
        self._config = config
        self._rope = rope.table(config.inv_freq, window)
        self._blocks: KVBlocks = allocate(
            format="f32",
            blocks=-(-window // BLOCK),
            layers=1,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        )

    def __call__(self, qkv: Floats) -> Floats:
        """`[n, (H + 2 Hkv) * D]` of a text's first n tokens to `[n, H * D]`."""
        config, table = self._config, range(self._blocks.count)
        heads = qkv.reshape(len(qkv), -1, config.head_dim)
        q = append_rotated(self._blocks, table, 0, 0, heads, self._rope)
        found = attend(self._blocks, table, 0, q, 0, window=config.sliding_window)
        return found.reshape(len(qkv), -1)
