"""A Hugging Face folder: config.json and safetensors, plain or quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.errors import ModelFormatError
from edgellm.graphs.architecture import (
    HF_NAMES,
    HF_STACK,
    HF_STACKED_EXPERTS,
    Architecture,
    Names,
    architecture,
    mlx_experts,
    model_type_of,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.hf_quantization import quantization_of
from edgellm.graphs.layer_kinds import FULL
from edgellm.graphs.mtp import HF_COMBINE, HF_TABLES, MtpCheckpoint, hf_names, mtp_config
from edgellm.graphs.safetensors_folder import SafetensorsFolder, read_json
from edgellm.graphs.tensor import Tensor, checked
from edgellm.graphs.translation import Translation

# Suffixes of the tensors that stand beside or in place of a quantized weight.
_QUANTIZED_PARTS = (".qweight", ".weight_packed", ".scales", ".weight_scale", ".weight_scale_inv")
# Prefix of a text model's tensors -> prefix of its LM head: in text models, and in multimodal
# models as new and old versions of transformers write them.
_PREFIXES = {
    "model.": "",
    "model.language_model.": "",
    "model.text_model.": "",
    "language_model.model.": "language_model.",
}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Settings that are never refused, whatever their names suggest: only training or output uses them.
_HARMLESS = (
    "activation_dropout",
    "initializer_factor",
    "output_router_logits",
    "pixel_shuffle_factor",
    "residual_dropout",
)
# Models that draft for another one -> width of its hidden states, where they do not say it.
_BACKBONES = {"gemma4_assistant": 1536, "gemma4_unified_assistant": 3840}
# Entries of lists that stand for the usual layer.
_USUAL = (("layer_types", FULL),)


@dataclass(frozen=True)
class FolderConfig:
    """Contents of a config.json.

    Attributes:
        values: values of the whole file.
        fields: settings of the text model, which the config was made of.
        family: architecture that the file names.
        config: configuration of the text model.
    """

    values: Mapping[str, Any]
    fields: Fields
    family: Architecture
    config: ModelConfig


def read_config(path: Path) -> FolderConfig:
    """Read the config.json of a folder; its other files may be missing.

    Raises:
        ModelFormatError: the file is missing or damaged.
        UnsupportedModelError: the architecture or a setting is not supported.
    """
    origin = str(path / "config.json")
    values = read_json(path / "config.json")
    fields = _text_fields(values, origin)
    family = architecture(fields.read(str, "model_type"), gguf=False, origin=origin)
    assert family.config_from_hf is not None
    config = family.config_from_hf(fields)
    fields.refuse_unread(harmless=_HARMLESS, usual=_USUAL)
    return FolderConfig(values, fields, family, config)


class SafetensorsCheckpoint:
    """Checkpoint in a Hugging Face folder; each tensor is read from its own shard on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = {}
        read = read_config(path)
        family, values = read.family, read.values
        self._folder = SafetensorsFolder(path)
        self._prefix = next((p for p in _PREFIXES if f"{p}norm.weight" in self._folder), "model.")
        self._quantization = quantization_of(
            values if _quantized(values) else values.get("text_config") or {},
            self._folder,
            origin=str(path / "config.json"),
        )
        tied = read.config.tied_embedding and not self._has_own_head()
        self.config = replace(read.config, tied_embedding=tied)
        names = {**family.hf_names, **self._stacked_experts(family.hf_names)}
        self._translation = Translation(
            config=self.config,
            names=names,
            interleaved=family.hf_interleaved_rope,
            stored=self._stored,
            fold=lambda name, tensor: (
                tensor if family.hf_fold is None else family.hf_fold(name, tensor, read.fields)
            ),
        )
        self.mtp = self._mtp() if family.mtp else None

    def tensor(self, name: str) -> Tensor:
        return self._translation.tensor(name)

    def _mtp(self) -> MtpCheckpoint | None:
        tables = any(self._file_name(name) in self._folder for name in HF_TABLES)
        if self._file_name(HF_COMBINE) not in self._folder or tables:
            return None
        stack = self._file_name(f"mtp.layers.0.{HF_STACK}") in self._folder
        names = {**self._translation.names, **(HF_STACKED_EXPERTS if stack else {})}
        config = mtp_config(self.config)
        translation = replace(self._translation, config=config, names=hf_names(names))
        return MtpCheckpoint(self.path, config, self.metadata, translation)

    def _stored(self, name: str) -> Tensor:
        key = self._file_name(name)
        module = key.removesuffix(".weight")
        if module != key or key.endswith("_proj"):  # stacks of experts have no suffix
            weight = self._quantized(module)
            if weight is not None:
                return checked(weight, f"{self.path}: tensor {key}")
        return self._folder.tensor(key)

    def _stacked_experts(self, names: Names) -> Names:
        if names.get("expert_gate") == HF_NAMES["expert_gate"] and any(
            self._file_name(f"model.layers.{i}.{HF_STACK}") in self._folder
            for i in range(self.config.layer_count)
        ):
            return HF_STACKED_EXPERTS
        return mlx_experts(
            self.config.layer_count, lambda name: self._file_name(name) in self._folder
        )

    def _has_own_head(self) -> bool:
        """Whether the folder has an LM head whose values differ from the embedding.

        Such a head is used whatever `tie_word_embeddings` says, as in transformers.
        """
        if self._file_name(_HEAD) not in self._folder:
            return False
        head, embedding = (self._stored(name).float32() for name in (_HEAD, _EMBEDDING))
        return not np.array_equal(head, embedding)

    def _file_name(self, name: str) -> str:
        """Return this folder's name of a tensor, given its name in a text model's own folder."""
        if name.startswith("model."):
            return self._prefix + name.removeprefix("model.")
        return _PREFIXES[self._prefix] + name

    def _quantized(self, module: str) -> Tensor | None:
        """Return the weight of a module if it is quantized, else None.

        Raises:
            ModelFormatError: the tensors are quantized, and config.json has no description of that.
        """
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


def _text_fields(values: Mapping[str, Any], origin: str) -> Fields:
    """Return the settings of the text model, which are nested in those of multimodal models."""
    outer = Fields(values, origin=origin)
    text = outer.optional(dict, "text_config")
    if text is None:
        return outer
    nested, model_type = dict(text), outer.read(str, "model_type")
    nested.setdefault("model_type", model_type_of(model_type, gguf=False))
    if model_type in _BACKBONES:
        width = outer.optional(int, "backbone_hidden_size")
        nested["backbone_hidden_size"] = width or _BACKBONES[model_type]
    tied = outer.optional(bool, "tie_word_embeddings")
    if tied is not None:
        nested["tie_word_embeddings"] = tied
    elif nested.get("tie_word_embeddings") is None:
        # a head is used if the folder has one, see `_has_own_head`
        nested["tie_word_embeddings"] = True
    return Fields(nested, origin=f"{origin}: text_config")


def _quantized(values: Mapping[str, Any]) -> bool:
    return any(values.get(key) is not None for key in ("quantization", "quantization_config"))
