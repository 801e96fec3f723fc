"""GGUF files as llama.cpp's converter writes them, beside the folders that they are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf
from random_checkpoint import exact
from tiny_gguf import FILES, Keys, convert, falcon_h1, qwen35, write
from tiny_models import make

from edgellm.errors import EdgeLLMError, ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import Checkpoint, open_checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.tensors import model_tensors
from edgellm.kernels.quantized import dequantize


def same_config(opened: ModelConfig, expected: ModelConfig) -> None:
    """Numbers of GGUF files are in single precision."""

    def compare(left: Any, right: Any, where: str) -> None:
        if isinstance(left, dict):
            for key in left:
                compare(left[key], right[key], f"{where}.{key}")
        elif isinstance(left, tuple):
            assert len(left) == len(right), where
            for index, (a, b) in enumerate(zip(left, right, strict=True)):
                compare(a, b, f"{where}[{index}]")
        elif isinstance(left, float) and right is not None:
            assert left == pytest.approx(right, rel=1e-6), where
        else:
            assert left == right, where

    compare(opened.to_json(), expected.to_json(), "config")


def same_tensors(opened: Checkpoint, expected: Checkpoint) -> None:
    for name in model_tensors(expected.config):
        np.testing.assert_allclose(
            opened.tensor(name).float32(),
            expected.tensor(name).float32(),
            rtol=1e-6,
            err_msg=name,
        )


@pytest.mark.parametrize("name", FILES)
def test_files_are_what_their_folders_are(tmp_path: Path, name: str) -> None:
    arch, keys, changes = FILES[name]
    make(name, tmp_path, **changes)
    expected = open_checkpoint(tmp_path)
    opened = open_checkpoint(convert(tmp_path, tmp_path / "model.gguf", arch, keys))
    config = opened.config.to_json()
    if name == "olmo3":
        # files of both families have one architecture
        config["model_type"] = "olmo3"
    if name in ("mixtral", "deepseek_v3", "glm4_moe_lite"):
        config["model_type"] = name
    # a scale that a folder says although it is the usual one
    for layer in config["layers"]:
        if "attention" in layer and layer["attention"]["scale"] is None:
            layer["attention"]["scale"] = expected.config.attention.scale
    same_config(ModelConfig.from_json(config), expected.config)
    same_tensors(opened, expected)


def test_gemma_3n_of_ollama(tmp_path: Path) -> None:
    """With keys of its own, and embeddings for the layers of fewer tokens."""

    def others(w: gguf.GGUFWriter) -> None:
        tiny_gguf.gemma3n(w)
        for name in ("attention.key_length", "attention.value_length", "rope.freq_base_swa"):
            del w.kv_data[0][f"gemma3n.{name}"]
        w.add_uint32("gemma3n.head_dim", 32)
        w.add_float32("gemma3n.rope.freq_base_local", 300.0)
        w.add_bool("gemma3n.altup.correct_scale", True)
        w.add_float32("gemma3n.altup.lr_multiplier", 1.0)

    make("gemma3n_text", tmp_path, vocab_size_per_layer_input=90)
    expected = open_checkpoint(tmp_path)
    opened = open_checkpoint(
        convert(tmp_path, tmp_path / "m.gguf", gguf.MODEL_ARCH.GEMMA3N, others)
    )
    assert opened.config.layer_tokens == 90
    same_config(opened.config, expected.config)
    same_tensors(opened, expected)


def test_latents_of_older_files(tmp_path: Path) -> None:
    """With one tensor for keys and values, and the widths of heads under their usual keys."""

    def older(w: gguf.GGUFWriter) -> None:
        tiny_gguf.deepseek2(w)
        for name, value in (("key_length", 48), ("value_length", 48)):
            w.kv_data[0][f"deepseek2.attention.{name}"].value = value
            del w.kv_data[0][f"deepseek2.attention.{name}_mla"]

    make("deepseek_v2", tmp_path)
    arch = gguf.MODEL_ARCH.DEEPSEEK2
    path = convert(tmp_path, tmp_path / "model.gguf", arch, older, split_latents=False)
    opened, expected = open_checkpoint(path), open_checkpoint(tmp_path)
    same_config(opened.config, expected.config)
    same_tensors(opened, expected)


def test_value_heads_in_the_order_of_files(tmp_path: Path) -> None:
    """As many for each key head as in the folder, in another order."""
    make("qwen3_5_text", tmp_path)
    path = convert(tmp_path, tmp_path / "model.gguf", gguf.MODEL_ARCH.QWEN35, qwen35)
    opened, expected = open_checkpoint(path), open_checkpoint(tmp_path)
    nets = opened.config.layers[0].mixer, expected.config.layers[0].mixer
    assert nets[0] == replace(nets[1], tiled=True)  # type: ignore[type-var]
    tokens = list(range(3, 40))
    left, right = exact(opened, tokens)[1], exact(expected, tokens)[1]
    assert np.square(left - right).mean() < 1e-10 * np.square(right).mean()


def test_factors_that_files_have_in_their_tensors(tmp_path: Path) -> None:
    """The folder has them in its config, and some of them in other places."""
    make("falcon_h1", tmp_path)
    opened, expected = (
        open_checkpoint(path)
        for path in (
            convert(tmp_path, tmp_path / "m.gguf", gguf.MODEL_ARCH.FALCON_H1, falcon_h1),
            tmp_path,
        )
    )
    opened.refuse_unread()  # type: ignore[attr-defined]
    assert opened.config.embedding_scale == 1
    same_config(replace(opened.config, embedding_scale=3.0), expected.config)
    tokens = list(range(3, 40))
    left, right = exact(opened, tokens)[1], exact(expected, tokens)[1]
    assert np.square(left - right).mean() < 1e-10 * np.square(right).mean()


def test_projections_of_delta_nets_that_are_fused_as_in_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp wrote them until January 2026."""
    monkeypatch.setattr(tiny_gguf, "qkv_and_z", lambda tensors, _: tensors)
    arch, keys, changes = FILES["qwen3_next"]
    make("qwen3_next", tmp_path, **changes)
    path = convert(tmp_path, tmp_path / "model.gguf", arch, keys)
    assert "blk.0.ssm_in.weight" in {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    opened = open_checkpoint(path)
    same_tensors(opened, open_checkpoint(tmp_path))
    opened.refuse_unread()  # type: ignore[attr-defined]


def test_blocks_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    make("qwen3_5_text", tmp_path)
    block = "blk.4.attn_norm.weight"

    def keys(drafting: bool) -> Keys:
        def add(writer: gguf.GGUFWriter) -> None:
            qwen35(writer)
            writer.add_tensor(block, np.ones(64, np.float32))
            if drafting:
                writer.kv_data[0].pop("qwen35.block_count")
                writer.add_block_count(5)
                writer.add_nextn_predict_layers(1)

        return add

    def file(drafting: bool) -> Any:
        return open_checkpoint(
            convert(tmp_path, tmp_path / "m.gguf", gguf.MODEL_ARCH.QWEN35, keys(drafting))
        )

    drafting = file(True)
    assert drafting.config.layer_count == 4
    drafting.refuse_unread()
    with pytest.raises(UnsupportedModelError, match=block):
        file(False).refuse_unread()


@pytest.mark.parametrize("name", ["llama", "qwen2", "ernie4_5", "qwen3_moe", "mixtral"])
def test_fused_projections_are_cut(tmp_path: Path, name: str) -> None:
    arch, keys, changes = FILES[name]
    make(name, tmp_path, **changes)
    path = convert(tmp_path, tmp_path / "model.gguf", arch, keys, fuse=True)
    assert "blk.0.attn_qkv.weight" in {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    opened, expected = open_checkpoint(path), open_checkpoint(tmp_path)
    assert opened.config.attention == expected.config.attention
    same_tensors(opened, expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_rows_of_quantized_tensors_are_taken_over_code_by_code(tmp_path: Path, kind: str) -> None:
    """Cut out of fused ones, and in the order of halves."""
    arch, keys, _ = FILES["llama"]
    make("llama", tmp_path)
    stored = gguf.GGMLQuantizationType[kind]
    whole = convert(tmp_path, tmp_path / "m.gguf", arch, keys, kind=stored)
    fused = convert(tmp_path, tmp_path / "f.gguf", arch, keys, kind=stored, fuse=True)
    file = {tensor.name: tensor for tensor in gguf.GGUFReader(whole).tensors}
    for part, heads in (("q", 4), ("k", 2), ("v", None)):
        rows = gguf.dequantize(file[f"blk.1.attn_{part}.weight"].data, stored)
        if heads is not None:
            rows = rows.reshape(heads, -1, 2, 64).swapaxes(1, 2).reshape(rows.shape)
        for path in (whole, fused):
            tensor = open_checkpoint(path).tensor(f"layers.1.{part}")
            assert tensor.quantized is not None
            assert tensor.nbytes == file[f"blk.1.attn_{part}.weight"].n_bytes
            np.testing.assert_array_equal(tensor.float32(), rows)
            np.testing.assert_array_equal(dequantize(tensor.quantized()), rows)


def with_key(key: str, value: Any, keys: Keys) -> Keys:
    def add(writer: gguf.GGUFWriter) -> None:
        keys(writer)
        name = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(name, None)
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))

    return add


@pytest.mark.parametrize(
    ("name", "key", "value", "error", "words"),
    [
        ("llama", "attention.scale", 0.5, UnsupportedModelError, "attention.scale = 0.5 is not un"),
        ("llama", "attention.causal", False, UnsupportedModelError, "causal = False"),
        ("llama", "attention.head_count", [4, 4, 2, 4], UnsupportedModelError, "in all layers"),
        ("llama", "rope.scaling.type", "cubic", UnsupportedModelError, "'cubic'"),
        ("llama", "rope.freq_base", 0.0, ModelFormatError, "freq_base. is 0"),
        ("gemma3_text", "rope.freq_base_swa", 0.0, ModelFormatError, "freq_base_swa. is 0"),
        ("llama", "rope.freq_base", -1.0, ModelFormatError, "freq_base. is -1"),
        ("gemma2", "attention.sliding_window_pattern", [True], ModelFormatError, "1 entries.*4 la"),
        ("gemma2", "attention.sliding_window_pattern", -1, ModelFormatError, "-1 layers"),
        ("granite", "residual_scale", 0.0, ModelFormatError, "residual_scale"),
        ("granite", "logit_scale", 0.0, ModelFormatError, "logit_scale"),
        (
            *("granitemoehybrid_mamba", "rope.scaling.finetuned", True),
            *(UnsupportedModelError, "have RoPE, as those of Bamba"),
        ),
        ("granitemoehybrid_mamba", "ssm.time_step_rank", 3, ModelFormatError, "128 channels"),
        ("granitemoehybrid_mamba", "ssm.state_size", 24, UnsupportedModelError, "state_dim"),
        ("phi3_longrope", "rope.dimension_count", 32, ModelFormatError, "rope_factors_short"),
        ("phi3_longrope", "rope.scaling.attn_factor", 0.0, ModelFormatError, "attn_factor"),
        ("ministral3", "rope.scaling.factor", -4.0, ModelFormatError, "factor is -4"),
        ("glm4", "nextn_predict_layers", 1, UnsupportedModelError, "nextn_predict_layers"),
        ("glm4", "rope.dimension_sections", [8, 12, 12, 0], UnsupportedModelError, "sections"),
        ("starcoder2", "attention.layer_norm_epsilon", 0.0, ModelFormatError, "norm_eps is 0"),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, name: str, key: str, value: Any, error: type, words: str
) -> None:
    arch, keys, changes = FILES[name]
    make(name, tmp_path, **changes)
    path = convert(tmp_path, tmp_path / "model.gguf", arch, with_key(key, value, keys))
    with pytest.raises(error, match=rf"model\.gguf.*{words}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "tensor", "size"),
    [
        ("llama", "blk.0.attn_q.scale", 1),
        ("llama", "output.scale", 1),
        ("qwen2", "output.bias", 128),
        ("qwen3", "blk.1.ffn_gate.bias", 96),
        ("olmo2", "foo.weight", 4),
    ],
)
def test_tensors_that_the_model_is_not_made_of_are_refused(
    tmp_path: Path, name: str, tensor: str, size: int
) -> None:
    arch, keys, changes = FILES[name]

    def added(writer: gguf.GGUFWriter) -> None:
        keys(writer)
        unused = ("rope_factors_long.weight", "blk.0.attn_rot_embd.weight", "v.blk.0.attn_q.weight")
        for each in (*unused, tensor):
            writer.add_tensor(each, np.ones(size, np.float32))

    make(name, tmp_path, **changes)
    path = convert(tmp_path, tmp_path / "model.gguf", arch, added)
    with pytest.raises(UnsupportedModelError, match=f"tensor {tensor} is not understood"):
        open_checkpoint(path)


def test_lists_of_equal_numbers_are_one_number(tmp_path: Path) -> None:
    arch, keys, changes = FILES["llama"]
    make("llama", tmp_path, **changes)
    keys = with_key("attention.head_count_kv", [2, 2, 2, 2], keys)
    assert open_checkpoint(convert(tmp_path, tmp_path / "m.gguf", arch, keys)).config.kv_heads == 2


def test_granite_without_rotation(tmp_path: Path) -> None:
    arch, keys, _ = FILES["granite"]
    make("granite", tmp_path)
    keys = with_key("rope.scaling.finetuned", False, keys)
    config = open_checkpoint(convert(tmp_path, tmp_path / "m.gguf", arch, keys)).config
    assert set(config.ropes[0].inv_freq) == {0.0}


def split(path: Path, count: int) -> list[Path]:
    """As `llama-gguf-split` does it: metadata in the first part, tensors in all."""
    reader = gguf.GGUFReader(path)
    parts = []
    for number in range(count):
        part = path.with_name(f"{path.stem}-{number + 1:05d}-of-{count:05d}.gguf")
        arch = reader.fields["general.architecture"].contents() if number == 0 else ""
        writer = gguf.GGUFWriter(part, arch)
        for key, field in reader.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data)
        write(writer)
        parts.append(part)
    return parts


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    arch, keys, changes = FILES["qwen3"]
    make("qwen3", tmp_path, **changes)
    return split(convert(tmp_path, tmp_path / "model.gguf", arch, keys), 3)


@pytest.mark.parametrize("named", [0, 2])
def test_all_parts_of_a_split_file_are_read(parts: list[Path], named: int) -> None:
    whole, opened = (
        open_checkpoint(parts[0].with_name("model.gguf")),
        open_checkpoint(parts[named]),
    )
    assert opened.config == whole.config
    assert opened.metadata["general.architecture"] == "qwen3"
    same_tensors(opened, whole)


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelFormatError, match=r"part 2 of 3.*model-00002-of-00003\.gguf"):
        open_checkpoint(parts[0])


def test_parts_that_are_others_than_their_names_say(parts: list[Path]) -> None:
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(
        ModelFormatError, match=r"00002-of-00003.*says part 2 of 3.*part 2, counted"
    ):
        open_checkpoint(parts[0])
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(ModelFormatError, match="occurs twice"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(second[: len(second) // 2])
    with pytest.raises(EdgeLLMError, match=r"00002-of-00003\.gguf.*(truncated|damaged)"):
        open_checkpoint(parts[0])


def test_a_part_under_another_name_says_how_to_name_it(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("first.gguf"))
    with pytest.raises(UnsupportedModelError, match=r"one of 3 parts.*-00001-of-00003\.gguf"):
        open_checkpoint(other)


def test_parts_of_another_number_of_parts(parts: list[Path]) -> None:
    first, _ = split(parts[0].with_name("model.gguf"), 2)
    parts[0].write_bytes(first.read_bytes())
    with pytest.raises(ModelFormatError, match=r"its name says 3 parts, and the file 2"):
        open_checkpoint(parts[0])
