"""MXFP4 as gpt-oss has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_formats import described
from hf_weights import E2M1, Parts, words

from edgellm.errors import ModelFormatError
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.kernels.quantized import dequantize

WriteModel = Callable[..., Path]
Refuses = Callable[..., None]

KEY = "model.layers.0.self_attn.k_proj"
ROWS, COLUMNS = 64, 128
RNG = np.random.default_rng(5)


@pytest.mark.parametrize("exponents", [(104, 142), (0, 254)])
def test_mxfp4_of_gpt_oss(write_model: WriteModel, exponents: tuple[int, int]) -> None:
    """Powers of two from 2^-24 to 2^15 times doubled numbers are halves; others are not."""
    codes = RNG.integers(0, 16, (ROWS, COLUMNS))
    scales = RNG.integers(exponents[0], exponents[0] + 10, (ROWS, COLUMNS // 32)).astype(np.uint8)
    scales[0, 0], scales[1, 1] = exponents
    if exponents[1] == 142:
        codes[1, 32:64] &= 11  # up to 1.5 * 2^15
    else:
        codes[1, 32:64] &= 8
    parts = {
        "_blocks": words(codes, 4, np.uint8).reshape(ROWS, COLUMNS // 32, 16),
        "_scales": scales,
    }
    folder = write_model({KEY: parts}, described("mxfp4"))
    tensor = open_checkpoint(folder).tensor("layers.0.k")
    expected = np.array(E2M1)[codes] * np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=1)
    np.testing.assert_array_equal(tensor.float32(), expected.astype(np.float32))
    assert (tensor.quantized is not None) == (exponents[1] == 142)
    if tensor.quantized is not None:
        assert tensor.quantized().kind.name == "mxfp4"
        np.testing.assert_array_equal(tensor.quantized().codes, codes)
        np.testing.assert_array_equal(dequantize(tensor.quantized()), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("parts", "config", "error", "words"),
    [
        (
            {"_blocks": np.zeros((ROWS, 4, 16), np.uint8)},
            described("mxfp4"),
            ModelFormatError,
            "k_proj_scales is missing",
        ),
        (
            {
                "_blocks": np.zeros((ROWS, 4, 16), np.uint8),
                "_scales": np.full((ROWS, 4), 255, np.uint8),
            },
            described("mxfp4"),
            ModelFormatError,
            "k_proj_scales holds a scale that is infinite or not a number",
        ),
    ],
)
def test_what_is_refused(
    refuses: Refuses, parts: Parts, config: Any, error: type, words: str
) -> None:
    refuses({KEY: parts}, config, error, words)
