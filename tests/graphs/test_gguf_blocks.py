"""Quantized types of GGUF, judged by the `gguf` package's own dequantization."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from edgellm.graphs.gguf_blocks import FORMATS, weight_of
from edgellm.kernels.quantized import dequantize

# Where blocks have their halves; all other bytes may have any value.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ2_0": (64,),
    "MXFP4": (),
}


def random_blocks(storage: str, rows: int, blocks: int) -> np.ndarray:
    """Rows of bytes `[rows, bytes]`."""
    rng = np.random.default_rng(len(storage))
    size = FORMATS[storage][0]
    if storage == "TQ1_0":  # not every byte is five digits of base 3
        weights = rng.integers(-1, 2, (rows, blocks * 256)).astype(np.float32)
        return quants.quantize(weights, GGMLQuantizationType.TQ1_0)
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for place in HALVES[storage]:
        halves = rng.standard_normal((rows, blocks, 1)).astype(np.float16)
        data[..., place : place + 2] = halves.view(np.uint8)
    if storage == "MXFP4":
        data[..., 0] = rng.integers(110, 140, (rows, blocks))
    return data.reshape(rows, -1)


@pytest.mark.parametrize("storage", FORMATS)
def test_every_number_is_exact(storage: str) -> None:
    kind = GGMLQuantizationType[storage]
    assert gguf.GGML_QUANT_SIZES[kind][1] == FORMATS[storage][0]
    rows = random_blocks(storage, 5, 6)
    expected = gguf.dequantize(rows, kind)
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(dequantize(weight_of(rows, storage)), expected)


def test_mxfp4_scales_beyond_a_half_are_infinite() -> None:
    """So that the check of what a checkpoint gives refuses them."""
    rows = random_blocks("MXFP4", 1, 1)
    rows[0, 0] = 200
    with np.errstate(all="raise"):  # a warning would be a line on the user's terminal
        assert np.isinf(weight_of(rows, "MXFP4").scale).all()
