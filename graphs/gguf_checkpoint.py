"""A model in a GGUF file.

Quantized tensors are taken over code by code where one of our kinds holds their type exactly. The
`gguf` package dequantizes the others.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.architecture import (
    GGUF_FUSED_DELTA,
    GGUF_FUSED_EXPERTS,
    GGUF_FUSED_LATENT,
    GGUF_FUSED_QKV,
    Architecture,
    GGUFHeader,
    architecture,
    model_type_of,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.gguf_blocks import FORMATS, weight_of
from edgellm.graphs.gguf_file import GGUFFile, StoredTensor
from edgellm.graphs.mtp import GGUF_TABLES, MtpCheckpoint, gguf_names, mtp_config
from edgellm.graphs.tensor import Tensor, checked
from edgellm.graphs.translation import Translation
from edgellm.kernels.quantized import row_slices

_EMBEDDING, _FUSED_QKV = "token_embd.weight", "blk.0.attn_qkv.weight"
_FUSED_DELTA = re.compile(r"blk\.\d+\.ssm_in\.weight")
_FUSED_EXPERTS, _FUSED_LATENT = "blk.0.ffn_gate_up_exps.weight", "blk.0.attn_kv_b.weight"
# Epsilons of norms, which are never refused: files may have both, and a model uses one of them.
_HARMLESS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
# Tensors that are not part of the text model's list: RoPE factors (read with the config or, as in
# llama.cpp, not at all), the vision tower in Ollama's files, and tables with which a drafter may
# compute fewer of its logits.
_UNUSED = re.compile(
    r"(blk\.\d+\.)?(rope_freqs|rope_factors_(long|short)|attn_rot_embd)\.weight|(v|mm)\..*"
    r"|masked_embd_(centroids|ordering)(\.weight)?"
)


class GGUFCheckpoint:
    """Checkpoint in a memory-mapped GGUF file, or in all parts of a split one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = GGUFFile(path)
        self.metadata, self._tensors = file.metadata, file.tensors
        fields = Fields(self.metadata, origin=str(path))
        kind = fields.optional(str, "general.type")
        if kind not in (None, "model"):
            raise UnsupportedModelError(f"{path}: a GGUF file of type {kind!r} is not a model")
        name = fields.read(str, "general.architecture")
        self._prefix = f"{name}."
        family = architecture(name, gguf=True, origin=str(path))
        header = self._header(name)
        self.config = _config(family, header)
        fused = _FUSED_QKV in self._tensors and self.config.layers[0].attends
        qkv = GGUF_FUSED_QKV if fused else {}
        experts = GGUF_FUSED_EXPERTS if _FUSED_EXPERTS in self._tensors else {}
        latent = GGUF_FUSED_LATENT if _FUSED_LATENT in self._tensors else {}
        delta = GGUF_FUSED_DELTA if any(map(_FUSED_DELTA.fullmatch, self._tensors)) else {}
        self._translation = Translation(
            config=self.config,
            names={**family.gguf_names, **qkv, **experts, **delta, **latent},
            interleaved=family.gguf_interleaved_rope,
            stored=self._stored,
            fold=lambda name, tensor: (
                tensor
                if family.gguf_fold is None
                else family.gguf_fold(name, tensor, header.fields)
            ),
        )

        self.mtp = self._mtp() if family.mtp else None

    def tensor(self, name: str) -> Tensor:
        return self._translation.tensor(name)

    def _mtp(self) -> MtpCheckpoint | None:
        block = self.config.layer_count
        nextn = f"blk.{block}.nextn."
        tables = any(f"blk.{block}.{name}" in self._tensors for name in GGUF_TABLES)
        if f"{nextn}eh_proj.weight" not in self._tensors or tables:
            return None
        own_norm = f"{nextn}shared_head_norm.weight" in self._tensors
        names = gguf_names(self._translation.names, block, own_norm=own_norm)
        config = mtp_config(self.config)
        translation = replace(self._translation, config=config, names=names)
        return MtpCheckpoint(self.path, config, self.metadata, translation)

    def refuse_unread(self) -> None:
        """Refuse tensors that the model as computed here does not use.

        llama.cpp adds some of them and multiplies by others, and opens no file with the rest.

        Raises:
            UnsupportedModelError: the file has such a tensor; the message names the first one.
        """
        known = self._translation.file_names() | self._translation.unused_names()
        blocks = Fields(self.metadata, origin="", prefix=self._prefix).read(int, "block_count")
        # layers that predict further tokens stand behind the model's own
        others = {f"blk.{block}" for block in range(self.config.layer_count, blocks)}
        for name in self._tensors:
            if ".".join(name.split(".")[:2]) in others:
                continue
            if name not in known and not _UNUSED.fullmatch(name):
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} is not understood, and leaving it out could "
                    "change what the model computes"
                )

    def _header(self, name: str) -> GGUFHeader:
        shape = self._stored(_EMBEDDING).shape
        return GGUFHeader(
            model_type=model_type_of(name, gguf=True),
            fields=Fields(self.metadata, origin=str(self.path), prefix=f"{name}."),
            vocab_size=shape[0] if shape else 0,
            tensors={name: entry.shape for name, entry in self._tensors.items()},
            vector=self._vector,
        )

    def _vector(self, key: str) -> list[float] | None:
        if key not in self._tensors:
            return None
        # factors of RoPE stay in float32: those of pairs that do not turn are far above a half
        values: list[float] = _dequantize(self._tensors[key], str(self.path)).reshape(-1).tolist()
        return values

    def _stored(self, key: str) -> Tensor:
        if key not in self._tensors:
            raise ModelFormatError(f"{self.path}: tensor {key} is missing")
        return tensor_of(self._tensors[key], origin=str(self.path))


def tensor_of(entry: StoredTensor, *, origin: str) -> Tensor:
    """Return a tensor of the GGUF file `origin`."""
    storage = entry.tensor_type.name
    tensor = Tensor(
        entry.shape,
        storage,
        float32=lambda: _dequantize(entry, origin),
        quantized=(lambda: weight_of(_rows(entry), storage)) if storage in FORMATS else None,
        nbytes=entry.data.nbytes,
    )
    return checked(tensor, f"{origin}: tensor {entry.name}")


def _config(family: Architecture, header: GGUFHeader) -> ModelConfig:
    assert family.config_from_gguf is not None
    config = family.config_from_gguf(header)
    header.fields.refuse_unread(harmless=_HARMLESS)
    return config


def _rows(entry: StoredTensor) -> NDArray[Any]:
    """Return the stored rows `[N, ...]` of a tensor of any dimensions."""
    data = np.atleast_1d(entry.data)
    return data.reshape(math.prod(data.shape[:-1]), data.shape[-1])


def _dequantize(entry: StoredTensor, origin: str) -> NDArray[np.float32]:
    import gguf

    stored = _rows(entry)
    columns = entry.shape[-1] if entry.shape else 1
    values = np.empty((len(stored), columns), np.float32)
    try:
        # a damaged scale may be infinite; `checked` refuses the values
        with np.errstate(invalid="ignore", over="ignore"):
            for part in row_slices(len(stored), columns):
                values[part] = gguf.dequantize(stored[part], entry.tensor_type)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{origin}: tensor {entry.name} is stored as {entry.tensor_type.name}, which the gguf "
            "package cannot dequantize"
        ) from None
    return values.reshape(entry.shape)
