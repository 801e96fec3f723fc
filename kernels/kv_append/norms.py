"""RMS norms of Q, K and V, of each head by itself or of all heads together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """RMS norms of Q and K between their projection and the KV cache.

    Attributes:
        q, k: weights float32, `[D]` for each head by itself, or `[H*D]` and `[Hkv*D]` for all heads
            together.
        epsilon: number added to the mean square.
        after_rope: whether the norms come after RoPE; only for each head by itself.
        values: whether each head of V is normalized as well, without a weight.
    """

    q: NDArray[np.float32]
    k: NDArray[np.float32]
    epsilon: float
    after_rope: bool = False
    values: bool = False

    def whole(self, head_dim: int) -> bool:
        """Whether all heads are normalized together."""
        return len(self.q) != head_dim or len(self.k) != head_dim

    def check(self, heads: int, kv_heads: int, head_dim: int) -> None:
        """Refuse weights that do not fit the heads.

        Raises:
            ValueError: a shape or dtype differs, or all heads together would be normed after RoPE.
        """
        each, whole = ((head_dim,),) * 2, ((heads * head_dim,), (kv_heads * head_dim,))
        shapes = self.q.shape, self.k.shape
        if shapes not in (each, whole) or (shapes != each and self.after_rope):
            raise ValueError(
                f"norms of Q and K have weights {shapes}; needed are {each}, or {whole} before RoPE"
            )
        for weight in (self.q, self.k):
            if weight.dtype != np.float32 or not weight.flags.c_contiguous:
                raise ValueError(
                    f"norms of Q and K are {weight.dtype}; needed is float32 without gaps"
                )
