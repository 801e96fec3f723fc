from __future__ import annotations

import numpy as np

from edgellm.kernels.quantized import dequantize
from edgellm.quantize.int8 import quantize_channels, quantize_groups


def test_channels_use_the_whole_range() -> None:
    weight = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    codes, scale = quantize_channels(weight)
    assert (np.abs(codes).max(axis=1) == 127).all()
    assert (np.abs(codes * scale[:, None] - weight) <= 0.501 * scale[:, None]).all()


def test_groups_round_trip() -> None:
    weight = np.random.default_rng(1).standard_normal((6, 96)).astype(np.float32)
    rounded = quantize_groups(weight)
    assert rounded.kind.name == "int8_symmetric"
    error = np.abs(dequantize(rounded) - weight).reshape(6, 3, 32)
    # half a step, and what rounding the scale to a half adds at the largest weight
    assert (error <= 0.57 * rounded.scales()[..., None]).all()


def test_zeros_stay_zero() -> None:
    zeros = np.zeros((2, 32), np.float32)
    codes, scale = quantize_channels(zeros)
    assert not codes.any()
    assert not scale.any()
    assert not dequantize(quantize_groups(zeros)).any()
