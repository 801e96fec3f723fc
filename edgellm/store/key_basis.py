"""The basis of a bundle's keys, chosen so that rounding K in the KV cache costs less.

Exported K is divided by powers of two, one for each RoPE pair of a KV head, and Q is multiplied by
them. The KV cache leaves out a vector that all keys have in common. The result of attention stays
the same (see `quantize/keys.py`). All precisions of a bundle have one basis, because they write to
one cache. With K biases, as in Qwen2, 8-bit keys suffice only in this basis.

Norms of Q and K stand between projections and the cache, so the bundle stores them with the basis,
once for all precisions. In a model with such norms the powers of two are in their weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import StoredArray
from edgellm.graphs.tensors import model_tensors
from edgellm.store.manifest import Manifest, map_arrays

FOLDER = "keys"
EXPONENTS = "exponents"
OFFSET = "offset"
_HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class KeyBasis:
    """The basis in which a bundle's K and Q are exported.

    Attributes:
        exponents: `[layers, Hkv, P]` int8: K has been divided by 2^e and Q multiplied by it, in
            both channels of a pair.
        offset: `[layers, Hkv, D]` float32, the common part of the divided keys after RoPE, which
            the cache leaves out; None where keys have no common part (see `has_offset`).
    """

    exponents: NDArray[np.int8]
    offset: NDArray[np.float32] | None


def has_offset(config: ModelConfig) -> bool:
    """Whether the model's keys have a part in common: a K bias without a norm of K after it."""
    return config.attention.qkv_bias and config.attention.qk_norm == "none"


def is_head_norm(name: str) -> bool:
    """Whether a tensor is the weight of a norm of Q or K, by its full name or that in a layer."""
    return name.rpartition(".")[2] in _HEAD_NORMS


def shapes(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each array in the `keys` folder of a bundle of this config."""
    heads = (config.layer_count, config.kv_heads)
    needed: dict[str, tuple[str, tuple[int, ...]]] = {
        EXPONENTS: ("int8", (*heads, config.rope_pairs))
    }
    if has_offset(config):
        needed[OFFSET] = "float32", (*heads, config.head_dim)
    for name, spec in model_tensors(config).items():
        if is_head_norm(name):
            needed[name] = "float32", spec.shape
    return needed


def open_key_basis(root: Path, arrays: Mapping[str, StoredArray]) -> KeyBasis:
    """Map the key basis of the bundle at `root`; `arrays` is `keys` of its manifest."""
    parts = {name: array for name, array in arrays.items() if not is_head_norm(name)}
    values = map_arrays(root, parts)
    return KeyBasis(values[EXPONENTS], values.get(OFFSET))


def open_head_norms(
    root: Path, arrays: Mapping[str, StoredArray]
) -> dict[str, NDArray[np.float32]]:
    """Map the weights of norms of Q and K, already in the key basis, by their canonical names."""
    return map_arrays(root, {n: array for n, array in arrays.items() if is_head_norm(n)})


def fingerprint(manifest: Manifest) -> str:
    """Return a text that changes when keys of the same weights are stored in another basis."""
    return "".join(
        manifest.files[name].sha256 for name in sorted({a.file for a in manifest.keys.values()})
    )
