"""A Hugging Face folder: config.json and safetensors, plain or quantized."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError
from edgellm.graphs.checkpoint import Tensor, architecture, checked, file_name
from edgellm.graphs.config import Fields
from edgellm.graphs.hf_quantization.registry import quantization_of
from edgellm.graphs.safetensors_folder import DTYPES, FLOATS, SafetensorsFolder, read_json

# What files of quantized weights have beside or in place of a weight.
_QUANTIZED_PARTS = (".qweight", ".weight_packed", ".scales", ".weight_scale", ".weight_scale_inv")


class SafetensorsCheckpoint:
    """Tensors are read one at a time, each from its own shard."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = {}
        origin = str(path / "config.json")
        values = read_json(path / "config.json")
        model_type = Fields(values, origin=origin).read(str, "model_type")
        model = architecture(model_type, origin=origin)
        self.config = model.config_from_hf(values, origin=origin)
        self._templates: Mapping[str, str] = model.HF_TENSORS
        self._folder = SafetensorsFolder(path)
        self._quantization = quantization_of(values, self._folder, origin=origin)

    def tensor(self, name: str) -> Tensor:
        key = file_name(name, self._templates)
        module = key.removesuffix(".weight")
        if module != key:
            weight = self._quantized(module)
            if weight is not None:
                return checked(weight, f"{self.path}: tensor {key}")
        entry = self._folder.expect(key, FLOATS)

        def float32() -> NDArray[np.float32]:
            return self._folder.read(key).astype(np.float32)

        nbytes = math.prod(entry.shape) * np.dtype(DTYPES[entry.dtype]).itemsize
        tensor = Tensor(entry.shape, entry.dtype, float32, nbytes=nbytes)
        return checked(tensor, f"{entry.file}: tensor {key}")

    def _quantized(self, module: str) -> Tensor | None:
        """The weight of a module whose weight is quantized."""
        if self._quantization is not None:
            return self._quantization.tensor(module)
        for part in _QUANTIZED_PARTS:
            if module + part in self._folder:
                raise ModelFormatError(
                    f"{self.path}: tensor {module + part} is there, but config.json says nothing "
                    "of a quantization (`quantization_config`); take config.json from where the "
                    "weights come from"
                )
        return None
