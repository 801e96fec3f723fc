"""A model on disk, whatever its file format: a config and tensors under canonical names.

    embedding [V, E]    final_norm [E]    head [V, E] (absent where tied to the embedding)
    layers.I.attention_norm [E]    layers.I.mlp_norm [E]
    layers.I.q [H*D, E]    layers.I.k, layers.I.v [Hkv*D, E]    layers.I.o [E, H*D]
    layers.I.q_bias [H*D]    layers.I.k_bias, layers.I.v_bias [Hkv*D] (with `qkv_bias` alone)
    layers.I.gate, layers.I.up [F, E]    layers.I.down [E, F]

Rows of q and k are in the half-split RoPE order (first halves, then second halves of a head).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import EdgeLLMError, ModelFormatError, UnsupportedModelError
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.quantized import QuantizedWeight

_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint; only scales are read before one of its functions is called.

    Attributes:
        storage: how the file holds it, e.g. `Q4_1` or `BF16`.
        float32: the whole tensor as float32.
        nbytes: what it takes in the file; 0 where several tensors of the file make it.
        quantized: the same values as codes and scales, or None where no kind holds them exactly.
    """

    shape: tuple[int, ...]
    storage: str
    float32: Callable[[], NDArray[np.float32]]
    quantized: Callable[[], QuantizedWeight] | None = None
    nbytes: int = 0


def checked(tensor: Tensor, origin: str) -> Tensor:
    """The same tensor; what it gives are numbers that half precision holds.

    Scales are stored in half precision, so larger values would turn into infinity on their way.

    Args:
        origin: names the file and the tensor in errors.
    """

    def refuse_others(values: NDArray[np.float32]) -> None:
        # NaN fails both comparisons
        if values.size and not (values.max() <= _LARGEST_HALF and values.min() >= -_LARGEST_HALF):
            raise ModelFormatError(
                f"{origin} holds a value that is not a number, infinite or beyond "
                f"{_LARGEST_HALF:.0f}; the file is damaged, download it again"
            )

    def float32() -> NDArray[np.float32]:
        values = tensor.float32()
        refuse_others(values)
        return values

    def quantized() -> QuantizedWeight:
        assert tensor.quantized is not None
        weight = tensor.quantized()
        refuse_others(weight.scales())
        refuse_others(weight.offsets())
        return weight

    return replace(
        tensor,
        float32=float32,
        quantized=None if tensor.quantized is None else quantized,
    )


class Checkpoint(Protocol):
    """What the exporter reads.

    Attributes:
        path: the file or folder.
        metadata: GGUF's key-value pairs; empty for other formats.
    """

    path: Path
    config: ModelConfig
    metadata: Mapping[str, Any]

    def tensor(self, name: str) -> Tensor:
        """The tensor of a canonical name."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file or a Hugging Face folder.

    Raises:
        ModelFormatError: nothing there, damaged, or tensors that do not fit the config.
        UnsupportedModelError: an architecture or a feature that is not known.
    """
    from edgellm.graphs.gguf_checkpoint import GGUFCheckpoint
    from edgellm.graphs.safetensors_checkpoint import SafetensorsCheckpoint

    if not path.exists():
        raise ModelFormatError(f"{path}: no such file or folder")
    try:
        checkpoint = SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)
        check_shapes(checkpoint)
    except EdgeLLMError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None
    return checkpoint


def architecture(model_type: str, *, origin: str) -> ModuleType:
    """The module of `graphs/models/` that is named like the model type."""
    known = sorted(p.stem for p in (Path(__file__).parent / "models").glob("[a-z]*.py"))
    if model_type not in known:
        raise UnsupportedModelError(
            f"{origin}: architecture {model_type!r} is not supported; supported are "
            + ", ".join(known)
        )
    return importlib.import_module(f"edgellm.graphs.models.{model_type}")


def qkv_bias(checkpoint: Checkpoint, layer: int) -> NDArray[np.float32] | None:
    """What a layer adds to Q, K and V, `[H*D + 2 Hkv*D]`, if anything."""
    if not checkpoint.config.qkv_bias:
        return None
    parts = (checkpoint.tensor(f"layers.{layer}.{name}_bias") for name in "qkv")
    return np.concatenate([part.float32() for part in parts])


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every canonical name that a model of this config has, with its shape."""
    e, f = config.hidden_size, config.intermediate_size
    found: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, e), "final_norm": (e,)}
    if not config.tied_embedding:
        found["head"] = (config.vocab_size, e)
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        found[prefix + "attention_norm"] = found[prefix + "mlp_norm"] = (e,)
        found[prefix + "q"] = (config.attention_size, e)
        found[prefix + "k"] = found[prefix + "v"] = (config.kv_size, e)
        found[prefix + "o"] = (e, config.attention_size)
        if config.qkv_bias:
            found[prefix + "q_bias"] = (config.attention_size,)
            found[prefix + "k_bias"] = found[prefix + "v_bias"] = (config.kv_size,)
        found[prefix + "gate"] = found[prefix + "up"] = (f, e)
        found[prefix + "down"] = (e, f)
    return found


def check_shapes(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tensors do not match its config, before any is read."""
    for name, shape in shapes(checkpoint.config).items():
        found = checkpoint.tensor(name).shape
        if found != shape:
            raise ModelFormatError(
                f"{checkpoint.path}: tensor {name} has shape {list(found)}, but the config "
                f"asks for {list(shape)}"
            )


def file_name(canonical: str, templates: Mapping[str, str]) -> str:
    """A format's own tensor name, from its templates: `layers.3.q` -> `blk.3.attn_q.weight`."""
    if canonical.startswith("layers."):
        _, layer, part = canonical.split(".")
        return templates[f"layers.{part}"].format(layer)
    return templates[canonical]
