"""Random weights of every kind, for tests."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.quantized import BLOCK, GROUP, Kind, QuantizedWeight


def random_weight(
    kind: Kind, outputs: int, inputs: int, rng: np.random.Generator
) -> QuantizedWeight:
    """A weight `[outputs, inputs]` whose numbers are around 0.4 / sqrt(inputs) in size."""
    codes = rng.integers(0, 2**kind.bits, (outputs, inputs), dtype=np.uint8)
    # of what the codes stand for
    reach = np.sqrt(inputs) * (max(map(abs, kind.table)) if kind.table else 2 ** (kind.bits - 1))
    groups, halves = (outputs, inputs // GROUP), (outputs, inputs // kind.group)
    if not kind.blocked:
        scale = ((0.5 + rng.random(halves)) / reach).astype(np.float16)
        offset = ((0.5 + rng.random(groups)) / -np.sqrt(inputs)).astype(np.float16)
        return QuantizedWeight(kind, codes, scale, offset if kind.affine else None)
    # both signs and every size: a kernel that drops one of them is noticed
    shared = rng.standard_normal((outputs, inputs // BLOCK)) / (128 if kind.affine else 64)
    return QuantizedWeight(
        kind,
        codes,
        rng.integers(-63, 64, halves, dtype=np.int8),
        rng.integers(0, 64, groups, dtype=np.uint8) if kind.affine else None,
        (shared / reach).astype(np.float16),
        (shared / np.sqrt(inputs)).astype(np.float16) if kind.affine else None,
    )
