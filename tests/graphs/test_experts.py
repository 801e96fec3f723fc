"""Layers with experts: their configs, their tensors, and files that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hf_weights import Integers, write_safetensors
from safetensors.numpy import load_file, save_file
from tiny_gguf import FILES, convert
from tiny_models import make

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.config import ModelConfig, repeated
from edgellm.graphs.layer_config import Attention, LayerConfig, Mlp, Rope, SharedExpert
from edgellm.graphs.tensor import Tensor, stacked
from edgellm.graphs.tensors import (
    layer_tensors,
    multiplied_parameters,
    parameters,
    used_parameters,
)
from edgellm.kernels.experts import Routing
from edgellm.kernels.quantized import KINDS, QuantizedWeight, dequantize

ROUTING = Routing(experts=5, used=2, normalized=False, scale=1.5)
LAYER = LayerConfig(
    mixer=Attention(heads=6, kv_heads=2, head_dim=16),
    mlp=Mlp(intermediate=160),
    experts=ROUTING,
)
CONFIG = ModelConfig(
    model_type="random",
    vocab_size=320,
    hidden_size=96,
    layers=(LAYER, replace(LAYER, experts=None)),
    ropes=(Rope(inv_freq=(1.0, 0.1)),),
    norm_eps=1e-5,
    context_length=1024,
    tied_embedding=True,
)


def test_config_survives_json() -> None:
    assert ModelConfig.from_json(json.loads(json.dumps(CONFIG.to_json()))) == CONFIG
    assert CONFIG.has_experts
    assert not replace(CONFIG, layers=repeated(CONFIG.layers[1], 2)).has_experts


def test_a_layer_without_experts_is_written_as_before_there_were_any() -> None:
    values = json.loads(json.dumps(CONFIG.to_json()))
    assert "experts" in values["layers"][0]
    assert set(values["layers"][0]["experts"]) == {"experts", "used", "normalized", "scale"}
    assert {"experts", "shared"}.isdisjoint(values["layers"][1])
    assert "sinks" not in values["layers"][1]["attention"]
    assert ModelConfig.from_json(values) == CONFIG


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": 0}, "experts is 0; 1 to 4096"),
        ({"experts": 10**30}, "experts is 10+; 1 to 4096"),
        ({"used": 0}, "used is 0; 1 to"),
        ({"used": -(1 << 200)}, "used is a number of 201 bits"),
        ({"used": 6}, "a token uses 6 experts of 5"),
        ({"scale": 0.0}, r"scale of the experts is 0\.0; it must be positive"),
        ({"scale": float("nan")}, "scale of the experts is nan"),
    ],
)
def test_impossible_routings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        replace(LAYER, experts=replace(ROUTING, **changes))


def test_experts_of_another_shape_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="experts without a gate"):
        replace(LAYER, mlp=replace(LAYER.mlp, gated=False))
    with pytest.raises(UnsupportedModelError, match="clamped SwiGLU without a gate"):
        replace(LAYER.mlp, gated=False, activation="clamped_swiglu")
    with pytest.raises(ModelFormatError, match="shared expert in a layer without experts"):
        replace(LAYER, experts=None, shared=SharedExpert(intermediate=32))
    with pytest.raises(UnsupportedModelError, match="shared expert's intermediate_size is 40"):
        replace(CONFIG, layers=(replace(LAYER, shared=SharedExpert(intermediate=40)),))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"used": True}, "used is True; expected an integer"),
        ({"temperature": 1}, "unknown key 'temperature'"),
    ],
)
def test_damaged_json_is_refused(change: dict[str, Any], words: str) -> None:
    values = json.loads(json.dumps(CONFIG.to_json()))
    values["layers"][0]["experts"].update(change)
    with pytest.raises(ModelFormatError, match=words):
        ModelConfig.from_json(values)


def test_tensors_are_stacked() -> None:
    shapes = {spec.name: (spec.shape, spec.role) for spec in layer_tensors(CONFIG, 0)}
    assert shapes["router"] == ((5, 96), "router")
    assert shapes["gate"] == shapes["up"] == ((5 * 160, 96), "linear")
    assert shapes["down"] == ((5 * 96, 160), "linear")
    assert "router" not in {spec.name for spec in layer_tensors(CONFIG, 1)}


def test_tensors_beside_the_stacks() -> None:
    layer = replace(
        LAYER,
        mixer=replace(LAYER.attention, sinks=True),
        mlp=replace(LAYER.mlp, bias=True),
        experts=replace(ROUTING, bias=True, selection_bias=True),
        shared=SharedExpert(intermediate=64, routed=True),
    )
    config = replace(CONFIG, layers=(layer,))
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    shapes = {spec.name: spec.shape for spec in layer_tensors(config, 0)}
    assert shapes["sinks"] == (6,)
    assert shapes["router_bias"] == shapes["selection_bias"] == (5,)
    assert shapes["gate_bias"] == shapes["up_bias"] == (5 * 160,)
    assert shapes["down_bias"] == (5 * 96,)
    assert shapes["shared_router"] == (96,)
    assert shapes["shared_gate"] == shapes["shared_up"] == (64, 96)
    assert shapes["shared_down"] == (96, 64)


def test_a_token_uses_a_part_of_the_parameters() -> None:
    attention, mlp, router, others = 96 * 160 + 96 * 96, 3 * 96 * 160, 5 * 96, 320 * 96 + 5 * 96
    assert parameters(CONFIG) == 2 * attention + 6 * mlp + router + others
    assert used_parameters(CONFIG) == 2 * attention + 3 * mlp + router + others
    assert multiplied_parameters(CONFIG) == 2 * attention + 3 * mlp + router


def tensor_of(kind: str, seed: int, *, shape: tuple[int, int] = (32, 64)) -> Tensor:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << KINDS[kind].bits, shape).astype(np.uint8)
    scale = rng.uniform(0.5, 2, (shape[0], shape[1] // 32)).astype(np.float16)
    offset = -scale if KINDS[kind].affine else None
    weight = QuantizedWeight(KINDS[kind], codes, scale, offset)
    return Tensor(shape, "GPTQ", lambda: dequantize(weight), lambda: weight, nbytes=7)


@pytest.mark.parametrize("kinds", [("int4_symmetric",) * 3, ("int8_symmetric", "int8_affine")])
def test_stacks_keep_codes(kinds: tuple[str, ...]) -> None:
    """Of one kind they stay what they are; else those without offsets get some."""
    each = [tensor_of(kind, seed) for seed, kind in enumerate(kinds)]
    stack = stacked(each, name="m")
    assert stack.shape == (32 * len(kinds), 64)
    assert stack.nbytes == 7 * len(kinds)
    assert stack.quantized is not None
    weight, values = stack.quantized(), stack.float32()
    assert weight.kind.name == kinds[-1]
    np.testing.assert_array_equal(values, np.concatenate([tensor.float32() for tensor in each]))
    np.testing.assert_allclose(dequantize(weight), values, rtol=0, atol=2**-11 * 128 * 2)


def test_a_stack_with_a_float_matrix_is_float() -> None:
    float_one = replace(tensor_of("int4_symmetric", 1), quantized=None, storage="F32")
    stack = stacked([tensor_of("int4_symmetric", 0), float_one], name="m")
    assert stack.quantized is None
    assert stack.storage == "F32/GPTQ"


def test_matrices_are_read_one_after_the_other() -> None:
    held: list[int] = []

    def read(index: int) -> np.ndarray:
        held.append(index)
        return np.full((2, 32), index, np.float32)

    each = [Tensor((2, 32), "F32", lambda i=i: read(i)) for i in range(4)]
    stack = stacked(each, name="m")
    assert held == []
    assert stack.float32()[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert held == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "layer", "part", "file", "axis"),
    [
        ("qwen3_moe", 2, "gate", "mlp.experts.{}.gate_proj", None),
        ("qwen3_moe_mixed", 1, "down", "mlp.experts.{}.down_proj", None),
        ("olmoe", 0, "up", "mlp.experts.{}.up_proj", None),
        ("mixtral", 1, "up", "block_sparse_moe.experts.{}.w3", None),
        ("granitemoe", 1, "up", "block_sparse_moe.input_linear", 1),
    ],
)
def test_rows_of_experts_follow_each_other(
    tmp_path: Path, name: str, layer: int, part: str, file: str, axis: int | None
) -> None:
    make(name, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    experts = checkpoint.config.layers[layer].experts
    assert experts is not None
    found = checkpoint.tensor(f"layers.{layer}.{part}").float32()
    for index, rows in enumerate(np.split(found, experts.experts)):
        key = f"model.layers.{layer}.{file.format(index)}.weight"
        expected = state[key] if axis is None else np.split(state[key][index], 2)[axis]
        np.testing.assert_array_equal(rows, expected)


def test_layers_may_differ(tmp_path: Path) -> None:
    make("qwen3_moe_mixed", tmp_path)
    layers = open_checkpoint(tmp_path).config.layers
    assert [layer.experts is not None for layer in layers] == [False, True, False, False]
    assert [layer.mlp.intermediate for layer in layers] == [96, 64, 96, 96]


State = dict[str, np.ndarray]
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"


def without_expert(state: State) -> None:
    del state[EXPERT]


def narrow_expert(state: State) -> None:
    state[EXPERT] = state[EXPERT][:16]


def flat_expert(state: State) -> None:
    state[EXPERT] = state[EXPERT].reshape(-1)


def small_router(state: State) -> None:
    state[ROUTER] = state[ROUTER][:4]


def turned_router(state: State) -> None:
    state[ROUTER] = np.ascontiguousarray(state[ROUTER].T)


def damaged_expert(state: State) -> None:
    state[EXPERT] = np.full_like(state[EXPERT], np.nan)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_expert, r"experts\.2\.up_proj\.weight is missing"),
        (narrow_expert, r"experts\.\*\.up_proj\.weight have the shapes \[16, 64\] and \[32, 64\]"),
        (flat_expert, r"shapes \[32, 64\] and \[2048\]"),
        (small_router, r"layers\.1\.router has shape \[4, 64\], but the config asks for \[5, 64\]"),
        (turned_router, r"layers\.1\.router has shape \[64, 5\]"),
    ],
)
def test_folders_that_do_not_fit(
    tmp_path: Path, change: Callable[[State], None], words: str
) -> None:
    make("qwen3_moe", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match=words):
        open_checkpoint(tmp_path)


def test_a_damaged_expert_is_found_when_it_is_read(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    damaged_expert(state)
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ModelFormatError, match=r"experts\.2\.up_proj\.weight holds a value"):
        checkpoint.tensor("layers.1.up").float32()


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"),
    [
        ("qwen3_moe", {"num_local_experts": 6}, ModelFormatError, r"asks for \[6, 64\]|is missing"),
        ("qwen3_moe", {"num_experts": 6}, ModelFormatError, "num_experts and .* differ"),
        ("qwen3_moe", {"num_experts_per_tok": 6}, ModelFormatError, "uses 6 experts of 5"),
        ("qwen3_moe", {"num_experts_per_tok": None}, ModelFormatError, "per_tok' is missing"),
        ("qwen3_moe", {"moe_intermediate_size": 16}, UnsupportedModelError, "multiple of 32"),
        ("qwen3_moe", {"moe_intermediate_size": 64}, ModelFormatError, r"asks for \[320, 64\]"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, ModelFormatError, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, ModelFormatError, "layers.1.mlp.gate_proj"),
        ("qwen3_moe", {"use_sliding_window": True}, UnsupportedModelError, "use_sliding_window"),
        ("qwen3_moe", {"shared_expert_size": 9}, UnsupportedModelError, "shared_expert_size = 9"),
        ("olmoe", {"clip_qkv": 8.0}, UnsupportedModelError, "clip_qkv = 8.0"),
        ("olmoe", {"num_experts": None}, ModelFormatError, "num_experts' is missing"),
        ("mixtral", {"num_local_experts": 0}, ModelFormatError, "experts is 0"),
        ("granitemoe", {"num_local_experts": 3}, ModelFormatError, r"router has shape \[7, 64\]"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(
    tmp_path: Path, name: str, changes: Mapping[str, Any], error: type, words: str
) -> None:
    make(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(error, match=words):
        open_checkpoint(tmp_path)


def test_quantized_experts_of_a_folder_are_taken_over(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path, hidden_size=64, moe_intermediate_size=64)
    tensors, expected = load_file(tmp_path / "model.safetensors"), []
    rng = np.random.default_rng(0)
    for expert in range(5):
        key = f"model.layers.1.mlp.experts.{expert}.gate_proj"
        integers = Integers(rng, 64, 64, group=32)
        del tensors[f"{key}.weight"]
        tensors |= {key + suffix: part for suffix, part in integers.gptq().items()}
        expected.append(integers.values())
    write_safetensors(tmp_path / "model.safetensors", tensors)
    path = tmp_path / "config.json"
    description = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": description})
    )
    tensor = open_checkpoint(tmp_path).tensor("layers.1.gate")
    assert tensor.quantized is not None
    np.testing.assert_allclose(dequantize(tensor.quantized()), np.concatenate(expected), atol=2e-2)
    np.testing.assert_allclose(tensor.float32(), np.concatenate(expected), rtol=1e-6)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantized_experts_of_a_file_are_taken_over(tmp_path: Path, kind: str, fuse: bool) -> None:
    arch, keys, _ = FILES["qwen3_moe"]
    make("qwen3_moe", tmp_path)
    stored = gguf.GGMLQuantizationType[kind]
    path = convert(tmp_path, tmp_path / "m.gguf", arch, keys, kind=stored, fuse=fuse)
    checkpoint = open_checkpoint(path)
    file = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for part in ("up", "down"):
        tensor = checkpoint.tensor(f"layers.1.{part}")
        assert tensor.storage == kind
        assert tensor.quantized is not None
        np.testing.assert_array_equal(dequantize(tensor.quantized()), tensor.float32())
        if part == "up" and fuse:
            whole = gguf.dequantize(file["blk.1.ffn_gate_up_exps.weight"].data, stored)[:, 32:]
        else:
            whole = gguf.dequantize(file[f"blk.1.ffn_{part}_exps.weight"].data, stored)
        np.testing.assert_array_equal(tensor.float32(), whole.reshape(tensor.shape))


def file_of(
    folder: Path, *, tensors: Callable[[str, np.ndarray], np.ndarray] | None = None, **keys: Any
) -> Path:
    """A file of Qwen3-MoE with other tensors, or with keys in place of or beside its own."""
    arch, own, _ = FILES["qwen3_moe"]
    make("qwen3_moe", folder)

    def add(writer: gguf.GGUFWriter) -> None:
        own(writer)
        for key, value in keys.items():
            name = f"{writer.arch}.{key}"
            writer.kv_data[0].pop(name, None)
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
        add_tensor = writer.add_tensor
        if tensors is not None:
            writer.add_tensor = lambda name, values, **options: add_tensor(
                name, np.ascontiguousarray(tensors(name, values)), **options
            )

    return convert(folder, folder / "model.gguf", arch, add)


def turned(name: str, values: np.ndarray) -> np.ndarray:
    return values.swapaxes(0, 1) if name == "blk.1.ffn_up_exps.weight" else values


def of_two_dimensions(name: str, values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, 64) if name == "blk.1.ffn_up_exps.weight" else values


def short(name: str, values: np.ndarray) -> np.ndarray:
    return values[:, :31] if name == "blk.1.ffn_up_exps.weight" else values


def short_router(name: str, values: np.ndarray) -> np.ndarray:
    return values[:4] if name == "blk.1.ffn_gate_inp.weight" else values


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (turned, r"ffn_up_exps.weight has shape \[32, 5, 64\].*stack of 5 matrices"),
        (of_two_dimensions, r"ffn_up_exps.weight has shape \[160, 64\].*stack of 5 matrices"),
        (short, r"layers\.1\.up has shape \[155, 64\], but the config asks for \[160, 64\]"),
        (short_router, r"layers\.1\.router has shape \[4, 64\]"),
    ],
)
def test_tensors_of_other_dimensions_are_refused(
    tmp_path: Path, tensors: Callable[[str, np.ndarray], np.ndarray], words: str
) -> None:
    path = file_of(tmp_path, tensors=tensors)
    with pytest.raises(ModelFormatError, match=words):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("expert_count", 6, ModelFormatError, "stack of 6|asks for"),
        ("expert_used_count", 6, ModelFormatError, "uses 6 experts of 5"),
        ("expert_feed_forward_length", 64, ModelFormatError, "asks for"),
        ("expert_gating_func", 4, UnsupportedModelError, "expert_gating_func = 4"),
        ("expert_shared_count", 1, UnsupportedModelError, "expert_shared_count = 1"),
        ("expert_shared_feed_forward_length", 32, UnsupportedModelError, "shared_feed_forward"),
        ("expert_group_count", 4, ModelFormatError, "3 experts of 1 of 4 groups of 5 experts"),
        ("expert_weights_scale", -1.0, ModelFormatError, "scale of the experts is -1"),
    ],
)
def test_keys_that_are_refused(
    tmp_path: Path, key: str, value: Any, error: type, words: str
) -> None:
    path = file_of(tmp_path, **{key: value})
    with pytest.raises(error, match=words):
        open_checkpoint(path)


def test_keys_of_the_router_count(tmp_path: Path) -> None:
    keys = {"expert_weights_norm": False, "expert_weights_scale": 2.5, "expert_gating_func": 1}
    config = open_checkpoint(file_of(tmp_path, **keys)).config
    assert config.layers[0].experts == Routing(experts=5, used=3, normalized=False, scale=2.5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (2, {"scores": "sigmoid", "normalized": False}),
        (3, {"scores": "softmax", "normalized": True}),
    ],
)
def test_kinds_of_routers(tmp_path: Path, kind: int, expected: dict[str, Any]) -> None:
    keys = {"expert_weights_norm": False, "expert_gating_func": kind}
    config = open_checkpoint(file_of(tmp_path, **keys)).config
    assert config.layers[0].experts == Routing(experts=5, used=3, **expected)


def test_a_file_with_tensors_for_each_expert_is_refused(tmp_path: Path) -> None:
    arch, keys, changes = FILES["mixtral"]
    make("mixtral", tmp_path, **changes)

    def add(writer: gguf.GGUFWriter) -> None:
        keys(writer)
        writer.add_tensor("blk.0.ffn_gate.0.weight", np.zeros((96, 64), np.float32))

    path = convert(tmp_path, tmp_path / "model.gguf", arch, add)
    with pytest.raises(UnsupportedModelError, match=r"tensors of its own.*newer file"):
        open_checkpoint(path)
