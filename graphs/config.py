"""What a model is: the frozen numbers that every part of edgellm reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.typed_json import parse

T = TypeVar("T")
# Far above every model there is. What is larger is damage, and would take hours and all memory
# before anything else refuses it.
_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "layers": 1 << 12,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "context_length": (1 << 31) - 1,
    "sliding_window": (1 << 31) - 1,
}
# Of a head at least this share is rotated; the least that models have is a quarter (GPT-NeoX).
_ROTATED_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer.

    Attributes:
        model_type: names the file in `graphs/models/` that describes the architecture.
        inv_freq: RoPE angle per position of each rotated pair, scaling already applied.
        sliding_window: a token attends to this many positions, or to all if None.
        qkv_bias: whether something is added to Q, K and V before RoPE.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    inv_freq: tuple[float, ...]
    sliding_window: int | None
    tied_embedding: bool
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= largest:
                raise ModelFormatError(
                    f"model config: {name} is {_shown(value)}; 1 to {largest} is allowed"
                )
        if not (math.isfinite(self.rms_norm_eps) and 0 < self.rms_norm_eps < 1):
            raise ModelFormatError(
                f"model config: rms_norm_eps is {self.rms_norm_eps}; it must be between 0 and 1"
            )
        if self.heads % self.kv_heads:
            raise ModelFormatError(
                f"model config: heads ({self.heads}) must be a multiple of "
                f"kv_heads ({self.kv_heads})"
            )
        self._check_rope()
        if self.head_dim % 4:
            raise UnsupportedModelError(
                f"model config: head_dim is {self.head_dim}; it must be a multiple of 4"
            )
        # so that Q, K and V of the fused projection together fill whole panels of 16 outputs
        if self.kv_size % 8:
            raise UnsupportedModelError(
                f"model config: kv_heads * head_dim is {self.kv_size}; it must be a multiple of 8"
            )
        for name in ("hidden_size", "intermediate_size", "attention_size"):
            if getattr(self, name) % 32:
                raise UnsupportedModelError(
                    f"model config: {name} is {getattr(self, name)}; weights are quantized in "
                    "groups of 32, so it must be a multiple of 32"
                )

    def _check_rope(self) -> None:
        rotated = 2 * len(self.inv_freq)
        if not self.head_dim // _ROTATED_SHARE <= rotated <= self.head_dim:
            raise ModelFormatError(
                f"model config: RoPE rotates {rotated} dimensions, but a head has "
                f"{self.head_dim}; a quarter of them to all is allowed"
            )
        if not all(math.isfinite(angle) and angle > 0 for angle in self.inv_freq):
            raise ModelFormatError("model config: inv_freq must be positive finite numbers")

    @property
    def attention_size(self) -> int:
        """Width of the attention output, `heads * head_dim`."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of the fused projection: all query heads, then K, then V."""
        return self.attention_size + 2 * self.kv_size

    @property
    def linear_parameters(self) -> int:
        """Weights of all linear layers, without embedding and head."""
        attention = self.hidden_size * (self.qkv_size + self.attention_size)
        return self.layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def parameters(self) -> int:
        embedding = self.vocab_size * self.hidden_size * (1 if self.tied_embedding else 2)
        norms = (2 * self.layers + 1) * self.hidden_size
        biases = self.layers * self.qkv_size if self.qkv_bias else 0
        return self.linear_parameters + embedding + norms + biases

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelConfig:
        return parse(cls, values, where="model config")


class Fields:
    """Typed reads from a config file: `fields.read(int, "num_attention_heads")`."""

    def __init__(self, values: Mapping[str, Any], *, origin: str) -> None:
        self._values = values
        self._origin = origin

    def read(self, kind: type[T], key: str) -> T:
        """The value of a required key."""
        value = self.optional(kind, key)
        if value is None:
            raise ModelFormatError(f"{self._origin}: key {key!r} is missing")
        return value

    def optional(self, kind: type[T], key: str) -> T | None:
        """The value of a key, or None where it is absent or null."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ModelFormatError(
                f"{self._origin}: key {key!r} is {_shown(value)}; a number below 2^63 is allowed"
            )
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelFormatError(
                f"{self._origin}: key {key!r} is {value!r}; expected {kind.__name__}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelFormatError(f"{self._origin}: key {key!r} is {value!r}; expected a number")
        return value

    def require(self, key: str, *allowed: object) -> None:
        """Refuse a checkpoint that asks for something this version does not compute."""
        value = self._values.get(key)
        if value is not None and value not in allowed:
            names = " or ".join(repr(a) for a in allowed)
            raise UnsupportedModelError(
                f"{self._origin}: {key} = {value!r} is not supported; supported is {names}"
            )


def _shown(value: int) -> str:
    """Digits of a number, unless there are hundreds of them."""
    return str(value) if abs(value) < 1 << 128 else f"a number of {value.bit_length()} bits"
