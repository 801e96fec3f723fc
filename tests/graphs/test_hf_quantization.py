"""Quantized folders but for AWQ and GPTQ: which format it is, what is refused, and layouts.

`test_hf_golden.py` has what the libraries read of the same formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.kernels.quantized import dequantize

WriteModel = Callable[..., Path]
Parts = dict[str, np.ndarray]

KEY = "model.layers.0.self_attn.k_proj"
ROWS, COLUMNS = 64, 128
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
RNG = np.random.default_rng(5)


def words(codes: np.ndarray, bits: int, dtype: Any = np.uint32) -> np.ndarray:
    """Rows of codes as words, each row one large number that begins at its lowest bit."""
    size = codes.shape[1] * bits // 8
    rows = [
        sum(int(code) << (bits * place) for place, code in enumerate(row)).to_bytes(size, "little")
        for row in codes
    ]
    return np.frombuffer(b"".join(rows), dtype).reshape(len(codes), -1)


def codes_of(bits: int, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    return RNG.integers(0, 1 << bits, (rows, columns))


def mlx(bits: int, group: int, dtype: Any, rows: int = ROWS) -> tuple[Parts, np.ndarray]:
    codes = codes_of(bits, rows)
    scales = RNG.uniform(0.001, 0.01, (rows, COLUMNS // group)).astype(dtype)
    scales[::3] *= -1
    biases = RNG.uniform(-0.1, 0.1, scales.shape).astype(dtype)
    spread = [np.repeat(each.astype(np.float32), group, axis=1) for each in (scales, biases)]
    parts = {".weight": words(codes, bits), ".scales": scales, ".biases": biases}
    return parts, codes.astype(np.float32) * spread[0] + spread[1]


def mlx_config(**changes: Any) -> dict[str, Any]:
    values = {"group_size": 64, "bits": 4, **changes}
    return {"quantization": values, "quantization_config": values}


def described(method: str, **values: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **values}}


def ct_config(layout: str = "pack-quantized", top: Any = None, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    values = {"format": layout, "config_groups": groups, "ignore": ["lm_head"], **(top or {})}
    return described("compressed-tensors", **values)


def ct_parts(**changes: np.ndarray | None) -> Parts:
    parts = {
        "packed": words(codes_of(4), 4, np.int32),
        "scale": np.full((ROWS, COLUMNS // 32), 0.01, np.float16),
        "shape": np.array([ROWS, COLUMNS], np.int64),
        **changes,
    }
    return {f".weight_{name}": part for name, part in parts.items() if part is not None}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx(write_model: WriteModel, bits: int, dtype: Any) -> None:
    for group in (32, 64, 128):
        parts, values = mlx(bits, group, dtype)
        folder = write_model({KEY: parts}, mlx_config(bits=bits, group_size=group))
        tensor = open_checkpoint(folder).tensor("layers.0.k")
        assert tensor.storage == f"MLX {bits}-bit"
        np.testing.assert_array_equal(tensor.float32(), values)
        assert tensor.quantized is not None
        quantized = tensor.quantized()
        kind = {5: "int5_affine", 6: "int8_affine", 8: "int8_affine"}.get(bits, "int4_affine")
        assert quantized.kind.name == kind
        assert np.abs(dequantize(quantized) - values).max() < 2**-11 * (0.1 + 2**bits * 0.01)


def test_mlx_modules_with_schemes_of_their_own(write_model: WriteModel) -> None:
    embedding, embedded = mlx(6, 128, np.float16)
    keys, key_values = mlx(4, 64, np.float16)
    head, head_values = mlx(8, 32, np.float16)
    config = mlx_config(
        **{
            "model.embed_tokens": {"bits": 6, "group_size": 128},
            "lm_head": {"bits": 8, "group_size": 32},
        },
        **{KEY: True, "model.layers.0.self_attn.v_proj": False},
    )
    modules = {"model.embed_tokens": embedding, KEY: keys, "lm_head": head}
    checkpoint = open_checkpoint(write_model(modules, config))
    for name, values in [
        ("embedding", embedded),
        ("layers.0.k", key_values),
        ("head", head_values),
    ]:
        np.testing.assert_array_equal(checkpoint.tensor(name).float32(), values)
    assert checkpoint.tensor("layers.0.v").storage == "BF16"


@pytest.mark.parametrize("offset", [0, 1e-9])
def test_mlx_groups_of_one_value(write_model: WriteModel, offset: float) -> None:
    """Mlx gives groups of zeros a scale that no half holds."""
    parts, values = mlx(4, 64, np.float32)
    words_of_group = 64 * 4 // 32
    parts[".weight"] = parts[".weight"].copy()
    parts[".weight"][7, :words_of_group] = 0
    parts[".scales"][7, 0], parts[".biases"][7, 0] = 1e-9, offset
    values[7, :64] = offset
    tensor = open_checkpoint(write_model({KEY: parts}, mlx_config())).tensor("layers.0.k")
    np.testing.assert_array_equal(tensor.float32(), values)
    assert tensor.quantized is (None if offset else tensor.quantized)
    if not offset:
        assert not dequantize(tensor.quantized())[7, :64].any()


@pytest.mark.parametrize("exponents", [(104, 142), (0, 254)])
def test_mxfp4_of_gpt_oss(write_model: WriteModel, exponents: tuple[int, int]) -> None:
    """Powers of two from 2^-24 to 2^15 times doubled numbers are halves; others are not."""
    codes = codes_of(4)
    scales = RNG.integers(exponents[0], exponents[0] + 10, (ROWS, COLUMNS // 32)).astype(np.uint8)
    scales[0, 0], scales[1, 1] = exponents
    if exponents[1] == 142:
        codes[1, 32:64] &= 11  # up to 1.5 * 2^15
    else:
        codes[1, 32:64] &= 8
    parts = {
        "_blocks": words(codes, 4, np.uint8).reshape(ROWS, COLUMNS // 32, 16),
        "_scales": scales,
    }
    folder = write_model({KEY: parts}, described("mxfp4"))
    tensor = open_checkpoint(folder).tensor("layers.0.k")
    expected = np.array(E2M1)[codes] * np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=1)
    np.testing.assert_array_equal(tensor.float32(), expected.astype(np.float32))
    assert (tensor.quantized is not None) == (exponents[1] == 142)
    if tensor.quantized is not None:
        assert tensor.quantized().kind.name == "mxfp4"
        np.testing.assert_array_equal(tensor.quantized().codes, codes)
        np.testing.assert_array_equal(dequantize(tensor.quantized()), expected.astype(np.float32))


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize(
    ("block", "shape"),
    [
        ([128, 128], (1, 1)),
        ([48, 80], (2, 2)),
        ([32, 128], (2, 1)),
        (None, ()),
        (None, (1,)),
        (None, (64,)),
        (None, (64, 1)),
    ],
)
def test_fp8(write_model: WriteModel, name: str, block: Any, shape: tuple[int, ...]) -> None:
    weight = RNG.standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.float8_e4m3fn)
    scale = RNG.uniform(0.01, 0.02, shape).astype(np.float32)
    parts = {".weight": weight, f".{name}": np.asarray(scale)}
    changes = {} if block is None else {"weight_block_size": block}
    config = described("fp8", activation_scheme="dynamic", modules_to_not_convert=["lm_head"])
    config["quantization_config"] |= changes
    tensor = open_checkpoint(write_model({KEY: parts}, config)).tensor("layers.0.k")
    assert tensor.quantized is None
    values = tensor.float32()
    for n in range(ROWS):
        for k in range(COLUMNS):
            place = (n // block[0], k // block[1]) if block else (n, 0)[: len(shape)]
            factor = scale.reshape(-1)[0] if scale.size == 1 else scale[place]
            assert values[n, k] == np.float32(weight[n, k]) * factor


def test_fp8_with_powers_of_two(write_model: WriteModel) -> None:
    weight = RNG.standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[2.0**-5]]).astype(ml_dtypes.float8_e8m0fnu)
    parts = {".weight": weight, ".weight_scale_inv": scale}
    config = described("fp8", weight_block_size=[128, 128], scale_fmt="ue8m0")
    tensor = open_checkpoint(write_model({KEY: parts}, config)).tensor("layers.0.k")
    np.testing.assert_array_equal(tensor.float32(), weight.astype(np.float32) / 32)


@pytest.mark.parametrize("packed_zeros", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_compressed_tensors_with_groups_by_index(
    write_model: WriteModel, packed_zeros: bool, scattered: bool
) -> None:
    codes, zeros = codes_of(4), codes_of(4, ROWS, COLUMNS // 32)
    index = np.repeat([2, 0, 3, 1], 32).astype(np.int32)
    if scattered:
        index = RNG.permutation(index)
    scale = RNG.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
    stored = words(zeros.T, 4, np.int32).T if packed_zeros else (zeros - 8).astype(np.int8)
    parts = ct_parts(packed=words(codes, 4, np.int32), scale=scale, zero_point=stored, g_idx=index)
    folder = write_model({KEY: parts}, ct_config(symmetric=False, actorder="group"))
    tensor = open_checkpoint(folder).tensor("layers.0.k")
    expected = (codes - zeros[:, index]) * scale.astype(np.float32)[:, index]
    np.testing.assert_array_equal(tensor.float32(), expected.astype(np.float32))
    assert (tensor.quantized is None) == scattered
    if tensor.quantized is not None:
        np.testing.assert_array_equal(tensor.quantized().codes, codes)
        assert np.abs(dequantize(tensor.quantized()) - expected).max() < 15 * 0.02 * 2**-11


def test_compressed_tensors_whose_index_is_unset(write_model: WriteModel) -> None:
    parts = ct_parts(g_idx=np.full(COLUMNS, -1, np.int32))
    tensor = open_checkpoint(write_model({KEY: parts}, ct_config())).tensor("layers.0.k")
    assert tensor.quantized is not None
    assert tensor.quantized().kind.name == "int4_symmetric"
    np.testing.assert_array_equal(dequantize(tensor.quantized()), tensor.float32())


def test_compressed_tensors_without_their_zeros(write_model: WriteModel) -> None:
    folder = write_model({KEY: ct_parts()}, ct_config(symmetric=False))
    with pytest.raises(ModelFormatError, match="there is int 4 in groups of 32 with zero points"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (ct_parts(scale=None), "weight_scale is missing"),
        (ct_parts(shape=None), "weight_shape is missing"),
        (ct_parts(shape=np.array([ROWS, 0])), r"weight_shape is \[64, 0\]"),
        (ct_parts(shape=np.array([ROWS - 1, COLUMNS])), "weight_packed has 64 rows"),
        (ct_parts(shape=np.array([ROWS, 96])), "16 words a row; 96 inputs of 4 or 8 bits"),
        (ct_parts(shape=np.array([ROWS, 64])), r"no config group has .* 8 bits in groups of 16"),
        (ct_parts(scale=np.ones((ROWS, 3), np.float16)), r"weight_scale has shape \[64, 3\]"),
        (ct_parts(scale=np.ones((ROWS, 2), np.float16)), r"bits in groups of 64, as the tensors"),
        (ct_parts(scale=np.full((ROWS, 4), np.inf, np.float16)), "infinite or not a number"),
        (ct_parts(g_idx=np.full(COLUMNS, 9, np.int32)), "groups 9 to 9; .* groups 0 to 3"),
    ],
)
def test_compressed_tensors_that_do_not_fit(
    write_model: WriteModel, parts: Parts, words: str
) -> None:
    with pytest.raises(ModelFormatError, match=words):
        open_checkpoint(write_model({KEY: parts}, ct_config()))


E4M3 = np.zeros((ROWS, COLUMNS), ml_dtypes.float8_e4m3fn)
INT8 = np.zeros((ROWS, COLUMNS), np.int8)
ONE = np.ones((1,), np.float32)
PER_OUTPUT = np.ones((ROWS,), np.float32)
FP4_STATE = {"quant_type": "fp4", "blocksize": 64, "shape": [ROWS, COLUMNS]}


def bnb4(state: Any = FP4_STATE, **changes: np.ndarray) -> Parts:
    parts = {
        ".weight": np.zeros((ROWS * COLUMNS // 2, 1), np.uint8),
        ".weight.absmax": np.ones(ROWS * COLUMNS // 64, np.float32),
        ".weight.quant_map": np.zeros(16, np.float32),
        ".weight.quant_state.bitsandbytes__fp4": np.frombuffer(
            json.dumps(state).encode(), np.uint8
        ),
    }
    return {**parts, **{f".weight{name and '.' + name}": part for name, part in changes.items()}}


@pytest.mark.parametrize(
    ("parts", "config", "error", "words"),
    [
        ({".weight": E4M3}, described("fp8"), ModelFormatError, r"weight_scale is missing"),
        (
            {".weight": E4M3, ".weight_scale_inv": np.ones((2, 1), np.float32)},
            described("fp8", weight_block_size=[128, 128]),
            ModelFormatError,
            r"shape \[2, 1\], which is neither .* for each block of \[128, 128\]",
        ),
        (
            {".weight": E4M3, ".weight_scale": ONE},
            described("fp8", weight_block_size=[128]),
            ModelFormatError,
            "weight_block_size is .*two numbers above 0",
        ),
        (
            {".weight": E4M3, ".weight_scale": ONE},
            described("fp8", ignored_layers=["model.layers.0"]),
            ModelFormatError,
            r"model\.layers\.0 is not quantized, but the tensors of .*k_proj are",
        ),
        (
            {".weight": E4M3.astype(ml_dtypes.float8_e5m2), ".weight_scale": ONE},
            described("fp8"),
            UnsupportedModelError,
            "is stored as F8_E5M2",
        ),
        ({".weight": E4M3, ".weight_scale": ONE}, {}, ModelFormatError, "quantization_config"),
        ({".weight": INT8, ".SCB": PER_OUTPUT}, {}, UnsupportedModelError, "is stored as I8"),
        ({".weight": INT8}, described("bitsandbytes"), ModelFormatError, "SCB is missing"),
        (
            {".weight": INT8, ".SCB": PER_OUTPUT, ".weight_format": np.array([1], np.uint8)},
            described("bitsandbytes"),
            UnsupportedModelError,
            "codes lie in tiles",
        ),
        (
            {".weight": INT8.astype(np.uint8)},
            described("bitsandbytes"),
            ModelFormatError,
            "bitsandbytes__fp4 is there",
        ),
        (
            bnb4({**FP4_STATE, "shape": [ROWS, COLUMNS * 2]}),
            described("bitsandbytes"),
            ModelFormatError,
            r"4096 bytes; \[64, 256\] codes",
        ),
        (bnb4([1]), described("bitsandbytes"), ModelFormatError, "expected a JSON object"),
        (bnb4({}), described("bitsandbytes"), ModelFormatError, "'blocksize' is missing"),
        (
            bnb4({**FP4_STATE, "nested_blocksize": 256}),
            described("bitsandbytes"),
            UnsupportedModelError,
            "absmax is stored as F32; supported are U8",
        ),
        (
            {"_blocks": np.zeros((ROWS, 4, 16), np.uint8)},
            described("mxfp4"),
            ModelFormatError,
            "k_proj_scales is missing",
        ),
        (
            {
                "_blocks": np.zeros((ROWS, 4, 16), np.uint8),
                "_scales": np.full((ROWS, 4), 255, np.uint8),
            },
            described("mxfp4"),
            ModelFormatError,
            "k_proj_scales holds a scale that is infinite or not a number",
        ),
        (mlx(4, 64, np.float16)[0], mlx_config(bits=7), UnsupportedModelError, "bits is 7"),
        (mlx(4, 64, np.float16)[0], mlx_config(group_size=48), UnsupportedModelError, "48"),
        (mlx(4, 64, np.float16)[0], mlx_config(mode="nvfp4"), UnsupportedModelError, "'nvfp4'"),
        (mlx(4, 64, np.float16)[0], mlx_config(bits=3), ModelFormatError, "16 words a row"),
        (mlx(4, 64, np.float16)[0], mlx_config(bits=8), ModelFormatError, r"shape \[64, 2\]"),
        (mlx(4, 64, np.float16)[0], mlx_config(**{KEY: False}), ModelFormatError, "not to be"),
        (mlx(4, 64, np.float16)[0], mlx_config(**{KEY: 4}), ModelFormatError, "an object, true"),
        (
            {k: v for k, v in mlx(4, 64, np.float16)[0].items() if k != ".biases"},
            mlx_config(),
            ModelFormatError,
            "biases is missing",
        ),
        ({}, described("hqq"), UnsupportedModelError, "'hqq' is not read; read are awq,"),
        ({}, {"quantization_config": {}}, UnsupportedModelError, "quant_method None"),
        ({}, {"quantization_config": "awq"}, ModelFormatError, "expected dict"),
        ({}, ct_config("marlin-24"), UnsupportedModelError, "format 'marlin-24'"),
        ({}, described("compressed-tensors"), ModelFormatError, "'config_groups' is missing"),
        (
            {},
            ct_config(top={"transform_config": {"config_groups": {"R1": {}}}}),
            UnsupportedModelError,
            "transform_config is set",
        ),
        (
            {},
            ct_config(top={"config_groups": {"W4A16": ["Linear"]}}),
            UnsupportedModelError,
            r"config_groups\.W4A16 is \['Linear'\]",
        ),
    ],
)
def test_what_is_refused(
    write_model: WriteModel, parts: Parts, config: Any, error: type, words: str
) -> None:
    folder = write_model({KEY: parts} if parts else {}, config)
    with pytest.raises(error, match=words) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("size", [ROWS * COLUMNS, 1 << 40])
def test_blocks_larger_than_the_weight(write_model: WriteModel, size: int) -> None:
    """One scale is for all of it, and no more memory is taken for a larger block."""
    parts = bnb4({**FP4_STATE, "blocksize": size})
    parts[".weight.absmax"] = np.array([3], np.float32)
    parts[".weight.quant_map"] = np.full(16, 0.5, np.float32)
    folder = write_model({KEY: parts}, described("bitsandbytes"))
    assert (open_checkpoint(folder).tensor("layers.0.k").float32() == 1.5).all()
    parts = {".weight": (E4M3 + 1).astype(E4M3.dtype), ".weight_scale_inv": np.array([[3.0]], "f")}
    folder = write_model({KEY: parts}, described("fp8", weight_block_size=[size, size]))
    assert (open_checkpoint(folder).tensor("layers.0.k").float32() == 3).all()


def test_nothing_but_scales_is_read_to_open(write_model: WriteModel) -> None:
    """Shapes and kinds are known before codes are; a file that is cut off inside is refused."""
    parts, _ = mlx(4, 64, np.float16)
    folder = write_model({KEY: parts}, mlx_config())
    tensor = open_checkpoint(folder).tensor("layers.0.k")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 8])
    assert tensor.shape == (ROWS, COLUMNS)
    assert tensor.quantized is not None
    for read in (tensor.float32, tensor.quantized):
        with pytest.raises(ModelFormatError, match=r"model\.safetensors: tensor .* is cut off"):
            read()


def test_quantized_tensors_in_shards(
    write_model: WriteModel, save_tensors: Callable[[Path, Parts], None]
) -> None:
    from safetensors.numpy import load_file

    parts, values = mlx(5, 32, np.float16)
    folder = write_model({KEY: parts}, mlx_config(bits=5, group_size=32))
    tensors = load_file(folder / "model.safetensors")
    places = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(sorted(tensors))}
    for place in set(places.values()):
        chosen = {name: tensors[name] for name in tensors if places[name] == place}
        save_tensors(folder / place, chosen)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    tensor = open_checkpoint(folder).tensor("layers.0.k")
    np.testing.assert_array_equal(tensor.float32(), values)
