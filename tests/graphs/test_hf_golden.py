"""Quantized weights as the libraries of the formats write them, and what they read of them."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_golden import CASES, ROUNDED, array, write_tensors

from edgellm.errors import EdgeLLMError, ModelFormatError
from edgellm.graphs.hf_quantization import quantization_of
from edgellm.graphs.safetensors_folder import SafetensorsFolder
from edgellm.kernels.quantized import dequantize

# What holds the codes of a case; float32 alone holds those of the others.
KINDS = {
    "compressed-tensors pack-quantized int4": "int4_symmetric",
    "compressed-tensors pack-quantized int4 asymmetric": "int4_affine",
    "compressed-tensors pack-quantized int8": "int8_symmetric",
    "compressed-tensors pack-quantized int8 asymmetric": "int8_affine",
    "compressed-tensors int-quantized": "int8_symmetric",
    "compressed-tensors mxfp4-pack-quantized": "mxfp4",
    "bitsandbytes int8": "int8_symmetric",
    "mxfp4": "mxfp4",
    "mlx affine 2 bits, groups of 32": "int4_affine",
    "mlx affine 3 bits, groups of 32": "int4_affine",
    "mlx affine 4 bits, groups of 32": "int4_affine",
    "mlx affine 4 bits, groups of 64": "int4_affine",
    "mlx affine 5 bits, groups of 32": "int5_affine",
    "mlx affine 6 bits, groups of 32": "int8_affine",
    "mlx affine 8 bits, groups of 32": "int8_affine",
    "mlx mxfp4 4 bits, groups of 32": "mxfp4",
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_the_library_reads(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    write_tensors(tmp_path / "model.safetensors", case["tensors"])
    quantization = quantization_of(case["config"], SafetensorsFolder(tmp_path), origin="config")
    assert quantization is not None
    tensor = quantization.tensor("m")
    assert tensor is not None
    expected = array(case["expected"])
    assert tensor.shape == expected.shape
    values = tensor.float32()
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(values - expected) <= ROUNDED.get(name, 0) * largest).all()
    if name not in KINDS:
        assert tensor.quantized is None
        return
    assert tensor.quantized is not None
    weight = tensor.quantized()
    assert weight.kind.name == KINDS[name]
    # scales of codes, and offsets, are rounded to halves
    steps = np.repeat(np.abs(weight.scales()), 32, axis=1)
    parts = steps * (1 << weight.kind.bits) + np.repeat(np.abs(weight.offsets()), 32, axis=1)
    assert (np.abs(dequantize(weight) - values) <= 2**-11 * parts).all()


def test_every_kind_is_tested() -> None:
    assert KINDS.keys() <= CASES.keys()


AWKWARD = (
    None,
    True,
    -1,
    0,
    3,
    1 << 40,
    1 << 70,
    1.5,
    "x",
    [],
    ["a"],
    [0, 0],
    [1, 2],
    {},
    {"a": 1},
)


def variants(value: Any) -> Iterator[Any]:
    """JSON with one thing in it replaced or taken away."""
    yield from AWKWARD
    if isinstance(value, dict):
        for key, inner in value.items():
            rest = {k: v for k, v in value.items() if k != key}
            yield rest
            yield from ({**rest, key: changed} for changed in variants(inner))
    if isinstance(value, list):
        yield from ([changed] * len(value) for changed in AWKWARD)


def changed_tensors(tensors: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tensors without one, or with one of another type or shape."""
    for name, tensor in tensors.items():
        rest = {k: v for k, v in tensors.items() if k != name}
        yield rest
        size = len(base64.b64decode(tensor["data"]))
        for dtype, shape in [
            ("F32", [size // 4]),
            ("F16", [size // 2, 1]),
            ("U8", [1, size]),
            ("I8", [size]),
            ("BOOL", [size]),
            (tensor["dtype"], tensor["shape"][::-1]),
            (tensor["dtype"], [1, *tensor["shape"]]),
        ]:
            yield {**rest, name: {**tensor, "dtype": dtype, "shape": shape}}
        yield {**rest, name: {"dtype": tensor["dtype"], "shape": [0, 0], "data": ""}}
        damaged = base64.b64encode(b"\xff" * size).decode()
        yield {**rest, name: {**tensor, "data": damaged}}


@pytest.mark.parametrize("name", CASES)
def test_damage_never_escapes_as_other_errors(tmp_path: Path, name: str) -> None:
    case, path = CASES[name], tmp_path / "model.safetensors"
    write_tensors(path, case["tensors"])
    folder = SafetensorsFolder(tmp_path)
    for config in variants(case["config"]):
        if isinstance(config, dict):
            read_all(config, folder)
    for tensors in changed_tensors(case["tensors"]):
        write_tensors(path, tensors)
        with contextlib.suppress(ModelFormatError):  # shapes that are not those of the data
            read_all(case["config"], SafetensorsFolder(tmp_path))


def read_all(config: dict[str, Any], folder: SafetensorsFolder) -> None:
    """Reads a weight in every way, or not at all."""
    with contextlib.suppress(EdgeLLMError):
        quantization = quantization_of(config, folder, origin="config")
        tensor = None if quantization is None else quantization.tensor("m")
        if tensor is not None:
            assert tensor.float32().shape == tensor.shape
            if tensor.quantized is not None:
                assert tensor.quantized().shape == tensor.shape
