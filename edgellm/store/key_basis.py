"""The basis of a bundle's keys, chosen so that rounding K in the KV cache costs less.

Exported K is divided by powers of two, one for each RoPE pair of a KV head, and Q is multiplied by
them. The KV cache leaves out a vector that all keys have in common. The result of attention stays
the same (see `quantize/basis.py`). All precisions of a bundle have one basis, because they write to
one cache. With K biases, as in Qwen2, 8-bit keys suffice only in this basis.

Norms of Q and K stand between projections and the cache, so the bundle stores them with the basis,
once for all precisions. In a model with such norms the powers of two are in their weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import StoredArray
from edgellm.graphs.layer_config import Attention
from edgellm.graphs.tensors import model_tensors
from edgellm.store.manifest import Manifest, map_arrays

Exponents = NDArray[np.int8]
FOLDER = "keys"
EXPONENTS = "exponents"
OFFSET = "offset"
_HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class KeyBasis:
    """The basis in which a bundle's K and Q are exported.

    Attributes:
        exponents: `[Hkv, P]` int8 for each layer: K has been divided by 2^e and Q multiplied by it,
            in both channels of a pair. A layer that does not attend has `[0, 0]`.
        offsets: `[Hkv, D]` float32 for each layer, the common part of the divided keys after RoPE,
            which the cache leaves out; None where no keys have a common part (see `has_offset`).
    """

    exponents: Sequence[Exponents]
    offsets: Sequence[NDArray[np.float32]] | None


def has_offset(config: ModelConfig) -> bool:
    """Whether keys of some layer have a part in common: a K bias without a norm of K after it."""
    attentions = config.attentions.values()
    return any(each.qkv_bias and each.qk_norm == "none" for each in attentions)


def is_head_norm(name: str) -> bool:
    """Whether a tensor is the weight of a norm of Q or K, by its full name or that in a layer."""
    return name.rpartition(".")[2] in _HEAD_NORMS


def shapes(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each array in the `keys` folder of a bundle of this config."""
    needed: dict[str, tuple[str, tuple[int, ...]]] = {
        EXPONENTS: ("int8", _stored_shape(_pair_shapes(config)))
    }
    if has_offset(config):
        needed[OFFSET] = "float32", _stored_shape(_key_shapes(config))
    for name, spec in model_tensors(config).items():
        if is_head_norm(name):
            needed[name] = "float32", spec.shape
    return needed


def stored_arrays(basis: KeyBasis) -> dict[str, NDArray[Any]]:
    """Return the arrays that a bundle has of a basis, by name; see `shapes`."""
    arrays: dict[str, NDArray[Any]] = {EXPONENTS: _stored(basis.exponents)}
    if basis.offsets is not None:
        arrays[OFFSET] = _stored(basis.offsets)
    return arrays


def open_key_basis(root: Path, arrays: Mapping[str, StoredArray], config: ModelConfig) -> KeyBasis:
    """Map the key basis of the bundle at `root`; `arrays` is `keys` of its manifest."""
    parts = {name: array for name, array in arrays.items() if not is_head_norm(name)}
    values = map_arrays(root, parts)
    exponents = _by_layer(values[EXPONENTS], _pair_shapes(config))
    if OFFSET not in values:
        return KeyBasis(exponents, None)
    return KeyBasis(exponents, _by_layer(values[OFFSET], _key_shapes(config)))


def open_head_norms(
    root: Path, arrays: Mapping[str, StoredArray]
) -> dict[str, NDArray[np.float32]]:
    """Map the weights of norms of Q and K, already in the key basis, by their canonical names."""
    return map_arrays(root, {n: array for n, array in arrays.items() if is_head_norm(n)})


def of_channels(exponents: Exponents, attention: Attention) -> Exponents:
    """Expand exponents of pairs `[Hkv, P]` to channels `[Hkv, D]`; 0 for channels without RoPE."""
    channels = np.zeros((attention.kv_heads, attention.head_dim), np.int8)
    half = exponents.shape[1]
    channels[:, :half] = channels[:, half : 2 * half] = exponents
    return channels


def of_rows(exponents: Exponents, attention: Attention, *, heads: int) -> Exponents:
    """Expand exponents of pairs `[Hkv, P]` to the rows `[heads * D]` of a projection."""
    channels = of_channels(exponents, attention)
    return np.repeat(channels, heads // attention.kv_heads, axis=0).reshape(-1)


def fingerprint(manifest: Manifest) -> str:
    """Return a text that changes when keys of the same weights are stored in another basis."""
    return "".join(
        manifest.files[name].sha256 for name in sorted({a.file for a in manifest.keys.values()})
    )


def _pair_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Return `[Hkv, P]` of each layer."""
    there = config.attentions
    shapes = {i: (each.kv_heads, len(config.rope_of(i).inv_freq)) for i, each in there.items()}
    return [shapes.get(i, (0, 0)) for i in range(config.layer_count)]


def _key_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Return `[Hkv, D]` of each layer."""
    shapes = {i: (each.kv_heads, each.head_dim) for i, each in config.attentions.items()}
    return [shapes.get(i, (0, 0)) for i in range(config.layer_count)]


def _stored_shape(layers: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a stored array of layers: flat where their shapes differ."""
    if len(set(layers)) == 1:
        return (len(layers), *layers[0])
    return (sum(math.prod(shape) for shape in layers),)


def _stored(layers: Sequence[NDArray[Any]]) -> NDArray[Any]:
    shape = _stored_shape([layer.shape for layer in layers])
    return np.concatenate([layer.reshape(-1) for layer in layers]).reshape(shape)


def _by_layer(array: NDArray[Any], layers: Sequence[tuple[int, int]]) -> list[NDArray[Any]]:
    ends = np.cumsum([math.prod(shape) for shape in layers])
    parts = np.split(array.reshape(-1), ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, layers, strict=True)]
