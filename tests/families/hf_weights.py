"""Weights in the formats of Hugging Face folders, packed number by number as the layouts say.

Each function makes a random weight `[N, K]` of one format: the tensors of its module, by what comes
behind the module's name, and the numbers that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Parts = dict[str, np.ndarray]
Weight = tuple[Parts, np.ndarray]
Generator = np.random.Generator

# The names that the format has for types (github.com/huggingface/safetensors).
DTYPE_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "uint32": "U32",
    "int8": "I8",
    "uint8": "U8",
}
# What codes of 4-bit floats stand for (OCP Microscaling Formats 1.0).
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
# 16 quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A file of tensors, also of types that the library cannot write from numpy."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        content = np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def words(codes: np.ndarray, bits: int, dtype: Any = np.uint32) -> np.ndarray:
    """Rows of codes as words, each row one large number that begins at its lowest bit."""
    size = codes.shape[1] * bits // 8
    rows = [
        sum(int(code) << (bits * place) for place, code in enumerate(row)).to_bytes(size, "little")
        for row in codes
    ]
    return np.frombuffer(b"".join(rows), dtype).reshape(len(codes), -1)


class Integers:
    """Random codes `[N, K]` with scales and zeros `[N, G]`, and what they stand for."""

    def __init__(
        self,
        rng: Generator,
        rows: int,
        columns: int,
        *,
        bits: int = 4,
        group: int = 64,
        symmetric: bool = False,
    ) -> None:
        self.rows, self.columns, self.bits = rows, columns, bits
        groups = 1 if group == -1 else columns // group
        self.group_of = [k // (columns // groups) for k in range(columns)]
        self.codes = rng.integers(0, 1 << bits, (rows, columns))
        self.zeros = rng.integers(0, 1 << bits, (rows, groups))
        if symmetric:
            self.zeros[:] = 1 << (bits - 1)
        largest = 0.16 / (1 << bits)
        self.scales = rng.uniform(largest / 10, largest, (rows, groups)).astype(np.float16)

    def values(self) -> np.ndarray:
        steps = (self.codes - self.zeros[:, self.group_of]).astype(np.float32)
        return steps * self.scales.astype(np.float32)[:, self.group_of]

    def awq(self) -> Parts:
        def ordered(codes: np.ndarray) -> np.ndarray:
            return codes.reshape(len(codes), -1, 8)[:, :, AWQ_ORDER].reshape(len(codes), -1)

        return {
            ".qweight": words(ordered(self.codes.T), 4, np.int32),
            ".qzeros": words(ordered(self.zeros.T), 4, np.int32),
            ".scales": self.scales.T,
        }

    def gptq(self, version: int = 1) -> Parts:
        zeros = words(self.zeros.T, self.bits)
        if version == 1:
            less = sum(1 << place for place in range(0, 32, self.bits))
            zeros = np.array([[(int(w) - less) % 2**32 for w in row] for row in zeros], np.uint32)
        return {
            ".qweight": words(self.codes, self.bits, np.int32).T,
            ".qzeros": zeros.view(np.int32),
            ".scales": self.scales.T,
            ".g_idx": np.array(self.group_of, np.int32),
        }

    def compressed_tensors(self) -> Parts:
        """As `pack-quantized`; without zeros where they are all half of the range."""
        parts = {
            ".weight_packed": words(self.codes, self.bits, np.int32),
            ".weight_scale": self.scales,
            ".weight_shape": np.array([self.rows, self.columns], np.int64),
        }
        if (self.zeros != 1 << (self.bits - 1)).any():
            parts[".weight_zero_point"] = words(self.zeros.T, self.bits, np.int32).T
        return parts


def int8_channels(rng: Generator, rows: int, columns: int) -> Weight:
    """compressed-tensors `int-quantized`: a scale for each output."""
    codes = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    scales = rng.uniform(0.0005, 0.001, (rows, 1)).astype(np.float32)
    return {".weight": codes, ".weight_scale": scales}, codes.astype(np.float32) * scales


def bitsandbytes_int8(rng: Generator, rows: int, columns: int) -> Weight:
    """LLM.int8: the largest number of each output, which the code 127 stands for."""
    codes = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    largest = rng.uniform(0.06, 0.12, rows).astype(np.float32)
    values = codes.astype(np.float64) * largest[:, None] / 127
    return {".weight": codes, ".SCB": largest}, values.astype(np.float32)


def bitsandbytes_nf4(rng: Generator, rows: int, columns: int, *, nested: bool) -> Weight:
    """A scale for each 64 numbers, rows on end; nested: scales are codes of 256 numbers."""
    codes = rng.integers(0, 16, rows * columns)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": [rows, columns]}
    parts = {".weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
        scale_codes = rng.integers(0, 256, codes.size // 64).astype(np.uint8)
        table = np.linspace(-1, 1, 256, dtype=np.float32)
        largest = rng.uniform(0.04, 0.06, -(-len(scale_codes) // 256)).astype(np.float32)
        scales = table[scale_codes] * np.repeat(largest, 256)[: len(scale_codes)] + np.float32(0.1)
        parts |= {".weight.absmax": scale_codes, ".weight.nested_absmax": largest}
        parts[".weight.nested_quant_map"] = table
    else:
        scales = rng.uniform(0.06, 0.12, codes.size // 64).astype(np.float32)
        parts[".weight.absmax"] = scales
    parts[".weight.quant_map"] = np.array(NF4, np.float32)
    described = np.frombuffer(json.dumps(state).encode(), np.uint8)
    parts[".weight.quant_state.bitsandbytes__nf4"] = described
    values = np.array(NF4, np.float32)[codes] * np.repeat(scales, 64)
    return parts, values.reshape(rows, columns)


def mlx_affine(
    rng: Generator, rows: int, columns: int, *, bits: int, group: int, dtype: Any = np.float16
) -> Weight:
    """A number is `code * scale + bias`; some scales are below 0."""
    codes = rng.integers(0, 1 << bits, (rows, columns))
    scales = rng.uniform(0.001, 0.01, (rows, columns // group)).astype(dtype)
    scales[::3] *= -1
    biases = rng.uniform(-0.1, 0.1, scales.shape).astype(dtype)
    spread = [np.repeat(each.astype(np.float32), group, axis=1) for each in (scales, biases)]
    parts = {".weight": words(codes, bits), ".scales": scales, ".biases": biases}
    return parts, codes.astype(np.float32) * spread[0] + spread[1]


def _powers_of_two(rng: Generator, rows: int, columns: int) -> Weight:
    """4-bit floats in groups of 32: `.codes` and `.scales`, bytes of exponents."""
    codes = rng.integers(0, 16, (rows, columns))
    scales = rng.integers(119, 123, (rows, columns // 32)).astype(np.uint8)
    powers = np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=1)
    return {".codes": codes, ".scales": scales}, (np.array(E2M1)[codes] * powers).astype(np.float32)


def mlx_mxfp4(rng: Generator, rows: int, columns: int) -> Weight:
    parts, values = _powers_of_two(rng, rows, columns)
    return {".weight": words(parts[".codes"], 4), ".scales": parts[".scales"]}, values


def compressed_mxfp4(rng: Generator, rows: int, columns: int) -> Weight:
    parts, values = _powers_of_two(rng, rows, columns)
    packed = words(parts[".codes"], 4, np.uint8)
    return {".weight_packed": packed, ".weight_scale": parts[".scales"]}, values


def mxfp4(rng: Generator, rows: int, columns: int) -> Weight:
    """As gpt-oss has it."""
    parts, values = _powers_of_two(rng, rows, columns)
    blocks = words(parts[".codes"], 4, np.uint8).reshape(rows, columns // 32, 16)
    return {"_blocks": blocks, "_scales": parts[".scales"]}, values


def nvfp4(rng: Generator, rows: int, columns: int) -> Weight:
    """4-bit floats in groups of 16, with 8-bit floats for scales that one number divides."""
    codes = rng.integers(0, 16, (rows, columns))
    scales = rng.uniform(100, 400, (rows, columns // 16)).astype(ml_dtypes.float8_e4m3fn)
    divisor = np.array([8000], np.float32)
    factors = np.repeat(scales.astype(np.float32) / divisor, 16, axis=1)
    parts = {
        ".weight_packed": words(codes, 4, np.uint8),
        ".weight_scale": scales,
        ".weight_global_scale": divisor,
    }
    return parts, np.array(E2M1, np.float32)[codes] * factors


def fp8(rng: Generator, rows: int, columns: int, *, block: tuple[int, int] | None) -> Weight:
    """8-bit floats with a scale for each block of outputs and inputs, or one for all."""
    codes = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    high, wide = block or (rows, columns)
    shape = () if block is None else (-(-rows // high), -(-columns // wide))
    scales = np.asarray(rng.uniform(0.05, 0.1, shape), np.float32)
    spread = np.broadcast_to(scales, shape or (1, 1)).repeat(high, axis=0).repeat(wide, axis=1)
    values = codes.astype(np.float32) * spread[:rows, :columns]
    return {".weight": codes, ".weight_scale_inv": scales}, values


def fp8_channels(rng: Generator, rows: int, columns: int) -> Weight:
    """compressed-tensors `float-quantized`: a scale for each output."""
    codes = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.05, 0.1, (rows, 1)).astype(np.float32)
    return {".weight": codes, ".weight_scale": scales}, codes.astype(np.float32) * scales
