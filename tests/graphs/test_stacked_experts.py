"""Experts that a folder stacks in one tensor: MXFP4 of gpt-oss, and what MLX writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hf_weights import E2M1, mlx_affine, mlx_mxfp4, words, write_safetensors
from random_checkpoint import exact
from safetensors.numpy import load_file
from tiny_gguf import FILES, convert
from tiny_models import logits, make

from edgellm.errors import ModelFormatError
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.kernels.quantized import dequantize

TOKENS = np.random.default_rng(0).integers(3, 128, 40).tolist()


def describe(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_mxfp4(folder: Path, model: Any) -> None:
    """Random codes in place of the experts of a gpt-oss, in the folder and in the model."""
    import torch

    rng, tensors = np.random.default_rng(1), load_file(folder / "model.safetensors")
    state = dict(model.named_parameters())
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        stack, columns, rows = tensors.pop(key).shape
        codes = rng.integers(0, 16, (stack * rows, columns))
        scales = rng.integers(121, 124, (stack, rows, columns // 32)).astype(np.uint8)
        tensors[f"{key}_blocks"] = words(codes, 4, np.uint8).reshape(stack, rows, -1, 16)
        tensors[f"{key}_scales"] = scales
        powers = np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=2)
        values = np.array(E2M1)[codes].reshape(stack, rows, columns) * powers
        with torch.no_grad():
            state[key].copy_(torch.tensor(values.swapaxes(1, 2)))
    write_safetensors(folder / "model.safetensors", tensors)
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    described = {"quant_method": "mxfp4", "modules_to_not_convert": names}
    describe(folder, quantization_config=described)


def test_mxfp4_of_gpt_oss_is_taken_over(tmp_path: Path) -> None:
    model = make("gpt_oss", tmp_path, num_hidden_layers=2)
    with_mxfp4(tmp_path, model)
    checkpoint = open_checkpoint(tmp_path)
    for part, shape in (("gate", (480, 64)), ("up", (480, 64)), ("down", (320, 96))):
        tensor = checkpoint.tensor(f"layers.1.{part}")
        assert (tensor.shape, tensor.storage) == (shape, "MXFP4")
        assert tensor.quantized is not None
        assert tensor.quantized().kind.name == "mxfp4"
        np.testing.assert_array_equal(dequantize(tensor.quantized()), tensor.float32())
    expected = logits(model, TOKENS)
    computed = exact(checkpoint, TOKENS)[1]
    assert np.square(computed - expected).mean() < 1e-10 * np.square(expected).mean()


# Family -> module of its stacks in MLX, and module of its experts in its own folders.
MLX = {
    "qwen3_moe": "mlp.switch_mlp",
    "glm4_moe": "mlp.switch_mlp",
    "mixtral": "block_sparse_moe.switch_mlp",
    "gpt_oss": "mlp.experts",
}


def stack_of(mode: str, stack: int, rows: int, columns: int) -> tuple[dict[str, Any], np.ndarray]:
    rng = np.random.default_rng(rows)
    if mode == "mxfp4":
        parts, values = mlx_mxfp4(rng, stack * rows, columns)
    else:
        parts, values = mlx_affine(rng, stack * rows, columns, bits=4, group=32)
    return {end: part.reshape(stack, rows, -1) for end, part in parts.items()}, values


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("name", MLX)
def test_stacks_of_mlx_are_taken_over(tmp_path: Path, name: str, mode: str) -> None:
    make(name, tmp_path, num_hidden_layers=2)
    before, config = open_checkpoint(tmp_path), json.loads((tmp_path / "config.json").read_text())
    layer = before.config.layers[1]
    assert layer.experts is not None
    parts_of, biases = ("gate", "up", "down"), {}
    if layer.mlp.bias:
        names = [f"layers.{index}.{part}_bias" for index in range(2) for part in parts_of]
        biases = {name: before.tensor(name).float32() for name in names}
    tensors, values = without_experts(tmp_path), {}
    sizes = {"gate": (layer.mlp.intermediate, 64), "up": (layer.mlp.intermediate, 64)}
    sizes["down"] = 64, layer.mlp.intermediate
    first = int(name == "glm4_moe")  # whose first layer is dense
    for index in range(first, 2):
        for part, (rows, columns) in sizes.items():
            parts, values[part] = stack_of(mode, layer.experts.experts, rows, columns)
            key = f"model.layers.{index}.{MLX[name]}.{part}_proj"
            tensors |= {key + end: array for end, array in parts.items()}
            if layer.mlp.bias:
                bias = biases[f"layers.{index}.{part}_bias"]
                tensors[f"{key}.bias"] = bias.reshape(layer.experts.experts, -1)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    described = {"group_size": 32, "bits": 4, "mode": mode}
    describe(tmp_path, **{**config, "quantization": described})
    checkpoint = open_checkpoint(tmp_path)
    for part in sizes:
        tensor = checkpoint.tensor(f"layers.1.{part}")
        assert tensor.quantized is not None
        np.testing.assert_array_equal(tensor.float32(), values[part])
    for bias, expected in biases.items():
        np.testing.assert_array_equal(checkpoint.tensor(bias).float32(), expected)


def without_experts(folder: Path) -> Mapping[str, np.ndarray]:
    tensors = load_file(folder / "model.safetensors")
    return {key: value for key, value in tensors.items() if ".experts." not in key}


def test_stacks_of_floats_are_what_single_experts_are(tmp_path: Path) -> None:
    """As releases of Qwen3.5 have them, where transformers writes one matrix for each expert."""
    make("qwen3_5_moe_text", tmp_path)
    before = open_checkpoint(tmp_path)
    expected = exact(before, TOKENS)[1]
    tensors, file = {**without_experts(tmp_path)}, tmp_path / "model.safetensors"
    for index in range(2):
        gate, up, down = (
            before.tensor(f"layers.{index}.{part}").float32().reshape(5, -1, width)
            for part, width in (("gate", 64), ("up", 64), ("down", 32))
        )
        key = f"model.layers.{index}.mlp.experts."
        tensors |= {f"{key}gate_up_proj": np.concatenate([gate, up], 1), f"{key}down_proj": down}
    write_safetensors(file, tensors)
    np.testing.assert_array_equal(exact(open_checkpoint(tmp_path), TOKENS)[1], expected)


def test_stacks_of_another_number_are_refused(tmp_path: Path) -> None:
    with_mxfp4(tmp_path, make("gpt_oss", tmp_path, num_hidden_layers=1))
    file = tmp_path / "model.safetensors"
    tensors, key = load_file(file), "model.layers.0.mlp.experts.gate_up_proj"
    short = {f"{key}{end}": tensors[f"{key}{end}"][:4] for end in ("_blocks", "_scales")}
    write_safetensors(file, {**tensors, **short})
    with pytest.raises(ModelFormatError, match=r"gate_up_proj has .*\[4, 192, 64\].*5 matrices"):
        open_checkpoint(tmp_path)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    """As GLM-4.5's files have them behind the others, and count them."""
    arch, keys, _ = FILES["glm4_moe"]
    model = make("glm4_moe", tmp_path)

    def add(writer: gguf.GGUFWriter) -> None:
        keys(writer)
        writer.kv_data[0].pop("glm4moe.block_count")
        writer.add_block_count(5)
        writer.add_nextn_predict_layers(1)
        for name in ("attn_q", "nextn.eh_proj"):
            writer.add_tensor(f"blk.4.{name}.weight", np.zeros((32, 64), np.float32))

    checkpoint = open_checkpoint(convert(tmp_path, tmp_path / "m.gguf", arch, add))
    assert checkpoint.config.layer_count == 4
    np.testing.assert_allclose(exact(checkpoint, TOKENS)[1], logits(model, TOKENS), atol=1e-4)
