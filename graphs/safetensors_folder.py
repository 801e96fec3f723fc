"""Tensors in a folder of safetensors files, in one file or in shards, by name.

Dtypes that numpy lacks (bfloat16, 8-bit floats) are those of ml_dtypes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import Fields
from edgellm.graphs.tensor import Tensor, checked

FLOATS = ("F32", "F16", "BF16")
_INDEX = "model.safetensors.index.json"


@cache
def dtypes() -> Mapping[str, Any]:
    """Map the names of dtypes in safetensors to numpy's."""
    import ml_dtypes  # 7 ms, which programs that open a bundle need not wait for

    return {
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64,
        "I32": np.int32,
        "U32": np.uint32,
        "I8": np.int8,
        "U8": np.uint8,
    }


@dataclass(frozen=True)
class Entry:
    """Place, shape and dtype of a tensor.

    Attributes:
        file: file that holds the tensor.
        dtype: name of the dtype in safetensors, a key of `dtypes()`.
        first: first byte of the tensor's data in the file.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    first: int


class SafetensorsFolder:
    """Folder of safetensors files; headers are read once, and data on demand.

    Args:
        file: name of the one file to read; None: those of a model.
    """

    def __init__(self, path: Path, *, file: str | None = None) -> None:
        self.path = path
        if file is None:
            self._shards = _find_shards(path)
        else:
            self._shards = dict.fromkeys(_read_header(path / file), path / file)
        self._headers: dict[Path, dict[str, Entry]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._shards

    @property
    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self._shards)

    @property
    def files(self) -> list[Path]:
        """Files that hold the tensors, sorted."""
        return sorted(set(self._shards.values()))

    def entry(self, key: str) -> Entry:
        """Return the entry of a tensor.

        Raises:
            ModelFormatError: the tensor is missing.
        """
        if key not in self._shards:
            raise ModelFormatError(f"{self.path}: tensor {key} is missing")
        shard = self._shards[key]
        if shard not in self._headers:
            self._headers[shard] = _read_header(shard)
        if key not in self._headers[shard]:
            raise ModelFormatError(
                f"{self.path}: {_INDEX} says that tensor {key} is in {shard.name}, where it "
                "is not; download the model again"
            )
        return self._headers[shard][key]

    def expect(
        self, key: str, dtypes: Sequence[str], *, shape: tuple[int | None, ...] | None = None
    ) -> Entry:
        """Return the entry of a tensor after checks of its dtype and shape.

        Args:
            dtypes: allowed dtypes.
            shape: expected shape, in which None stands for any size but 0; None: any shape.

        Raises:
            ModelFormatError: the tensor is missing, or has another shape.
            UnsupportedModelError: the tensor has another dtype.
        """
        entry = self.entry(key)
        if entry.dtype not in dtypes:
            raise UnsupportedModelError(
                f"{entry.file}: tensor {key} is stored as {entry.dtype}; supported are "
                + ", ".join(dtypes)
            )
        if shape is not None and not _fits(entry.shape, shape):
            asked = ", ".join("above 0" if size is None else str(size) for size in shape)
            raise ModelFormatError(
                f"{entry.file}: tensor {key} has shape {list(entry.shape)}, but the config and "
                f"the tensors beside it ask for [{asked}]"
            )
        return entry

    def read(self, key: str) -> NDArray[Any]:
        """Read a whole tensor in its stored dtype.

        Raises:
            ModelFormatError: the tensor is missing or cut off, or the file is not readable.
        """
        entry = self.entry(key)
        dtype = np.dtype(dtypes()[entry.dtype])
        count = int(np.prod(entry.shape, dtype=np.int64))
        try:
            values = np.fromfile(entry.file, dtype, count, offset=entry.first)
        except OSError as error:
            raise ModelFormatError(f"{entry.file}: {error.strerror or error}") from None
        if values.size != count:
            raise ModelFormatError(f"{entry.file}: tensor {key} is cut off; download it again")
        return values.reshape(entry.shape)

    def tensor(self, key: str) -> Tensor:
        """Return a tensor of floats, whose values are read when they are asked for.

        Raises:
            ModelFormatError: the tensor is missing.
            UnsupportedModelError: it is not stored as floats.
        """
        entry = self.expect(key, FLOATS)

        def float32() -> NDArray[np.float32]:
            return self.read(key).astype(np.float32)

        nbytes = math.prod(entry.shape) * np.dtype(dtypes()[entry.dtype]).itemsize
        tensor = Tensor(entry.shape, entry.dtype, float32, nbytes=nbytes)
        return checked(tensor, f"{entry.file}: tensor {key}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ModelFormatError: the file is missing or holds no JSON object; the message names it.
    """
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


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of a header; refuse equal keys, of which libraries take different ones."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ModelFormatError(f"{path}: damaged: a key of its header occurs twice")
    return values


def _fits(shape: tuple[int, ...], pattern: tuple[int | None, ...]) -> bool:
    return len(shape) == len(pattern) and all(
        size > 0 if wanted is None else size == wanted
        for size, wanted in zip(shape, pattern, strict=True)
    )


def _find_shards(folder: Path) -> dict[str, Path]:
    """Map the name of every tensor to its file."""
    single = folder / "model.safetensors"
    if single.exists():
        return dict.fromkeys(_read_header(single), single)
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


def _read_header(path: Path) -> dict[str, Entry]:
    """Read the entries of a file's tensors; the library checks sizes, ranges and overlaps."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(f"{path}: not a safetensors file: {error}") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length), object_pairs_hook=partial(_unique, path))
    header.pop("__metadata__", None)
    data = 8 + length
    return {
        key: Entry(path, tuple(each["shape"]), each["dtype"], data + each["data_offsets"][0])
        for key, each in header.items()
    }
