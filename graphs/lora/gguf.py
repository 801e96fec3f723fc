"""Adapters in GGUF files, as llama.cpp's converter writes them.

    NAME.lora_a [rank, inputs]    NAME.lora_b [outputs, rank]

NAME is that of the matrix in a model's GGUF file. Rows of Q and K are in that file's order.
"""

from __future__ import annotations

import re
from pathlib import Path

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import Fields
from edgellm.graphs.gguf_checkpoint import tensor_of
from edgellm.graphs.gguf_file import GGUFFile
from edgellm.graphs.lora.stored import StoredAdapter, StoredChange, invocation_of

_KEY = re.compile(r"(?P<name>.+)\.lora_(?P<part>[ab])")


def read(path: Path) -> StoredAdapter:
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
        found = _KEY.fullmatch(key)
        if found is None:
            raise UnsupportedModelError(f"{path}: tensor {key} is no matrix of a LoRA adapter")
        pairs.setdefault(found["name"], {})[found["part"]] = key
    changes = {}
    for name, keys in pairs.items():
        if keys.keys() != {"a", "b"}:
            raise ModelFormatError(f"{path}: {name} has not both lora_a and lora_b")
        a, b = (tensor_of(file.tensors[keys[part]], origin=str(path)) for part in "ab")
        rank = (*b.shape, 0)[1]
        changes[name] = StoredChange(a, b, alpha / rank if alpha and rank else 1.0)
    architecture = fields.read(str, "general.architecture")
    return StoredAdapter(str(path), architecture, changes, invocation)
