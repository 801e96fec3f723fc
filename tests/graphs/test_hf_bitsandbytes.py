"""bitsandbytes: 4 bits by a table, and 8 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_formats import described
from hf_weights import Parts

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import open_checkpoint

WriteModel = Callable[..., Path]
Refuses = Callable[..., None]

KEY = "model.layers.0.self_attn.k_proj"
ROWS, COLUMNS = 64, 128
INT8 = np.zeros((ROWS, COLUMNS), np.int8)
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


@pytest.mark.parametrize("size", [ROWS * COLUMNS, 1 << 40])
def test_blocks_larger_than_the_weight(write_model: WriteModel, size: int) -> None:
    """One scale is for all of it, and no more memory is taken for a larger block."""
    parts = bnb4({**FP4_STATE, "blocksize": size})
    parts[".weight.absmax"] = np.array([3], np.float32)
    parts[".weight.quant_map"] = np.full(16, 0.5, np.float32)
    folder = write_model({KEY: parts}, described("bitsandbytes"))
    assert (open_checkpoint(folder).tensor("layers.0.k").float32() == 1.5).all()


@pytest.mark.parametrize(
    ("parts", "config", "error", "words"),
    [
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
    ],
)
def test_what_is_refused(
    refuses: Refuses, parts: Parts, config: Any, error: type, words: str
) -> None:
    refuses({KEY: parts}, config, error, words)
