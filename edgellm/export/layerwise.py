"""Attention for a model that is computed one segment at a time, because it may not fit in memory.

Every text goes through a segment before the next one is opened, so only one segment's weights are
in memory, however large the model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.host_attention import HostAttention, head_norms, rope_tables
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.kernels.kv_blocks import BLOCK, KVView, allocate

Floats = NDArray[np.float32]


class WindowAttention:
    """Attention within one text of up to `window` tokens; K and V are not rounded."""

    def __init__(self, attention: HostAttention, window: int) -> None:
        config = attention.config
        self._attention = attention
        count = -(-window // BLOCK)
        blocks = allocate(
            format="f32",
            blocks=count,
            layers=1,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        )
        self._view = KVView(blocks, range(count))

    @classmethod
    def of(cls, checkpoint: Checkpoint, window: int) -> WindowAttention:
        """Make the attention of a checkpoint's layers, for texts of up to `window` tokens."""
        config = checkpoint.config
        norms = head_norms(config, lambda name: checkpoint.tensor(name).float32())
        return cls(HostAttention(config, rope_tables(config, window), norms), window)

    def __call__(self, layer: int, qkv: Floats) -> Floats:
        """Compute a layer's attention `[n, H * D]` for the first n tokens of a text.

        Args:
            qkv: Q, K and V of those tokens, `[n, (H + 2 Hkv) * D]`.
        """
        return self._attention(layer, self._view, 0, 0, qkv)
