"""Formats of quantized weights in Hugging Face folders, chosen by config.json."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import Fields
from edgellm.graphs.safetensors_folder import SafetensorsFolder
from edgellm.graphs.tensor import Tensor

# `quant_method` -> the file of this folder whose `Reader` reads it.
_METHODS = {
    "awq": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "fbgemm_fp8": "fp8",
    "fp8": "fp8",
    "gptq": "gptq",
    "mlx": "mlx",
    "mxfp4": "mxfp4",
}
# Keys, one per method, of the lists of modules that are not quantized.
_EXCLUDED = ("modules_to_not_convert", "ignored_layers", "ignore", "llm_int8_skip_modules")


class Reader(Protocol):
    """Reader of one format of quantized weights, by the config's description and the tensors."""

    def __init__(
        self, values: Mapping[str, Any], folder: SafetensorsFolder, *, origin: str
    ) -> None:
        """Check the description of the weights.

        Args:
            values: description in config.json.
            folder: tensors of the model.
            origin: name of the file and the key of the description in errors.

        Raises:
            ModelFormatError: the description is incomplete or contradicts itself.
            UnsupportedModelError: the variant of the format is not supported.
        """

    def tensor(self, module: str) -> Tensor | None:
        """Return the weight of a module; None where the folder holds it as plain numbers.

        Raises:
            ModelFormatError: tensors are missing or do not fit the description.
        """


class Quantization:
    """Quantized weights of a Hugging Face folder.

    The tensors decide which weights are quantized. The config's lists of modules that are not
    quantized are only compared with them, because libraries match names in different ways.
    """

    def __init__(self, reader: Reader, excluded: frozenset[str], *, origin: str) -> None:
        self._reader = reader
        self._excluded = excluded
        self._origin = origin

    def tensor(self, module: str) -> Tensor | None:
        """Return the weight of a module, see `Reader.tensor`.

        Raises:
            ModelFormatError: the config lists a quantized module as not quantized.
        """
        tensor = self._reader.tensor(module)
        if tensor is not None:
            for name in self._excluded:
                if f".{module}.".endswith(f".{name}.") or f"{module}.".startswith(f"{name}."):
                    raise ModelFormatError(
                        f"{self._origin} says that {name} is not quantized, but the tensors of "
                        f"{module} are; config and weights belong to different models"
                    )
        return tensor


def quantization_of(
    config: Mapping[str, Any], folder: SafetensorsFolder, *, origin: str
) -> Quantization | None:
    """Return the quantized weights that a config.json describes; None if it describes none.

    Raises:
        ModelFormatError: the description is broken.
        UnsupportedModelError: the method or its variant is not supported.
    """
    fields = Fields(config, origin=origin)
    # MLX writes its description under both names.
    key = "quantization" if config.get("quantization") is not None else "quantization_config"
    values = fields.optional(dict, key)
    if values is None:
        return None
    described = f"{origin}: {key}"
    method = Fields(values, origin=described).optional(str, "quant_method")
    if method is None and "group_size" in values:
        method = "mlx"
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"{described}: quant_method {method!r} is not read; read are {', '.join(_METHODS)}; "
            "take another file of the model, as GGUF or not quantized"
        )
    module = importlib.import_module(f"edgellm.graphs.hf_quantization.{_METHODS[method]}")
    reader: Reader = module.Reader(values, folder, origin=described)
    return Quantization(reader, _excluded_modules(values, described), origin=described)


def _excluded_modules(values: Mapping[str, Any], origin: str) -> frozenset[str]:
    """Read the names of modules that are not quantized; patterns among them match no module."""
    names: set[str] = set()
    for key in _EXCLUDED:
        listed = Fields(values, origin=origin).optional(list, key) or []
        names.update(name for name in listed if isinstance(name, str))
    return frozenset(names)
