"""Weights that the libraries of the formats quantize, with what they make of them again.

    python tests/graphs/make_hf_golden.py > tests/graphs/hf_golden.json

Made with mlx 0.32.4, compressed-tensors 0.20.0, bitsandbytes 0.50.2, transformers 5.23.0 and torch
2.13.0; `test_hf_golden.py` needs none of them. Where mlx is in another environment, `--mlx` makes
its cases alone, and a file that is named as the argument is merged into the output.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROWS, COLUMNS = 9, 64


def weights() -> np.ndarray:
    values = np.random.default_rng(7).standard_normal((ROWS, COLUMNS)).astype(np.float32) * 0.05
    values[1, :32] += 0.2  # all of one sign
    values[2] *= 4
    return values


def encoded(array: np.ndarray, dtype: str) -> dict[str, Any]:
    """An array as JSON, with the name that safetensors has for its type."""
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": dtype, "shape": list(array.shape), "data": data}


def case(config: dict[str, Any], tensors: dict[str, Any], expected: np.ndarray) -> dict[str, Any]:
    return {"config": config, "tensors": tensors, "expected": encoded(expected, "F32")}


def mlx_cases() -> dict[str, Any]:
    import mlx.core as mx

    names = {mx.uint32: "U32", mx.uint8: "U8", mx.float32: "F32", mx.float16: "F16"}
    cases = {}
    for mode, bits, group in [
        *(("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)),
        ("affine", 4, 64),
        ("mxfp4", 4, 32),
    ]:
        arrays = mx.quantize(mx.array(weights()), group_size=group, bits=bits, mode=mode)
        values = mx.dequantize(*arrays, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
        config = {"quantization": {"group_size": group, "bits": bits, "mode": mode}}
        parts = zip(("m.weight", "m.scales", "m.biases"), arrays, strict=False)
        tensors = {name: encoded(np.array(array), names[array.dtype]) for name, array in parts}
        cases[f"mlx {mode} {bits} bits, groups of {group}"] = case(
            config, tensors, np.array(values)
        )
    return cases


def from_torch(tensor: Any) -> dict[str, Any]:
    import torch

    names = {
        torch.int32: "I32",
        torch.int64: "I64",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.float32: "F32",
        torch.float8_e4m3fn: "F8_E4M3",
    }
    shape = list(tensor.shape)
    array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return {**encoded(array, names[tensor.dtype]), "shape": shape}


def compressed_tensors_cases() -> dict[str, Any]:
    weights_of = {
        "pack-quantized int4": {"num_bits": 4, "strategy": "group", "group_size": 32},
        "pack-quantized int4 asymmetric": {
            "num_bits": 4,
            "strategy": "group",
            "group_size": 32,
            "symmetric": False,
        },
        "pack-quantized int8": {"num_bits": 8, "strategy": "channel"},
        "pack-quantized int8 asymmetric": {
            "num_bits": 8,
            "strategy": "channel",
            "symmetric": False,
        },
        "int-quantized": {"num_bits": 8, "strategy": "channel"},
        "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "float-quantized tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "float-quantized block": {
            "num_bits": 8,
            "type": "float",
            "strategy": "block",
            "block_structure": [3, 24],
        },
        "mxfp4-pack-quantized": {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
        },
        "nvfp4-pack-quantized": {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
        },
    }
    return {
        f"compressed-tensors {name}": compressed(name.split()[0], values)
        for name, values in weights_of.items()
    }


def compressed(name: str, values: dict[str, Any]) -> dict[str, Any]:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**values)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.tensor(weights())
    state = {"weight": weight}
    low, high = ranges(weight, args)
    options = {}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(low.min(), high.max()).reshape(1)
        options["global_scale"] = state["weight_global_scale"]
    scale, zero = calculate_qparams(low, high, args, **options)
    state |= {"weight_scale": scale.float(), "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(name)
    packed = compressor.compress(state, scheme)
    restored = compressor.decompress(packed, scheme)["weight"].float()
    packed.pop("weight_zero_point", None) if args.symmetric else None
    described = dict(values.items())
    described.setdefault("type", "int")
    described.setdefault("symmetric", True)
    config = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": described}},
        "ignore": ["lm_head"],
    }
    tensors = {f"m.{part}": from_torch(torch.as_tensor(t)) for part, t in packed.items()}
    return case({"quantization_config": config}, tensors, restored.numpy())


def ranges(weight: Any, args: Any) -> tuple[Any, Any]:
    """The least and the largest number of whatever has a scale."""
    import torch

    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        rows, columns = args.block_structure
        low = [
            [(block.min(), block.max()) for block in part.split(columns, 1)]
            for part in weight.split(rows, 0)
        ]
        both = torch.tensor(low)
        return both[..., 0], both[..., 1]
    groups = weight.reshape(len(weight), -1, args.group_size)
    return groups.amin(2), groups.amax(2)


def bitsandbytes_cases() -> dict[str, Any]:
    import bitsandbytes.functional as bnb
    import torch

    weight, cases = torch.tensor(weights()), {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            codes, state = bnb.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
            parts = {f"m.weight.{n}": t for n, t in state.as_dict(packed=True).items()}
            tensors = {n: from_torch(t) for n, t in {"m.weight": codes, **parts}.items()}
            config = {
                "quantization_config": {
                    "quant_method": "bitsandbytes",
                    "load_in_4bit": True,
                    "bnb_4bit_quant_type": kind,
                }
            }
            values = bnb.dequantize_4bit(codes, state).float()
            cases[f"bitsandbytes {kind}{' nested' * nested}"] = case(
                config, tensors, values.numpy()
            )
    codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
    values = bnb.int8_vectorwise_dequant(codes, scales)
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    tensors = {"m.weight": from_torch(codes), "m.SCB": from_torch(scales)}
    cases["bitsandbytes int8"] = case(config, tensors, values.float().numpy())
    return cases


def transformers_cases() -> dict[str, Any]:
    import torch
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    cases, weight = {}, (torch.tensor(weights()) * 100).to(torch.float8_e4m3fn)
    for block in ([4, 24], None):
        shape = () if block is None else (-(-ROWS // block[0]), -(-COLUMNS // block[1]))
        scale = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        values = _dequantize_fp8_weight(weight, scale, block, torch.float32)
        config = {"quant_method": "fp8", "weight_block_size": block}
        tensors = {"m.weight": from_torch(weight), "m.weight_scale_inv": from_torch(scale)}
        name = "fp8" if block is None else "fp8 in blocks"
        cases[name] = case({"quantization_config": config}, tensors, values.numpy())
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (ROWS, COLUMNS // 32, 16), np.uint8)
    scales = rng.integers(115, 125, (ROWS, COLUMNS // 32), np.uint8)
    stacked = torch.tensor(blocks)[None], torch.tensor(scales)[None]
    values = convert_moe_packed_tensors(*stacked, dtype=torch.float32)[0].T
    tensors = {"m_blocks": encoded(blocks, "U8"), "m_scales": encoded(scales, "U8")}
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    cases["mxfp4"] = case(config, tensors, values.numpy())
    return cases


def main() -> None:
    if sys.argv[1:2] == ["--mlx"]:
        cases = mlx_cases()
    else:
        cases = {**compressed_tensors_cases(), **bitsandbytes_cases(), **transformers_cases()}
        for name in sys.argv[1:]:
            cases |= json.loads(Path(name).read_text())
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in cases.items())
    print(f"{{\n{lines}\n}}")


if __name__ == "__main__":
    main()
