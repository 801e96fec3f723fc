"""Adapters as mlx-lm saves them: a folder with a config and safetensors.

MODULE.lora_a [inputs, rank]    MODULE.lora_b [rank, outputs]
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgellm.graphs.fields import Fields
from edgellm.graphs.lora.stored import StoredAdapter, StoredChange, hf_name, matrices
from edgellm.graphs.safetensors_folder import SafetensorsFolder, read_json
from edgellm.graphs.tensor import Tensor

WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<part>[ab])")


def read(folder: Path) -> StoredAdapter:
    """Read a folder that mlx-lm saved.

    Raises:
        ModelFormatError: a file is missing or damaged.
        UnsupportedModelError: the adapter is of another kind than LoRA.
    """
    fields = Fields(read_json(folder / CONFIG), origin=str(folder / CONFIG))
    fields.require("fine_tune_type", "lora")
    parameters = fields.read(dict, "lora_parameters")
    scale = Fields(parameters, origin=f"{fields.origin}: lora_parameters").read(float, "scale")
    weights = SafetensorsFolder(folder, file=WEIGHTS)
    origin = str(folder / WEIGHTS)
    pairs = matrices(weights, _KEY, parts="ab", origin=origin)
    changes = {
        hf_name(module): StoredChange(_transposed(a), _transposed(b), scale)
        for module, (a, b) in pairs.items()
    }
    return StoredAdapter(str(folder), None, changes)


def _transposed(tensor: Tensor) -> Tensor:
    return replace(
        tensor,
        shape=tensor.shape[::-1],
        float32=lambda: np.ascontiguousarray(tensor.float32().T),
    )
