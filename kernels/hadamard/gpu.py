"""The Walsh-Hadamard transform inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Transform each run of SIZE numbers in `[WIDTH]` (Sylvester's order); both are powers of two.

    Sums and differences at distances 1, 2, 4 ... take about a hundred instructions for 128 numbers.
    A product with the matrix takes thousands, and all registers from 256 numbers on.
    """
    WIDTH: tl.constexpr = x.shape[0]
    for level in tl.static_range(16):
        if 1 << level < SIZE:
            pairs = tl.reshape(x, [WIDTH // (2 << level), 2, 1 << level])
            a, b = tl.split(tl.permute(pairs, [0, 2, 1]))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 2, 1]), [WIDTH])
    return x * (SIZE**-0.5)
