"""The quantized formats of Hugging Face folders: how each is described, made and judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import hf_weights
from hf_weights import Generator, Integers, Weight


@dataclass(frozen=True)
class Format:
    """
    Attributes:
        config: what config.json says of it.
        make: a random weight `[N, K]`, as tensors and as numbers.
        golden: the case of `hf_golden.py` that has a weight of the format.
        loads: whether transformers reads the folder on a CPU and without another library.
    """

    config: Mapping[str, Any]
    make: Callable[[Generator, int, int], Weight]
    golden: str | None = None
    loads: bool = False


def _integers(layout: str, **options: Any) -> Callable[[Generator, int, int], Weight]:
    """A maker of weights of AWQ, GPTQ (1 and 2) or compressed-tensors."""

    def weight(rng: Generator, rows: int, columns: int) -> Weight:
        integers = Integers(rng, rows, columns, **options)
        if layout == "scattered":
            integers.group_of = rng.permutation(integers.group_of).tolist()
        parts = {
            "awq": integers.awq,
            "gptq": integers.gptq,
            "gptq_v2": partial(integers.gptq, 2),
            "scattered": integers.gptq,
            "pack-quantized": integers.compressed_tensors,
        }[layout]()
        return parts, integers.values()

    return weight


def described(method: str, **values: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **values}}


def _gptq(bits: int = 4, **values: Any) -> dict[str, Any]:
    return described("gptq", **{"bits": bits, "group_size": 64, "desc_act": False, **values})


def _compressed(layout: str, bits: int, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return described("compressed-tensors", format=layout, config_groups=groups, ignore=["lm_head"])


def _mlx(bits: int, group: int, mode: str = "affine") -> dict[str, Any]:
    return {"quantization": {"group_size": group, "bits": bits, "mode": mode}}


# The first word of a golden case -> the library that made it.
LIBRARIES = {
    "bitsandbytes": "bitsandbytes 0.50.2",
    "compressed-tensors": "compressed-tensors 0.20.0",
    "fp8": "transformers 5.23.0",
    "mlx": "mlx 0.32.4",
    "mxfp4": "transformers 5.23.0",
}
_IN_32 = {"strategy": "group", "group_size": 32}
FORMATS: Mapping[str, Format] = {
    "AWQ, 4 bits": Format(
        described("awq", version="gemm", bits=4, group_size=64, zero_point=True), _integers("awq")
    ),
    "GPTQ v1, 4 bits": Format(_gptq(), _integers("gptq")),
    "GPTQ v1, 8 bits": Format(_gptq(8), _integers("gptq", bits=8)),
    "GPTQ v2, 4 bits": Format(_gptq(checkpoint_format="gptq_v2"), _integers("gptq_v2")),
    "GPTQ, act-order": Format(_gptq(desc_act=True), _integers("scattered")),
    "compressed-tensors int4": Format(
        _compressed("pack-quantized", 4, **_IN_32),
        _integers("pack-quantized", group=32, symmetric=True),
        "compressed-tensors pack-quantized int4",
    ),
    "compressed-tensors int4, asymmetric": Format(
        _compressed("pack-quantized", 4, symmetric=False, **_IN_32),
        _integers("pack-quantized", group=32),
        "compressed-tensors pack-quantized int4 asymmetric",
    ),
    "compressed-tensors int8": Format(
        _compressed("int-quantized", 8, strategy="channel"),
        hf_weights.int8_channels,
        "compressed-tensors int-quantized",
    ),
    "compressed-tensors FP8": Format(
        _compressed("float-quantized", 8, type="float", strategy="channel"),
        hf_weights.fp8_channels,
        "compressed-tensors float-quantized",
    ),
    "compressed-tensors MXFP4": Format(
        _compressed("mxfp4-pack-quantized", 4, type="float", **_IN_32),
        hf_weights.compressed_mxfp4,
        "compressed-tensors mxfp4-pack-quantized",
    ),
    "compressed-tensors NVFP4": Format(
        _compressed("nvfp4-pack-quantized", 4, type="float", strategy="group", group_size=16),
        hf_weights.nvfp4,
        "compressed-tensors nvfp4-pack-quantized",
    ),
    "MLX affine, 4 bits": Format(
        _mlx(4, 64),
        partial(hf_weights.mlx_affine, bits=4, group=64),
        "mlx affine 4 bits, groups of 64",
    ),
    "MLX affine, 6 bits": Format(
        _mlx(6, 32),
        partial(hf_weights.mlx_affine, bits=6, group=32),
        "mlx affine 6 bits, groups of 32",
    ),
    "MLX affine, 8 bits": Format(
        _mlx(8, 32),
        partial(hf_weights.mlx_affine, bits=8, group=32),
        "mlx affine 8 bits, groups of 32",
    ),
    "MLX MXFP4": Format(
        _mlx(4, 32, "mxfp4"), hf_weights.mlx_mxfp4, "mlx mxfp4 4 bits, groups of 32"
    ),
    "FP8 in blocks": Format(
        described("fp8", weight_block_size=[64, 128], dequantize=True),
        partial(hf_weights.fp8, block=(64, 128)),
        "fp8 in blocks",
        loads=True,
    ),
    "FP8, one scale": Format(
        described("fp8", weight_block_size=None), partial(hf_weights.fp8, block=None), "fp8"
    ),
    "bitsandbytes nf4": Format(
        described("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        partial(hf_weights.bitsandbytes_nf4, nested=False),
        "bitsandbytes nf4",
    ),
    "bitsandbytes nf4, nested": Format(
        described("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        partial(hf_weights.bitsandbytes_nf4, nested=True),
        "bitsandbytes nf4 nested",
    ),
    "bitsandbytes int8": Format(
        described("bitsandbytes", load_in_8bit=True),
        hf_weights.bitsandbytes_int8,
        "bitsandbytes int8",
    ),
    "MXFP4 (gpt-oss)": Format(described("mxfp4"), hf_weights.mxfp4, "mxfp4"),
}
