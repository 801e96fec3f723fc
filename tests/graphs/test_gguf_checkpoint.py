"""The real GGUF file, and damaged copies of it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from edgellm.errors import EdgeLLMError, ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.gguf_checkpoint import _dequantize
from edgellm.graphs.gguf_file import GGUFFile
from edgellm.graphs.tensors import parameters
from edgellm.kernels.quantized import dequantize


def write_gguf(
    path: Path,
    changes: dict[str, object] | None = None,
    drop: str = "",
    *,
    architecture: str = "llama",
) -> Path:
    """A tiny but complete GGUF file."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, object] = {
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **(changes or {}),
    }
    for key, value in values.items():
        key = key.replace("llama.", f"{architecture}.")
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, int(str(value)))
    shapes = {
        "token_embd.weight": (40, 64),
        "output_norm.weight": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
    }
    if architecture == "qwen2":
        shapes |= {
            "blk.0.attn_q.bias": (64,),
            "blk.0.attn_k.bias": (32,),
            "blk.0.attn_v.bias": (32,),
        }
    for name, shape in shapes.items():
        if name == drop:
            continue
        tensor = rng.standard_normal(shape).astype(np.float32)
        if name in ("blk.0.attn_v.weight", "blk.0.attn_q.weight"):
            kind = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_default_model(smollm2_gguf: Path) -> None:
    config = open_checkpoint(smollm2_gguf).config
    assert (config.layer_count, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tied_embedding
    assert parameters(config) == 134_515_008


@pytest.mark.parametrize(
    ("name", "storage", "kind"),
    [
        *((f"layers.{n}", "Q4_1", "int4_affine") for n in ("0.q", "7.k", "29.v", "3.down")),
        pytest.param("embedding", "Q8_0", "int8_symmetric", marks=pytest.mark.slow),
    ],
)
def test_default_model_is_imported_bit_by_bit(
    smollm2_gguf: Path, name: str, storage: str, kind: str
) -> None:
    tensor = open_checkpoint(smollm2_gguf).tensor(name)
    assert tensor.storage == storage
    assert tensor.quantized is not None
    assert tensor.quantized().kind.name == kind
    np.testing.assert_array_equal(dequantize(tensor.quantized()), tensor.float32())


def test_q4_0_is_imported_bit_by_bit(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf"))
    for name in ("layers.0.q", "layers.0.v"):
        tensor = checkpoint.tensor(name)
        assert tensor.quantized is not None
        np.testing.assert_array_equal(dequantize(tensor.quantized()), tensor.float32())
        assert tensor.quantized().kind.name == "int4_symmetric"


def test_qwen2_has_biases_and_rows_as_they_are(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", architecture="qwen2")
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.model_type == "qwen2"
    assert checkpoint.config.attention.qkv_bias
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in ("q", "k", "v"):
        bias = checkpoint.tensor(f"layers.0.{name}_bias").float32()
        np.testing.assert_array_equal(bias, stored[f"blk.0.attn_{name}.bias"].data)
    key = checkpoint.tensor("layers.0.k").float32()
    np.testing.assert_array_equal(key, stored["blk.0.attn_k.weight"].data)


def test_q_and_k_are_unpermuted(tmp_path: Path) -> None:
    """Row 1 of a head in the file is row D/2 of the head: pairs lie apart, not side by side."""
    path = write_gguf(tmp_path / "model.gguf")
    (entry,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_k.weight")
    stored = gguf.dequantize(entry.data, entry.tensor_type)
    found = open_checkpoint(path).tensor("layers.0.k").float32()
    np.testing.assert_array_equal(found[16 + 8], stored[16 + 1])
    np.testing.assert_array_equal(found[16 + 1], stored[16 + 2])


@pytest.mark.parametrize("size", [0, 3, 8, 30, 1000, 1_500_000, 2_400_000, 98_362_431])
def test_truncated_at_any_place(smollm2_gguf: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as source:
        path.write_bytes(source.read(size))
    with pytest.raises(ModelFormatError, match=r"cut\.gguf"):
        open_checkpoint(path)


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ModelFormatError, match="not a GGUF file"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"llama.block_count": None}, ModelFormatError, "block_count"),
        ({"llama.block_count": 2}, ModelFormatError, "blk.1"),
        ({"llama.embedding_length": 32}, ModelFormatError, "asks for"),
        ({"llama.feed_forward_length": 128}, ModelFormatError, "asks for"),
        ({"llama.attention.head_count": 0}, ModelFormatError, "heads"),
        ({"llama.attention.head_count_kv": 3}, ModelFormatError, "multiple"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, ModelFormatError, "expected float"),
        ({"llama.expert_count": 8}, ModelFormatError, "expert_used_count' is missing"),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2},
            ModelFormatError,
            "ffn_gate_inp.weight is missing",
        ),
        ({"llama.rope.scaling.type": "yarn"}, ModelFormatError, "rope.scaling.factor"),
        ({"general.type": "adapter"}, UnsupportedModelError, "adapter"),
        ({"llama.block_count": (1 << 32) - 1}, ModelFormatError, "layers is 4294967295; 1 to 4096"),
        (
            {"llama.embedding_length": (1 << 32) - 1},
            ModelFormatError,
            "head_dim is 1073741823; 1 to",
        ),
        (
            {"llama.attention.key_length": 10**9},
            ModelFormatError,
            "head_dim is 1000000000; 1 to 4096",
        ),
        ({"split.count": 3, "split.no": 0}, UnsupportedModelError, "one of 3 parts.*--merge"),
        ({"split.count": 3, "split.no": 2}, UnsupportedModelError, "NAME-00001-of-00003"),
    ],
)
def test_config_that_does_not_fit(
    tmp_path: Path, changes: dict[str, object], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        open_checkpoint(write_gguf(tmp_path / "model.gguf", changes))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"blk\.0\.ffn_up\.weight is missing"):
        open_checkpoint(write_gguf(tmp_path / "model.gguf", drop="blk.0.ffn_up.weight"))


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"mamba.*llama, .*mistral, .*qwen2"):
        open_checkpoint(path)


def test_flipped_header_bytes_never_escape_as_other_errors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(data)
        for position in rng.integers(4, 1500, 3):
            damaged[position] = int(rng.choice([0, 1, 127, 128, 255]))
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except EdgeLLMError as error:
            assert "model.gguf" in str(error)  # noqa: PT017


def test_part_of_a_split_model_is_known_by_its_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m-00002-of-00003.gguf", drop="output_norm.weight")
    with pytest.raises(ModelFormatError, match=r"part 1 of 3 is missing: m-00001-of-00003\.gguf"):
        open_checkpoint(path)
    whole = write_gguf(tmp_path / "m-00001-of-00001.gguf", {"split.count": 1})
    assert open_checkpoint(whole).config.layer_count == 1


@pytest.mark.parametrize(
    "name", ["blk.0.attn_v.weight", "token_embd.weight", "blk.0.ffn_up.weight"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_weights_name_the_tensor(
    tmp_path: Path, name: str, value: float
) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    (entry,) = (t for t in gguf.GGUFReader(path).tensors if t.name == name)
    dtype = np.float16 if entry.tensor_type.name == "Q4_0" else np.float32
    data = bytearray(path.read_bytes())
    at = int(entry.data_offset)
    data[at : at + dtype().nbytes] = dtype(value).tobytes()
    path.write_bytes(data)
    canonical = {"attn_v": "layers.0.v", "token_embd": "embedding", "ffn_up": "layers.0.up"}
    tensor = open_checkpoint(path).tensor(canonical[name.removeprefix("blk.0.").split(".")[0]])
    for read in (tensor.float32, tensor.quantized):
        if read is not None:
            with pytest.raises(ModelFormatError, match=rf"{name} holds a value"):
                read()


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q5_0", "BF16"])
def test_large_tensors_are_dequantized_in_parts(tmp_path: Path, kind: str) -> None:
    """2,049 rows of 1,024: two parts and a row."""
    type = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((2049, 1024)).astype(np.float32)
    stored = gguf.quantize(values, type)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", stored, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    entry = GGUFFile(tmp_path / "model.gguf").tensors["token_embd.weight"]
    np.testing.assert_array_equal(_dequantize(entry, ""), gguf.dequantize(stored, type))
