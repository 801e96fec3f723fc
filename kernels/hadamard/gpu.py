"""The Walsh-Hadamard transform inside Triton kernels: a product with its matrix, never stored."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard_matrix(i: tl.tensor, j: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Elements `(i, j)` of the block-diagonal matrix with blocks of SIZE (Sylvester's order)."""
    common = i & j & (SIZE - 1)
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    sign = (1 - 2 * (common & 1)).to(tl.float32)
    return tl.where(i // SIZE == j // SIZE, sign * (SIZE**-0.5), 0.0)
