"""A Hugging Face folder: config.json and safetensors, in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import Tensor, architecture, checked, file_name
from edgellm.graphs.config import Fields

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """Tensors are read one at a time, each from its own shard."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = {}
        values = read_json(path / "config.json")
        model_type = Fields(values, origin=str(path / "config.json")).read(str, "model_type")
        model = architecture(model_type, origin=str(path / "config.json"))
        self.config = model.config_from_hf(values, origin=str(path / "config.json"))
        self._templates: Mapping[str, str] = model.HF_TENSORS
        self._shards = _find_shards(path)

    def tensor(self, name: str) -> Tensor:
        key = file_name(name, self._templates)
        if key not in self._shards:
            raise ModelFormatError(f"{self.path}: tensor {key} is missing")
        shard = self._shards[key]
        with _open(shard) as file:
            if key not in file.keys():  # noqa: SIM118 (it is no mapping)
                raise ModelFormatError(
                    f"{self.path}: {_INDEX} says that tensor {key} is in {shard.name}, where it "
                    "is not; download the model again"
                )
            view = file.get_slice(key)
            shape, dtype = tuple(view.get_shape()), str(view.get_dtype())
        if dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"{shard}: tensor {key} is stored as {dtype}; supported are {', '.join(_DTYPES)}"
            )

        def float32() -> NDArray[np.float32]:
            with _open(shard) as file:
                return np.asarray(file.get_tensor(key)).astype(np.float32)

        return checked(Tensor(shape, dtype, float32), f"{shard}: tensor {key}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a ModelFormatError that names the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        present = ", ".join(sorted(p.name for p in path.parent.iterdir())) or "nothing"
        raise ModelFormatError(
            f"{path.parent}: {path.name} is missing; the folder holds {present}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelFormatError(f"{path}: expected a JSON object")
    return values


def _find_shards(folder: Path) -> dict[str, Path]:
    """The file of every tensor."""
    single = folder / "model.safetensors"
    if single.exists():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    if not (folder / _INDEX).exists():
        pickles = [p.name for p in folder.glob("*.bin")]
        advice = f"; {pickles[0]} is a pickle and is never opened" if pickles else ""
        raise ModelFormatError(
            f"{folder}: neither model.safetensors nor {_INDEX} is there{advice}; "
            "convert the model to safetensors"
        )
    weight_map = Fields(read_json(folder / _INDEX), origin=_INDEX).read(dict, "weight_map")
    shards = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFormatError(f"{folder / _INDEX}: {name!r} is not a file of this folder")
        if not (folder / name).exists():
            raise ModelFormatError(f"{folder}: shard {name} is missing")
        shards[key] = folder / name
    return shards


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(f"{path}: not a safetensors file: {error}") from None
