"""compressed-tensors: groups by index, tensors that do not fit, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_formats import described
from hf_weights import Parts, words

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.kernels.quantized import dequantize

WriteModel = Callable[..., Path]
Refuses = Callable[..., None]

KEY = "model.layers.0.self_attn.k_proj"
ROWS, COLUMNS = 64, 128
RNG = np.random.default_rng(5)


def config_of(layout: str = "pack-quantized", top: Any = None, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    values = {"format": layout, "config_groups": groups, "ignore": ["lm_head"], **(top or {})}
    return described("compressed-tensors", **values)


def random_codes(columns: int = COLUMNS) -> np.ndarray:
    return RNG.integers(0, 16, (ROWS, columns))


def parts_of(**changes: np.ndarray | None) -> Parts:
    parts = {
        "packed": words(random_codes(), 4, np.int32),
        "scale": np.full((ROWS, COLUMNS // 32), 0.01, np.float16),
        "shape": np.array([ROWS, COLUMNS], np.int64),
        **changes,
    }
    return {f".weight_{name}": part for name, part in parts.items() if part is not None}


@pytest.mark.parametrize("packed_zeros", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_groups_by_index(write_model: WriteModel, packed_zeros: bool, scattered: bool) -> None:
    codes, zeros = random_codes(), random_codes(COLUMNS // 32)
    index = np.repeat([2, 0, 3, 1], 32).astype(np.int32)
    if scattered:
        index = RNG.permutation(index)
    scale = RNG.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
    stored = words(zeros.T, 4, np.int32).T if packed_zeros else (zeros - 8).astype(np.int8)
    parts = parts_of(packed=words(codes, 4, np.int32), scale=scale, zero_point=stored, g_idx=index)
    folder = write_model({KEY: parts}, config_of(symmetric=False, actorder="group"))
    tensor = open_checkpoint(folder).tensor("layers.0.k")
    expected = (codes - zeros[:, index]) * scale.astype(np.float32)[:, index]
    np.testing.assert_array_equal(tensor.float32(), expected.astype(np.float32))
    assert (tensor.quantized is None) == scattered
    if tensor.quantized is not None:
        np.testing.assert_array_equal(tensor.quantized().codes, codes)
        assert np.abs(dequantize(tensor.quantized()) - expected).max() < 15 * 0.02 * 2**-11


def test_an_index_that_is_unset(write_model: WriteModel) -> None:
    parts = parts_of(g_idx=np.full(COLUMNS, -1, np.int32))
    tensor = open_checkpoint(write_model({KEY: parts}, config_of())).tensor("layers.0.k")
    assert tensor.quantized is not None
    assert tensor.quantized().kind.name == "int4_symmetric"
    np.testing.assert_array_equal(dequantize(tensor.quantized()), tensor.float32())


def test_zeros_that_are_missing(write_model: WriteModel) -> None:
    folder = write_model({KEY: parts_of()}, config_of(symmetric=False))
    with pytest.raises(ModelFormatError, match="there is int 4 in groups of 32 with zero points"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (parts_of(scale=None), "weight_scale is missing"),
        (parts_of(shape=None), "weight_shape is missing"),
        (parts_of(shape=np.array([ROWS, 0])), r"weight_shape is \[64, 0\]"),
        (parts_of(shape=np.array([ROWS - 1, COLUMNS])), "weight_packed has 64 rows"),
        (parts_of(shape=np.array([ROWS, 96])), "16 words a row; 96 inputs of 4 or 8 bits"),
        (parts_of(shape=np.array([ROWS, 64])), r"no config group has .* 8 bits in groups of 16"),
        (parts_of(scale=np.ones((ROWS, 3), np.float16)), r"weight_scale has shape \[64, 3\]"),
        (parts_of(scale=np.ones((ROWS, 2), np.float16)), r"bits in groups of 64, as the tensors"),
        (parts_of(scale=np.full((ROWS, 4), np.inf, np.float16)), "infinite or not a number"),
        (parts_of(g_idx=np.full(COLUMNS, 9, np.int32)), "groups 9 to 9; .* groups 0 to 3"),
    ],
)
def test_tensors_that_do_not_fit(write_model: WriteModel, parts: Parts, words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        open_checkpoint(write_model({KEY: parts}, config_of()))


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (config_of("marlin-24"), UnsupportedModelError, "format 'marlin-24'"),
        (described("compressed-tensors"), ModelFormatError, "'config_groups' is missing"),
        (
            config_of(top={"transform_config": {"config_groups": {"R1": {}}}}),
            UnsupportedModelError,
            "transform_config is set",
        ),
        (
            config_of(top={"config_groups": {"W4A16": ["Linear"]}}),
            UnsupportedModelError,
            r"config_groups\.W4A16 is \['Linear'\]",
        ),
    ],
)
def test_what_is_refused(refuses: Refuses, config: Any, error: type, words: str) -> None:
    refuses({}, config, error, words)
