"""MLX: modes `affine` and `mxfp4`, modules with schemes of their own, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hf_weights import Parts, Weight, mlx_affine

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.kernels.quantized import dequantize

WriteModel = Callable[..., Path]
Refuses = Callable[..., None]

KEY = "model.layers.0.self_attn.k_proj"
ROWS, COLUMNS = 64, 128
RNG = np.random.default_rng(5)


def mlx(bits: int, group: int, dtype: Any) -> Weight:
    return mlx_affine(RNG, ROWS, COLUMNS, bits=bits, group=group, dtype=dtype)


def mlx_config(**changes: Any) -> dict[str, Any]:
    values = {"group_size": 64, "bits": 4, **changes}
    return {"quantization": values, "quantization_config": values}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx(write_model: WriteModel, bits: int, dtype: Any) -> None:
    for group in (32, 64, 128):
        parts, values = mlx(bits, group, dtype)
        folder = write_model({KEY: parts}, mlx_config(bits=bits, group_size=group))
        tensor = open_checkpoint(folder).tensor("layers.0.k")
        assert tensor.storage == f"MLX {bits}-bit"
        np.testing.assert_array_equal(tensor.float32(), values)
        assert tensor.quantized is not None
        quantized = tensor.quantized()
        kind = {5: "int5_affine", 6: "int8_affine", 8: "int8_affine"}.get(bits, "int4_affine")
        assert quantized.kind.name == kind
        assert np.abs(dequantize(quantized) - values).max() < 2**-11 * (0.1 + 2**bits * 0.01)


def test_mlx_modules_with_schemes_of_their_own(write_model: WriteModel) -> None:
    embedding, embedded = mlx(6, 128, np.float16)
    keys, key_values = mlx(4, 64, np.float16)
    head, head_values = mlx(8, 32, np.float16)
    config = mlx_config(
        **{
            "model.embed_tokens": {"bits": 6, "group_size": 128},
            "lm_head": {"bits": 8, "group_size": 32},
        },
        **{KEY: True, "model.layers.0.self_attn.v_proj": False},
    )
    modules = {"model.embed_tokens": embedding, KEY: keys, "lm_head": head}
    checkpoint = open_checkpoint(write_model(modules, config))
    for name, values in [
        ("embedding", embedded),
        ("layers.0.k", key_values),
        ("head", head_values),
    ]:
        np.testing.assert_array_equal(checkpoint.tensor(name).float32(), values)
    assert checkpoint.tensor("layers.0.v").storage == "BF16"


@pytest.mark.parametrize("offset", [0, 1e-9])
def test_mlx_groups_of_one_value(write_model: WriteModel, offset: float) -> None:
    """Mlx gives groups of zeros a scale that no half holds."""
    parts, values = mlx(4, 64, np.float32)
    words_of_group = 64 * 4 // 32
    parts[".weight"] = parts[".weight"].copy()
    parts[".weight"][7, :words_of_group] = 0
    parts[".scales"][7, 0], parts[".biases"][7, 0] = 1e-9, offset
    values[7, :64] = offset
    tensor = open_checkpoint(write_model({KEY: parts}, mlx_config())).tensor("layers.0.k")
    np.testing.assert_array_equal(tensor.float32(), values)
    assert tensor.quantized is (None if offset else tensor.quantized)
    if not offset:
        assert not dequantize(tensor.quantized())[7, :64].any()


@pytest.mark.parametrize(
    ("parts", "config", "error", "words"),
    [
        (mlx(4, 64, np.float16)[0], mlx_config(bits=7), UnsupportedModelError, "bits is 7"),
        (mlx(4, 64, np.float16)[0], mlx_config(group_size=48), UnsupportedModelError, "48"),
        (mlx(4, 64, np.float16)[0], mlx_config(mode="nvfp4"), UnsupportedModelError, "'nvfp4'"),
        (mlx(4, 64, np.float16)[0], mlx_config(bits=3), ModelFormatError, "16 words a row"),
        (mlx(4, 64, np.float16)[0], mlx_config(bits=8), ModelFormatError, r"shape \[64, 2\]"),
        (mlx(4, 64, np.float16)[0], mlx_config(**{KEY: False}), ModelFormatError, "not to be"),
        (mlx(4, 64, np.float16)[0], mlx_config(**{KEY: 4}), ModelFormatError, "an object, true"),
        (
            {k: v for k, v in mlx(4, 64, np.float16)[0].items() if k != ".biases"},
            mlx_config(),
            ModelFormatError,
            "biases is missing",
        ),
    ],
)
def test_what_is_refused(
    refuses: Refuses, parts: Parts, config: Any, error: type, words: str
) -> None:
    refuses({KEY: parts}, config, error, words)
