"""Weights that the libraries of the formats quantized (see tests/graphs/make_hf_golden.py)."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.graphs.safetensors_folder import dtypes

CASES = json.loads((Path(__file__).parent.parent / "graphs" / "hf_golden.json").read_text())
# What the libraries compute in half precision or in bfloat16, of the largest number of a row.
ROUNDED = {"bitsandbytes int8": 2**-10, "compressed-tensors nvfp4-pack-quantized": 2**-8}


def write_tensors(path: Path, tensors: Mapping[str, Mapping[str, Any]]) -> None:
    """A safetensors file of tensors as the golden file has them."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        content = base64.b64decode(tensor["data"])
        offsets = [len(data), len(data) + len(content)]
        described = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": offsets}
        header[name], data = described, data + content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def array(tensor: Mapping[str, Any]) -> np.ndarray:
    values = np.frombuffer(base64.b64decode(tensor["data"]), dtypes()[tensor["dtype"]])
    return values.reshape(tensor["shape"])
