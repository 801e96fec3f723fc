from __future__ import annotations

import numpy as np
import pytest

from edgellm.kernels.quantized import dequantize
from edgellm.quantize import weights
from edgellm.quantize.weights import quantize_channels, quantize_groups


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


def test_large_weights_are_quantized_in_parts_that_an_interrupt_can_come_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = np.random.default_rng(1).standard_normal((2_049, 1024)).astype(np.float32)
    sizes: list[int] = []
    steps = weights._steps

    def counted(groups: np.ndarray, scale: np.ndarray) -> np.ndarray:
        sizes.append(groups.size)
        return steps(groups, scale)

    monkeypatch.setattr(weights, "_steps", counted)
    rounded = quantize_groups(weight)
    assert sizes == [1 << 20, 1 << 20, 1024]
    for row in (0, 1023, 1024, 1025, 2_048):
        alone = quantize_groups(weight[row : row + 1])
        np.testing.assert_array_equal(rounded.codes[row], alone.codes[0])
        np.testing.assert_array_equal(rounded.scale[row], alone.scale[0])
