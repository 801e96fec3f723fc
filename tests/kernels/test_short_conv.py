from __future__ import annotations

import ctypes

import numpy as np
import pytest
from random_weights import random_weight

from edgellm.kernels.linear import pack_weight
from edgellm.kernels.short_conv import ShortConvWeights, reference
from edgellm.kernels.short_conv.native import short_conv
from edgellm.kernels.state_blocks import StateRows

# Channels, taps.
SIZES = [(32, 2), (96, 3), (160, 16)]


def weights_of(channels: int, taps: int) -> ShortConvWeights:
    rng = np.random.default_rng(channels)
    projection = pack_weight(random_weight("int8_symmetric", 3 * channels, 32, rng, size=1.0))
    filters = rng.standard_normal((taps, channels), np.float32)
    return ShortConvWeights(conv_in=projection, filters=filters)


def rows_of(weights: ShortConvWeights, count: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 3 * weights.size), np.float32)


def state_of(weights: ShortConvWeights) -> np.ndarray:
    return np.full(weights.state_size, np.nan, np.float32)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_what_it_computes(compiled: ctypes.CDLL, sizes: tuple[int, int]) -> None:
    """From the first row of a sequence, and behind others."""
    weights = weights_of(*sizes)
    rows, state = rows_of(weights, 30), state_of(weights)
    expected = reference.mix(rows.astype(np.float64), weights.filters)
    out = short_conv(compiled, rows[:11], weights, [StateRows(None, [(11, state)])])
    np.testing.assert_allclose(out, expected[:11], rtol=1e-5, atol=1e-5)
    last = StateRows(state, [(19, state_of(weights))])
    out = short_conv(compiled, rows[11:], weights, [last])
    np.testing.assert_allclose(out, expected[11:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.usefixtures("poisoned", "eight_cores")
def test_cuts_company_and_threads_change_no_bit(
    compiled: ctypes.CDLL, sizes: tuple[int, int]
) -> None:
    """Nor does a state that is written where it was read."""
    weights = weights_of(*sizes)
    rows, others = rows_of(weights, 40), rows_of(weights, 3, seed=2)
    targets = [(end, state_of(weights)) for end in (1, 2, 7, 30, 40)]
    whole = short_conv(compiled, rows, weights, [StateRows(None, targets)])
    for threads in (1, 3, 8):
        before, first = None, 0
        for end, state in targets:
            after = state_of(weights) if before is None else before
            spans = [
                StateRows(None, [(3, state_of(weights))]),
                StateRows(before, [(end - first, after)]),
            ]
            parts = np.concatenate([others, rows[first:end]])
            out = short_conv(compiled, parts, weights, spans, threads=threads)
            np.testing.assert_array_equal(out[3:], whole[first:end])
            np.testing.assert_array_equal(after, state)
            before, first = after, end


def test_what_does_not_fit_is_refused() -> None:
    weights, library = weights_of(32, 3), ctypes.CDLL(None)
    rows, state = rows_of(weights, 4), state_of(weights)
    for span, words in (
        (StateRows(None, []), "ascending numbers from 1 on"),
        (StateRows(None, [(4, state), (4, state)]), "ascending numbers from 1 on"),
        (StateRows(None, [(4, state[:5])]), r"needed is float32 \(64,\)"),
        (StateRows(None, [(4, np.zeros((64, 2), np.float32)[:, 0])]), "with gaps"),
        (StateRows(None, [(3, state)]), r"rows is float32 \(3, 96\)"),
    ):
        with pytest.raises(ValueError, match=words):
            short_conv(library, rows, weights, [span])
