from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from edgellm.export.weight_reader import _LEVELS
from edgellm.kernels.quantized import dequantize
from edgellm.quantize.error import relative_error
from edgellm.quantize.weights import quantize_levels


@pytest.mark.parametrize("storage", _LEVELS)
def test_codebook_types_lose_their_scales_last_bits_alone(storage: str) -> None:
    kind = GGMLQuantizationType[storage]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(0).integers(0, 256, (40, 3, size), dtype=np.uint8)
    blocks[..., :2] = np.full((40, 3, 1), 0.01, np.float16).view(np.uint8)
    exact = gguf.dequantize(blocks.reshape(40, -1), kind)
    rounded = dequantize(quantize_levels(exact, _LEVELS[storage]))
    assert relative_error(exact, rounded) < 2e-4


def test_groups_of_one_level_and_of_zeros() -> None:
    weight = np.zeros((3, 32), np.float32)
    weight[1] = 0.75
    weight[2, 5] = -1.5
    np.testing.assert_array_equal(dequantize(quantize_levels(weight, (1, 3, 5))), weight)
