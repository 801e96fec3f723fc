"""8-bit floats with scales for all, for outputs and for blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hf_formats import described
from hf_weights import Parts, fp8, write_safetensors
from safetensors.numpy import load_file, save_file
from tiny_models import make

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.tensors import model_tensors

WriteModel = Callable[..., Path]
Refuses = Callable[..., None]

KEY = "model.layers.0.self_attn.k_proj"
ROWS, COLUMNS = 64, 128
RNG = np.random.default_rng(5)
E4M3 = np.zeros((ROWS, COLUMNS), ml_dtypes.float8_e4m3fn)
ONE = np.ones((1,), np.float32)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize(
    ("block", "shape"),
    [
        ([128, 128], (1, 1)),
        ([48, 80], (2, 2)),
        ([32, 128], (2, 1)),
        (None, ()),
        (None, (1,)),
        (None, (64,)),
        (None, (64, 1)),
    ],
)
def test_fp8(write_model: WriteModel, name: str, block: Any, shape: tuple[int, ...]) -> None:
    weight = RNG.standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.float8_e4m3fn)
    scale = RNG.uniform(0.01, 0.02, shape).astype(np.float32)
    parts = {".weight": weight, f".{name}": np.asarray(scale)}
    changes = {} if block is None else {"weight_block_size": block}
    config = described("fp8", activation_scheme="dynamic", modules_to_not_convert=["lm_head"])
    config["quantization_config"] |= changes
    tensor = open_checkpoint(write_model({KEY: parts}, config)).tensor("layers.0.k")
    assert tensor.quantized is None
    values = tensor.float32()
    for n in range(ROWS):
        for k in range(COLUMNS):
            place = (n // block[0], k // block[1]) if block else (n, 0)[: len(shape)]
            factor = scale.reshape(-1)[0] if scale.size == 1 else scale[place]
            assert values[n, k] == np.float32(weight[n, k]) * factor


def test_fp8_with_powers_of_two(write_model: WriteModel) -> None:
    weight = RNG.standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[2.0**-5]]).astype(ml_dtypes.float8_e8m0fnu)
    parts = {".weight": weight, ".weight_scale_inv": scale}
    config = described("fp8", weight_block_size=[128, 128], scale_fmt="ue8m0")
    tensor = open_checkpoint(write_model({KEY: parts}, config)).tensor("layers.0.k")
    np.testing.assert_array_equal(tensor.float32(), weight.astype(np.float32) / 32)


def test_a_folder_of_deepseek_v3(tmp_path: Path) -> None:
    """As it is released: blocks end within heads, and within tensors that are two parts."""
    make("deepseek_v3", tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    coded: dict[str, np.ndarray] = dict(plain)
    for name in plain:
        if name.endswith(("_proj.weight", "_mqa.weight")):
            parts, values = fp8(RNG, *plain[name].shape, block=(40, 48))
            plain[name] = np.ascontiguousarray(values)
            coded |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    save_file(plain, tmp_path / "model.safetensors")
    released = tmp_path / "released"
    released.mkdir()
    config = json.loads((tmp_path / "config.json").read_text())
    config |= described("fp8", weight_block_size=[40, 48], modules_to_not_convert=["lm_head"])
    (released / "config.json").write_text(json.dumps(config))
    write_safetensors(released / "model.safetensors", coded)
    expected, opened = open_checkpoint(tmp_path), open_checkpoint(released)
    for name in model_tensors(expected.config):
        same = np.array_equal(opened.tensor(name).float32(), expected.tensor(name).float32())
        assert same, name


@pytest.mark.parametrize("size", [ROWS * COLUMNS, 1 << 40])
def test_blocks_larger_than_the_weight(write_model: WriteModel, size: int) -> None:
    """One scale is for all of it, and no more memory is taken for a larger block."""
    parts = {".weight": (E4M3 + 1).astype(E4M3.dtype), ".weight_scale_inv": np.array([[3.0]], "f")}
    folder = write_model({KEY: parts}, described("fp8", weight_block_size=[size, size]))
    assert (open_checkpoint(folder).tensor("layers.0.k").float32() == 3).all()


@pytest.mark.parametrize(
    ("parts", "config", "error", "words"),
    [
        ({".weight": E4M3}, described("fp8"), ModelFormatError, r"weight_scale is missing"),
        (
            {".weight": E4M3, ".weight_scale_inv": np.ones((2, 1), np.float32)},
            described("fp8", weight_block_size=[128, 128]),
            ModelFormatError,
            r"shape \[2, 1\], which is neither .* for each block of \[128, 128\]",
        ),
        (
            {".weight": E4M3, ".weight_scale": ONE},
            described("fp8", weight_block_size=[128]),
            ModelFormatError,
            "weight_block_size is .*two numbers above 0",
        ),
        (
            {".weight": E4M3, ".weight_scale": ONE},
            described("fp8", ignored_layers=["model.layers.0"]),
            ModelFormatError,
            r"model\.layers\.0 is not quantized, but the tensors of .*k_proj are",
        ),
        (
            {".weight": E4M3.astype(ml_dtypes.float8_e5m2), ".weight_scale": ONE},
            described("fp8"),
            UnsupportedModelError,
            "is stored as F8_E5M2",
        ),
        ({".weight": E4M3, ".weight_scale": ONE}, {}, ModelFormatError, "quantization_config"),
    ],
)
def test_what_is_refused(
    refuses: Refuses, parts: Parts, config: Any, error: type, words: str
) -> None:
    refuses({KEY: parts}, config, error, words)
