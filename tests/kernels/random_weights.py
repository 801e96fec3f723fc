"""Random weights of every kind."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.quantized import BLOCK, GROUP, KINDS, Kind, QuantizedWeight


def random_weight(
    kind: str | Kind,
    outputs: int,
    inputs: int,
    rng: np.random.Generator,
    *,
    size: float | None = None,
) -> QuantizedWeight:
    """A weight whose numbers are about `size` large, by default 1 / sqrt(inputs)."""
    traits = KINDS[kind] if isinstance(kind, str) else kind
    size = 1 / np.sqrt(inputs) if size is None else size
    largest = float(max(traits.table)) if traits.table else 2.0 ** (traits.bits - 1)
    halves = (outputs, inputs // traits.group), (outputs, inputs // GROUP)
    codes = rng.integers(0, 1 << traits.bits, (outputs, inputs), dtype=np.uint8)

    def half(shape: tuple[int, int], mean: float) -> np.ndarray:
        return (mean * (0.5 + rng.random(shape))).astype(np.float16)

    if not traits.blocked:
        scale = half(halves[0], size / largest)
        return QuantizedWeight(
            traits, codes, scale, half(halves[1], -size) if traits.affine else None
        )
    scale = rng.integers(1, 64, halves[0]).astype(np.int8)
    if not traits.affine:
        scale *= rng.choice(np.array([-1, 1], np.int8), scale.shape)
    blocks = outputs, inputs // BLOCK
    return QuantizedWeight(
        traits,
        codes,
        scale,
        rng.integers(0, 64, halves[1]).astype(np.uint8) if traits.affine else None,
        half(blocks, size / largest / 32),
        half(blocks, size / 32) if traits.affine else None,
    )
