from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.export import export
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.tensors import model_tensors

MakeModel = Callable[..., Path]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_single_file_and_shards_read_the_same(make_model: MakeModel, dtype: str) -> None:
    import torch

    single = open_checkpoint(make_model(dtype=getattr(torch, dtype)))
    expected = {name: single.tensor(name).float32() for name in model_tensors(single.config)}
    folder = single.path
    (folder / "model.safetensors").unlink()
    make_model(dtype=getattr(torch, dtype), max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    sharded = open_checkpoint(folder)
    for name, values in expected.items():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(sharded.tensor(name).float32(), values)


def test_mistral_has_a_sliding_window(make_model: MakeModel) -> None:
    config = open_checkpoint(make_model(model_type="mistral", sliding_window=64)).config
    assert config.model_type == "mistral"
    assert {layer.attention.window for layer in config.layers} == {64}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_type": "mamba"}, UnsupportedModelError, "mamba"),
        ({"model_type": "../llama"}, UnsupportedModelError, "llama"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act"),
        ({"attention_bias": True}, ModelFormatError, r"self_attn\.q_proj\.bias is missing"),
        ({"qk_norm": True}, UnsupportedModelError, "qk_norm = True is not understood"),
        ({"num_hidden_layers": 3}, ModelFormatError, r"layers\.2"),
        ({"intermediate_size": 192}, ModelFormatError, "asks for"),
        ({"vocab_size": "many"}, ModelFormatError, "expected int"),
        ({"rms_norm_eps": None}, ModelFormatError, "rms_norm_eps"),
        ({"num_hidden_layers": 10**9}, ModelFormatError, "layers is 1000000000; 1 to 4096"),
        ({"head_dim": 10**9}, ModelFormatError, "head_dim is 1000000000; 1 to 4096"),
        ({"hidden_size": 10**30}, ModelFormatError, "hidden_size"),
        ({"vocab_size": 10**12}, ModelFormatError, "vocab_size"),
        ({"max_position_embeddings": 10**18}, ModelFormatError, "context_length"),
        ({"rms_norm_eps": 10**400}, ModelFormatError, "rms_norm_eps"),
    ],
)
def test_config_that_does_not_fit(
    make_model: MakeModel, changes: dict[str, object], error: type, words: str
) -> None:
    folder = make_model()
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(error, match=words):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a":' * 100_000, "\0"])
def test_broken_config(make_model: MakeModel, content: str) -> None:
    folder = make_model()
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        open_checkpoint(folder)


def test_missing_config_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelFormatError, match=r"config\.json is missing.*weights\.bin"):
        open_checkpoint(tmp_path)


def test_pickles_are_never_opened(make_model: MakeModel) -> None:
    folder = make_model()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match="pickle"):
        open_checkpoint(folder)


@pytest.mark.parametrize("size", [0, 7, 100, 20_000])
def test_truncated_weights(make_model: MakeModel, size: int) -> None:
    folder = make_model()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "missing.safetensors", 3])
def test_index_cannot_point_elsewhere(make_model: MakeModel, name: object) -> None:
    folder = make_model()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": name}})
    )
    with pytest.raises(ModelFormatError, match=r"not a file of this folder|shard"):
        open_checkpoint(folder)


def test_index_that_names_the_wrong_shard(make_model: MakeModel) -> None:
    folder = make_model(max_shard_size="100KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"]
    other = next(name for name in places.values() if name != places["model.norm.weight"])
    places["model.norm.weight"] = other
    path.write_text(json.dumps(index))
    with pytest.raises(
        ModelFormatError, match=rf"model\.norm\.weight is in {other}, where it is not"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e6, -1e6])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_values_that_are_no_weights_name_the_tensor(
    make_model: MakeModel, tmp_path: Path, name: str, value: float
) -> None:
    from safetensors.numpy import load_file, save_file

    folder = make_model()
    tensors = load_file(folder / "model.safetensors")
    tensors[name].reshape(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFormatError, match=rf"tensor {name} holds a value that is not"):
        export(folder, tmp_path / "out", name="x", source="x", precisions=["packed"])


def test_a_key_that_is_there_twice(make_model: MakeModel) -> None:
    folder = make_model()
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()
    entry = json.dumps({"lm_head.weight": json.loads(header)["lm_head.weight"]}).encode()
    doubled = header[:-1] + b"," + entry[1:]
    path.write_bytes(len(doubled).to_bytes(8, "little") + doubled + data[8 + length :])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors: .*occurs twice"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_pipes_are_refused_and_not_waited_for(make_model: MakeModel, name: str) -> None:
    folder = make_model()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelFormatError, match=f"{name}: not a regular file"):
        open_checkpoint(folder)


def test_a_pipe_is_no_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model")
    with pytest.raises(ModelFormatError, match="model: not a regular file"):
        open_checkpoint(tmp_path / "model")
