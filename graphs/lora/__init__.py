"""Adapters (LoRA, arXiv:2106.09685) on disk, in three formats.

PEFT, a folder with a config and safetensors:
    base_model.model.MODULE.lora_A.weight [rank, inputs]    .lora_B.weight [outputs, rank]
mlx-lm, a folder with a config and safetensors:
    MODULE.lora_a [inputs, rank]    MODULE.lora_b [rank, outputs]
llama.cpp's converter, a GGUF file:
    NAME.lora_a [rank, inputs]    NAME.lora_b [outputs, rank]

NAME is that of the matrix in a model's GGUF file. Rows of Q and K are in that file's order.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.errors import EdgeLLMError, ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import Fields
from edgellm.graphs.gguf_checkpoint import tensor_of
from edgellm.graphs.gguf_file import GGUFFile
from edgellm.graphs.lora.stored import (
    StoredAdapter,
    StoredChange,
    changes_of,
    hf_name,
    invocation_of,
    matrices,
    pack_changes,
)
from edgellm.graphs.safetensors_folder import SafetensorsFolder, read_json
from edgellm.graphs.tensor import Tensor

__all__ = ["StoredAdapter", "changes_of", "open_adapter", "pack_changes"]

_CONFIG = "adapter_config.json"
_PEFT_WEIGHTS, _MLX_WEIGHTS = "adapter_model.safetensors", "adapters.safetensors"
_PEFT_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_MLX_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<part>[ab])")
_GGUF_KEY = re.compile(r"(?P<name>.+)\.lora_(?P<part>[ab])")
# Beginnings of matrices that leave the model's weights as they are; others are taken off them.
_PLAIN_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")
# Settings with `lora` or `pattern` in their names that only training uses, or that name modules.
_HARMLESS = ("lora_dropout", "layers_pattern", "qalora_group_size")
# Patterns that could take hours: a repeated group, or many repetitions.
_SLOW = re.compile(r"\)[*+?{]|(?:[*+?{].*){4}")
_LONGEST_PATTERN = 200


def open_adapter(path: Path) -> StoredAdapter:
    """Open an adapter: PEFT's or MLX's folder, or a GGUF file.

    Raises:
        ModelFormatError: nothing is there, or it is damaged, or no adapter.
        UnsupportedModelError: the adapter changes more than linear layers by matrices of low rank.
    """
    folder = path.parent if path.name in (_PEFT_WEIGHTS, _MLX_WEIGHTS) else path
    try:
        if path.suffix == ".gguf" and not path.is_dir():
            return _read_gguf(path)
        if not folder.is_dir():
            raise ModelFormatError(
                "not an adapter: neither a folder nor a .gguf file is there; a folder of PEFT has "
                f"{_PEFT_WEIGHTS}, one of MLX {_MLX_WEIGHTS}"
            )
        if (folder / _MLX_WEIGHTS).exists():
            return _read_mlx(folder)
        if not (folder / _CONFIG).exists():  # a client that names a folder is not told more
            raise ModelFormatError(f"not an adapter: {_CONFIG} is missing")
        return _read_peft(folder)
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from None
    except EdgeLLMError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None


def _read_peft(folder: Path) -> StoredAdapter:
    """Read a folder that PEFT saved.

    Raises:
        ModelFormatError: a file is missing or damaged.
        UnsupportedModelError: the adapter is of another kind than LoRA, or has parts beside it.
    """
    fields = Fields(read_json(folder / _CONFIG), origin=str(folder / _CONFIG))
    _refuse_other_kinds(fields)
    invocation = invocation_of(fields, "alora_invocation_tokens")
    if not (folder / _PEFT_WEIGHTS).exists():
        pickles = [p.name for p in folder.glob("*.bin")]
        advice = f"; {pickles[0]} is a pickle and is never opened" if pickles else ""
        raise ModelFormatError(
            f"{folder}: {_PEFT_WEIGHTS} is missing{advice}; save it as safetensors"
        )
    weights = SafetensorsFolder(folder, file=_PEFT_WEIGHTS)
    scales = _Scales(fields)
    origin = str(folder / _PEFT_WEIGHTS)
    pairs = matrices(weights, _PEFT_KEY, parts="AB", origin=origin)
    changes = {
        hf_name(module): StoredChange(a, b, scales.of(module, (*a.shape, 0)[0]))
        for module, (a, b) in pairs.items()
    }
    return StoredAdapter(str(folder), None, changes, invocation)


def _refuse_other_kinds(fields: Fields) -> None:
    if fields.read(str, "peft_type").upper() != "LORA":
        fields.require("peft_type", "LORA")
    for key in ("fan_in_fan_out", "use_dora", "lora_bias", "use_qalora", "use_bdlora"):
        fields.require(key, False)
    for key in ("modules_to_save", "target_parameters", "layer_replication"):
        fields.require(key, [])
    fields.require("trainable_token_indices")
    fields.require("bias", "none")
    fields.require("init_lora_weights", *_PLAIN_BEGINNINGS)


class _Scales:
    """Factors of the changes: `alpha / r`, or with rsLoRA (arXiv:2312.03732) `alpha / sqrt(r)`."""

    def __init__(self, fields: Fields) -> None:
        self._origin = fields.origin
        self._rank, self._alpha = fields.read(int, "r"), fields.read(float, "lora_alpha")
        self._root = fields.optional(bool, "use_rslora") or False
        self._ranks = self._patterns(fields, "rank_pattern")
        self._alphas = self._patterns(fields, "alpha_pattern")
        fields.refuse_unread(harmless=_HARMLESS)

    def of(self, module: str, rank: int) -> float:
        """Return the factor of a module whose matrices have a rank.

        Raises:
            ModelFormatError: the config says another rank.
        """
        said = self._of(self._ranks, module, self._rank)
        if rank != said or rank < 1:
            raise ModelFormatError(
                f"{self._origin}: the rank of {module} is {said:g}, and its matrices have {rank}"
            )
        alpha = float(self._of(self._alphas, module, self._alpha))
        return alpha / (math.sqrt(rank) if self._root else rank)

    def _of(self, patterns: dict[str, Any], module: str, default: float) -> float:
        """Return the value of the first pattern that fits the end of a module's name."""
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
        return default

    def _patterns(self, fields: Fields, key: str) -> dict[str, Any]:
        patterns = fields.optional(dict, key) or {}
        for pattern, value in patterns.items():
            long = len(pattern) > _LONGEST_PATTERN or _SLOW.search(pattern)
            if long or isinstance(value, bool) or not isinstance(value, int | float):
                raise UnsupportedModelError(
                    f"{fields.origin}: {key} has {pattern[:80]!r}: {value!r}; a pattern without "
                    f"repeated groups, with three repetitions at most in {_LONGEST_PATTERN} "
                    "characters, and a number are allowed"
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise ModelFormatError(
                    f"{fields.origin}: {key} has {pattern!r}, which is no pattern: {error}"
                ) from None
        return patterns


def _read_mlx(folder: Path) -> StoredAdapter:
    """Read a folder that mlx-lm saved.

    Raises:
        ModelFormatError: a file is missing or damaged.
        UnsupportedModelError: the adapter is of another kind than LoRA.
    """
    fields = Fields(read_json(folder / _CONFIG), origin=str(folder / _CONFIG))
    fields.require("fine_tune_type", "lora")
    parameters = fields.read(dict, "lora_parameters")
    scale = Fields(parameters, origin=f"{fields.origin}: lora_parameters").read(float, "scale")
    weights = SafetensorsFolder(folder, file=_MLX_WEIGHTS)
    origin = str(folder / _MLX_WEIGHTS)
    pairs = matrices(weights, _MLX_KEY, parts="ab", origin=origin)
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


def _read_gguf(path: Path) -> StoredAdapter:
    """Read a GGUF file of an adapter.

    Raises:
        ModelFormatError: the file is missing or damaged.
        UnsupportedModelError: the file is no adapter, or one of another kind than LoRA.
    """
    file = GGUFFile(path)
    fields = Fields(file.metadata, origin=str(path))
    kind = fields.optional(str, "general.type")
    if kind != "adapter":
        raise UnsupportedModelError(
            f"{path}: a GGUF file of type {kind!r} is no adapter; name a model in the place of the "
            "model"
        )
    fields.require("adapter.type", "lora")
    invocation = invocation_of(fields, "adapter.alora.invocation_tokens")
    alpha = fields.read(float, "adapter.lora.alpha")
    pairs: dict[str, dict[str, str]] = {}
    for key in file.tensors:
        match = _GGUF_KEY.fullmatch(key)
        if match is None:
            raise UnsupportedModelError(f"{path}: tensor {key} is no matrix of a LoRA adapter")
        pairs.setdefault(match["name"], {})[match["part"]] = key
    changes = {}
    for name, keys in pairs.items():
        if keys.keys() != {"a", "b"}:
            raise ModelFormatError(f"{path}: {name} has not both lora_a and lora_b")
        a, b = (tensor_of(file.tensors[keys[part]], origin=str(path)) for part in "ab")
        rank = (*b.shape, 0)[1]
        changes[name] = StoredChange(a, b, alpha / rank if alpha and rank else 1.0)
    architecture = fields.read(str, "general.architecture")
    return StoredAdapter(str(path), architecture, changes, invocation)
