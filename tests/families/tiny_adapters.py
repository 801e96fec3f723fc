"""Random adapters of the tiny models, in each format, and the models with them merged."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file
from tiny_gguf import PERMUTED, permuted, write

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]
ALPHA = 12.0


def pairs_of(
    model: Path,
    *,
    rank: int = 4,
    seed: int = 0,
    size: float = 0.5,
    only: Callable[[str], bool] = lambda _: True,
) -> Pairs:
    """A [rank, K] and B [N, rank] by the names of the modules of a folder's linear layers.

    With `ALPHA / rank` they change a matrix by numbers that are `size` times as large as its own.
    """
    pairs: Pairs = {}
    for key, weight in sorted(load_file(model / "model.safetensors").items()):
        if weight.ndim != 2 or ".layers." not in key or not key.endswith(".weight"):
            continue
        if ".gate." in key or "router" in key or not only(key):
            continue
        rng = np.random.default_rng([zlib.crc32(key.encode()), seed])
        a = rng.standard_normal((rank, weight.shape[1])).astype(np.float32)
        b = rng.standard_normal((weight.shape[0], rank)).astype(np.float32)
        factor = size * np.abs(weight).std() * np.sqrt(rank) / ALPHA
        pairs[key.removesuffix(".weight")] = a, (b * factor).astype(np.float32)
    return pairs


def write_peft(folder: Path, pairs: Pairs, **changes: Any) -> Path:
    """A folder as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(pairs.values()))[0].shape[0]
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "r": rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **changes,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_mlx(folder: Path, pairs: Pairs, *, scale: float) -> Path:
    """A folder as mlx-lm saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "fine_tune_type": "lora",
        "num_layers": 4,
        "lora_parameters": {"rank": 4, "scale": scale, "dropout": 0.0},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"{name}.lora_a"] = np.ascontiguousarray(a.T)
        tensors[f"{name}.lora_b"] = np.ascontiguousarray(b.T)
    save_file(tensors, folder / "adapters.safetensors")
    return folder


def write_gguf_adapter(
    path: Path,
    model: Path,
    pairs: Pairs,
    arch: gguf.MODEL_ARCH,
    *,
    alpha: float = ALPHA,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    keys: Mapping[str, str] | None = None,
    invocation: Sequence[int] = (),
) -> Path:
    """A file as llama.cpp's convert_lora_to_gguf.py writes it."""
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    for key, value in {"general.type": "adapter", "adapter.type": "lora", **(keys or {})}.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    if invocation:
        writer.add_array("adapter.alora.invocation_tokens", invocation)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for module, (a, b) in pairs.items():
        name = names.get_name(module, try_suffixes=(".weight",))
        assert name is not None, module
        if arch in PERMUTED and module.rpartition(".")[2] in ("q_proj", "k_proj"):
            heads = "num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"
            b = permuted(b, config[heads])
        for part, values in (("a", a), ("b", b)):
            stored = np.ascontiguousarray(values)
            writer.add_tensor(
                f"{name}.weight.lora_{part}", gguf.quantize(stored, kind), raw_dtype=kind
            )
    write(writer)
    return path


def merged(model: Path, out: Path, pairs: Pairs, *, scale: float) -> Path:
    """The folder of a model with an adapter merged into its weights, as PEFT does it."""
    shutil.copytree(model, out)
    tensors = load_file(model / "model.safetensors")
    for name, (a, b) in pairs.items():
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + np.float32(scale) * (b @ a)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
