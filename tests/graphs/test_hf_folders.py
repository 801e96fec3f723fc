"""Folders of quantized weights, whatever their format is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_formats import described
from hf_weights import mlx_affine, write_safetensors

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import open_checkpoint

WriteModel = Callable[..., Path]
Refuses = Callable[..., None]

KEY = "model.layers.0.self_attn.k_proj"
ROWS, COLUMNS = 64, 128
MLX = {"quantization": {"group_size": 64, "bits": 4}}


def test_nothing_but_scales_is_read_to_open(write_model: WriteModel) -> None:
    """Shapes and kinds are known before codes are; a file that is cut off inside is refused."""
    parts, _ = mlx_affine(np.random.default_rng(5), ROWS, COLUMNS, bits=4, group=64)
    folder = write_model({KEY: parts}, MLX)
    tensor = open_checkpoint(folder).tensor("layers.0.k")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 8])
    assert tensor.shape == (ROWS, COLUMNS)
    assert tensor.quantized is not None
    for read in (tensor.float32, tensor.quantized):
        with pytest.raises(ModelFormatError, match=r"model\.safetensors: tensor .* is cut off"):
            read()


def test_quantized_tensors_in_shards(write_model: WriteModel) -> None:
    from safetensors.numpy import load_file

    parts, values = mlx_affine(np.random.default_rng(5), ROWS, COLUMNS, bits=4, group=64)
    folder = write_model({KEY: parts}, MLX)
    tensors = load_file(folder / "model.safetensors")
    places = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(sorted(tensors))}
    for place in set(places.values()):
        chosen = {name: tensors[name] for name in tensors if places[name] == place}
        write_safetensors(folder / place, chosen)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    tensor = open_checkpoint(folder).tensor("layers.0.k")
    np.testing.assert_array_equal(tensor.float32(), values)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (described("hqq"), UnsupportedModelError, "'hqq' is not read; read are awq,"),
        ({"quantization_config": {}}, UnsupportedModelError, "quant_method None"),
        ({"quantization_config": "awq"}, ModelFormatError, "expected dict"),
    ],
)
def test_what_is_refused(refuses: Refuses, config: Any, error: type, words: str) -> None:
    refuses({}, config, error, words)
