"""AWQ and GPTQ, packed number by number as their layouts say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hf_weights import Integers

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import Tensor, open_checkpoint
from edgellm.kernels.quantized import dequantize

WriteModel = Callable[..., Path]

KEY = "model.layers.0.self_attn.k_proj"
DOWN = "model.layers.0.mlp.down_proj"
SHAPES = {KEY: (64, 128), DOWN: (128, 256)}


class Weight(Integers):
    """Random integers in the shape of a module."""

    def __init__(self, module: str, **options: Any) -> None:
        super().__init__(np.random.default_rng(len(module)), *SHAPES[module], **options)


def awq_config(**changes: Any) -> dict[str, Any]:
    values = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 64}
    return {"quantization_config": {**values, "zero_point": True, **changes}}


def gptq_config(**changes: Any) -> dict[str, Any]:
    values = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
    return {"quantization_config": {**values, **changes}}


def read(folder: Path, module: str) -> Tensor:
    names = {KEY: "layers.0.k", DOWN: "layers.0.down"}
    return open_checkpoint(folder).tensor(names[module])


def assert_holds(tensor: Tensor, weight: Weight, kind: str) -> None:
    """That a tensor is a weight, in float32 and as the codes that it is stored as."""
    values = weight.values()
    assert tensor.shape == values.shape
    np.testing.assert_array_equal(tensor.float32(), values)
    assert tensor.quantized is not None
    quantized = tensor.quantized()
    assert quantized.kind.name == kind
    np.testing.assert_array_equal(quantized.codes, weight.codes)
    # an offset of up to `2^bits` steps is rounded to a half
    steps = np.repeat(weight.scales.astype(np.float32), 32, axis=1).max()
    lost = 0 if kind.endswith("symmetric") else steps * 2 ** (weight.bits - 11)
    assert np.abs(dequantize(quantized) - values).max() <= lost


@pytest.mark.parametrize("module", SHAPES)
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [False, True])
def test_awq(write_model: WriteModel, module: str, group: int, symmetric: bool) -> None:
    weight = Weight(module, group=group, symmetric=symmetric)
    folder = write_model({module: weight.awq()}, awq_config(group_size=group))
    tensor = read(folder, module)
    assert tensor.storage == "AWQ 4-bit"
    assert_holds(tensor, weight, "int4_symmetric" if symmetric else "int4_affine")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(write_model: WriteModel, bits: int, version: int, symmetric: bool) -> None:
    changes = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    for group in (32, 128, -1):
        weight = Weight(DOWN, bits=bits, group=group, symmetric=symmetric)
        config = gptq_config(bits=bits, group_size=group, **changes)
        tensor = read(write_model({DOWN: weight.gptq(version)}, config), DOWN)
        assert_holds(tensor, weight, f"int{bits}_{'symmetric' if symmetric else 'affine'}")


def test_every_zero_of_version_1(write_model: WriteModel) -> None:
    """0 is stored as -1, which borrows from the next zero of its word."""
    weight = Weight(DOWN)
    assert set(weight.zeros.reshape(-1)) == set(range(16))
    folder = write_model({DOWN: weight.gptq()}, gptq_config())
    np.testing.assert_array_equal(read(folder, DOWN).float32(), weight.values())


@pytest.mark.parametrize("desc_act", [False, True])
def test_scattered_groups_are_float32_alone(write_model: WriteModel, desc_act: bool) -> None:
    weight = Weight(DOWN)
    weight.group_of = np.random.default_rng(1).permutation(weight.group_of).tolist()
    folder = write_model({DOWN: weight.gptq()}, gptq_config(desc_act=desc_act))
    tensor = read(folder, DOWN)
    assert tensor.quantized is None
    np.testing.assert_array_equal(tensor.float32(), weight.values())


def test_groups_in_another_order_keep_their_codes(write_model: WriteModel) -> None:
    weight = Weight(DOWN)
    weight.group_of = [(3, 1, 0, 2)[g] for g in weight.group_of]
    folder = write_model({DOWN: weight.gptq()}, gptq_config(desc_act=True))
    assert_holds(read(folder, DOWN), weight, "int4_affine")


def test_without_an_index_groups_are_in_order(write_model: WriteModel) -> None:
    weight = Weight(DOWN)
    parts = weight.gptq()
    del parts[".g_idx"]
    assert_holds(read(write_model({DOWN: parts}, gptq_config()), DOWN), weight, "int4_affine")
    with pytest.raises(ModelFormatError, match=r"down_proj\.g_idx is missing"):
        read(write_model({DOWN: parts}, gptq_config(desc_act=True)), DOWN)


@pytest.mark.parametrize("group", [-1, 4, 1 << 20])
def test_index_out_of_range(write_model: WriteModel, group: int) -> None:
    parts = Weight(DOWN).gptq()
    parts[".g_idx"][100] = group
    with pytest.raises(ModelFormatError, match=r"g_idx puts inputs into groups .* groups 0 to 3"):
        read(write_model({DOWN: parts}, gptq_config()), DOWN)


def test_groups_that_are_no_multiple_of_32_are_float32_alone(write_model: WriteModel) -> None:
    weight = Weight(DOWN, group=16)
    tensor = read(write_model({DOWN: weight.gptq()}, gptq_config(group_size=16)), DOWN)
    assert tensor.quantized is None
    np.testing.assert_array_equal(tensor.float32(), weight.values())


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        (".qzeros", None, r"tensor .*k_proj\.qzeros is missing"),
        (".scales", None, r"tensor .*k_proj\.scales is missing"),
        (".qzeros", lambda a: a[:1], r"qzeros has shape \[1, 8\], .* ask for \[2, 8\]"),
        (".qzeros", lambda a: a[:, :4], r"qzeros has shape \[2, 4\]"),
        (".scales", lambda a: a[:, :-1], r"scales has shape \[2, 63\], .* ask for \[2, 64\]"),
        (".scales", lambda a: a * np.float16(np.inf), "scale that is infinite or not a number"),
        (".scales", lambda a: a * np.float16(np.nan), "scale that is infinite or not a number"),
        (".qweight", lambda a: a[None], r"qweight has shape \[1, "),
        (".qweight", lambda a: a[:0], r"qweight has shape \[0, "),
    ],
)
def test_tensors_that_do_not_fit(
    write_model: WriteModel, method: str, suffix: str, change: Any, words: str
) -> None:
    parts = getattr(Weight(KEY), method)()
    part = parts.pop(suffix)
    if change is not None:
        parts[suffix] = change(part)
    config = awq_config() if method == "awq" else gptq_config()
    with pytest.raises(ModelFormatError, match=words):
        read(write_model({KEY: parts}, config), KEY)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (
            awq_config(version="gemv"),
            UnsupportedModelError,
            "version 'gemv' .* supported is 'gemm'",
        ),
        (awq_config(version="marlin"), UnsupportedModelError, "'marlin'"),
        (awq_config(format="exllama"), UnsupportedModelError, "format 'exllama'"),
        (awq_config(bits=8), UnsupportedModelError, "bits is 8; supported are 4"),
        (awq_config(bits="4"), ModelFormatError, "'bits' is '4'; expected int"),
        (awq_config(group_size=0), ModelFormatError, "group_size is 0"),
        (awq_config(group_size=48), ModelFormatError, "48 does not divide the 128 inputs"),
        (awq_config(group_size=32), ModelFormatError, r"qzeros has shape \[2, 8\]"),
        (
            awq_config(modules_to_not_convert=["k_proj"]),
            ModelFormatError,
            "k_proj is not quantized",
        ),
        (awq_config(modules_to_not_convert=[KEY]), ModelFormatError, "k_proj is not quantized"),
        (gptq_config(bits=3), UnsupportedModelError, "bits is 3; supported are 4, 8"),
        (gptq_config(bits=None), ModelFormatError, "'bits' is missing"),
        (gptq_config(bits=8), ModelFormatError, "asks? for"),
        (gptq_config(checkpoint_format="marlin"), UnsupportedModelError, "checkpoint_format"),
        (gptq_config(is_marlin_format=True), UnsupportedModelError, "is_marlin_format"),
        (gptq_config(rotation="hadamard"), UnsupportedModelError, "rotation = 'hadamard'"),
        (gptq_config(group_size=-2), ModelFormatError, "group_size is -2"),
        (gptq_config(group_size=96), ModelFormatError, "96 does not divide the 128 inputs"),
    ],
)
def test_descriptions_that_are_refused(
    write_model: WriteModel, config: Mapping[str, Any], error: type, words: str
) -> None:
    method = config["quantization_config"]["quant_method"]
    folder = write_model({KEY: getattr(Weight(KEY), method)()}, config)
    with pytest.raises(error, match=words) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("listed", [["lm_head"], ["gate"], ["self_attn.k"], ["re:.*k_proj"], None])
def test_modules_that_stay_as_they_were(write_model: WriteModel, listed: list[str] | None) -> None:
    """Names of other modules, parts of names and patterns do not stand for a module."""
    weight = Weight(KEY)
    folder = write_model({KEY: weight.awq()}, awq_config(modules_to_not_convert=listed))
    assert_holds(read(folder, KEY), weight, "int4_affine")
    assert open_checkpoint(folder).tensor("head").storage == "BF16"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_scales_that_halves_do_not_hold(write_model: WriteModel, dtype: Any) -> None:
    weight = Weight(KEY)
    for scale, holds in [(0.01, True), (2**-14, True), (1.1e-6, False), (2**-24, True), (0, True)]:
        weight.scales = np.full(weight.scales.shape, 0.01).astype(dtype)
        weight.scales[3, 1] = scale
        tensor = read(write_model({KEY: weight.gptq()}, gptq_config()), KEY)
        assert (tensor.quantized is not None) == holds, scale
        np.testing.assert_array_equal(tensor.float32(), weight.values())


def test_scales_of_zeros_may_be_anything(write_model: WriteModel) -> None:
    weight = Weight(KEY)
    weight.scales = weight.scales.astype(np.float32)
    weight.scales[3, 1] = 1e-9
    weight.codes[3, 64:] = weight.zeros[3, 1]
    assert_holds(read(write_model({KEY: weight.awq()}, awq_config()), KEY), weight, "int4_affine")
    permuted = Weight(KEY)
    permuted.scales, permuted.codes, permuted.zeros = weight.scales, weight.codes, weight.zeros
    permuted.group_of = [1 - g for g in permuted.group_of]
    permuted.codes[3] = permuted.codes[3, ::-1]
    tensor = read(write_model({KEY: permuted.gptq()}, gptq_config()), KEY)
    assert_holds(tensor, permuted, "int4_affine")


def test_offsets_beyond_a_half(write_model: WriteModel) -> None:
    """Numbers and scales are below the largest half, and zeros times scales are not."""
    weight = Weight(KEY, bits=8)
    weight.scales[:] = 300
    weight.zeros[:], weight.codes[:] = 250, 200
    weight.zeros[0, 0] = 249
    tensor = read(write_model({KEY: weight.gptq()}, gptq_config(bits=8)), KEY)
    assert tensor.quantized is None
    np.testing.assert_array_equal(tensor.float32(), weight.values())


def test_biases_stay_as_they_are(write_model: WriteModel) -> None:
    weight, bias = Weight(KEY), np.arange(64, dtype=np.float16) / 64
    rest = {
        f"model.layers.0.self_attn.{name}_proj": {
            ".weight": np.zeros((rows, 128), np.float16),
            ".bias": np.zeros(rows, np.float16),
        }
        for name, rows in [("q", 128), ("v", 64)]
    }
    config = {"model_type": "qwen2", **gptq_config()}
    folder = write_model({**rest, KEY: {**weight.gptq(), ".bias": bias}}, config)
    assert_holds(read(folder, KEY), weight, "int4_affine")
    tensor = open_checkpoint(folder).tensor("layers.0.k_bias")
    np.testing.assert_array_equal(tensor.float32(), bias)
