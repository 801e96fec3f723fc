from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace

import numpy as np
import pytest
from instruction_sets import HERE, UseISA
from random_weights import random_weight

from edgellm.kernels.linear import (
    PackedWeights,
    pack_weight,
    packed_shape,
    reference,
    rows_of,
    unpack_weight,
)
from edgellm.kernels.linear.native import linear
from edgellm.kernels.quantized import KINDS, dequantize


def panels_and_weight(
    kind: str, outputs: int, groups: int, *, seed: int = 0
) -> tuple[PackedWeights, np.ndarray]:
    """PackedWeights of so many groups of inputs, or of whole blocks, and the weight in float32."""
    multiple = KINDS[kind].inputs_multiple
    inputs = -(-groups * 32 // multiple) * multiple
    weight = random_weight(kind, outputs, inputs, np.random.default_rng(seed + outputs + inputs))
    return pack_weight(weight), dequantize(weight)


# Outputs and groups of inputs -> numbers of rows.
SHAPES = {
    (16, 1): (1, 4, 7, 24),
    (1, 2): (1, 5),
    (33, 3): (1, 2, 3, 4, 7, 16, 21, 51),
    (100, 18): (30,),
    (289, 33): (27,),  # more than one tile of inputs, more than one run of panels
    (40, 11): (48, 63),  # whole blocks of 16 rows, and the most of one
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("poisoned")
def test_matches_reference(use_isa: UseISA, kind: str) -> None:
    for (outputs, groups), counts in SHAPES.items():
        panels, weight = panels_and_weight(kind, outputs, groups)
        for rows in counts:
            x = np.random.default_rng(rows).standard_normal((rows, panels.inputs)).astype("f4")
            expected = reference.linear(x, weight)
            for isa in HERE:
                error = np.abs(linear(use_isa(isa), x, panels, threads=2) - expected)
                allowed = 1e-6 * np.abs(weight).max() * panels.inputs
                assert error.max() <= allowed, (isa, outputs, groups, rows)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_codes_fit_their_sums(use_isa: UseISA, kind: str, sign: int) -> None:
    """Sums of few products have 16 bits with some instruction sets, both terms of activations."""
    weight = random_weight(kind, 33, 512, np.random.default_rng(7))
    most = (1 << weight.kind.bits) - 1
    panels = pack_weight(replace(weight, codes=np.full_like(weight.codes, most)))
    weight_values = dequantize(unpack_weight(panels))
    for rows, isa in itertools.product((1, 4, 17), HERE):
        x = np.full((rows, panels.inputs), 127 * sign, np.float32)
        found = linear(use_isa(isa), x, panels)
        expected = reference.linear(x, weight_values)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3, err_msg=isa)
        x.reshape(rows, -1, 32)[..., 1:] = 126.5 * sign
        found = linear(use_isa(isa), x, panels, fine=True)
        exact = x.astype(np.float64) @ weight_values.T.astype(np.float64)
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=0.1, err_msg=isa)


@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_activations_round_less(use_isa: UseISA, kind: str) -> None:
    panels, weight = panels_and_weight(kind, 64, 3)
    for rows, isa in itertools.product((1, 9), HERE):
        x = np.random.default_rng(5).standard_normal((rows, panels.inputs)).astype(np.float32)
        exact = x.astype(np.float64) @ weight.T.astype(np.float64)
        coarse, fine = (
            np.abs(linear(use_isa(isa), x, panels, fine=f) - exact).max() for f in (False, True)
        )
        assert fine < 0.01 * coarse, (isa, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_company_makes_no_difference(use_isa: UseISA, kind: str) -> None:
    panels, _ = panels_and_weight(kind, 48, 19)
    x = np.random.default_rng(6).standard_normal((50, panels.inputs)).astype(np.float32)
    for fine, isa in itertools.product((False, True), HERE):
        compiled = use_isa(isa)
        together = linear(compiled, x, panels, fine=fine, threads=2)
        for row in range(50):
            alone = linear(compiled, x[row : row + 1], panels, fine=fine)
            np.testing.assert_array_equal(alone[0], together[row], err_msg=f"{isa} {row}")


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e30])
def test_extreme_activations_stay_finite(compiled: ctypes.CDLL, scale: float) -> None:
    panels, weight = panels_and_weight("int4_affine", 16, 2)
    x = np.full((2, 64), scale, np.float32)
    x[:, 3] *= -1
    expected = reference.linear(x, weight)
    for fine in (False, True):
        y = linear(compiled, x, panels, fine=fine)
        assert np.isfinite(y).all()
        if scale != 1e-42:  # 127 steps of a subnormal are fewer
            np.testing.assert_allclose(y, expected, rtol=1e-2, atol=abs(scale))


@pytest.mark.parametrize("kind", KINDS)
def test_broken_activations_show(compiled: ctypes.CDLL, kind: str) -> None:
    panels, _ = panels_and_weight(kind, 16, 2)
    for value in (np.nan, np.inf):
        x = np.ones((1, panels.inputs), np.float32)
        x[0, 40] = value
        for fine in (False, True):
            assert np.isnan(linear(compiled, x, panels, fine=fine)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [1, 40, 5000])
def test_panels_keep_every_number(kind: str, outputs: int) -> None:
    traits = KINDS[kind]
    rng = np.random.default_rng(outputs)
    weight = random_weight(kind, outputs, 2 * traits.inputs_multiple, rng)
    panels = pack_weight(weight)
    back = unpack_weight(panels).arrays()
    for name, array in weight.arrays().items():
        np.testing.assert_array_equal(back[name], array)
    assert panels.data.shape == packed_shape(*weight.shape, traits)
    padded = -(-outputs // 16) * 16
    bytes_of_8_groups = 8 * traits.group_bytes + traits.block_bytes
    assert panels.data.nbytes * 4096 == padded * weight.shape[1] * bytes_of_8_groups
    index = [outputs - 1, 0, outputs // 2, outputs // 2]
    np.testing.assert_array_equal(rows_of(panels, index), dequantize(weight)[index])


def test_panels_of_another_size() -> None:
    panels, _ = panels_and_weight("int5_symmetric", 32, 2)
    for data in (
        panels.data[:1],
        panels.data[:, :1],
        panels.data[..., :-1],
        panels.data.view("i1"),
    ):
        with pytest.raises(ValueError, match="panels of 32 x 64 int5_symmetric"):
            PackedWeights(data, 32, 64, panels.kind)
    with pytest.raises(ValueError, match="64 inputs are not groups of 256, as int4_k has them"):
        PackedWeights(panels.data, 32, 64, KINDS["int4_k"])


def test_the_peak_counts_its_operations(compiled: ctypes.CDLL) -> None:
    one, six = (compiled.edgellm_bare_products(*given) for given in ((1, 5), (3, 10)))
    assert six == 6 * one > 0
