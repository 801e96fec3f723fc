"""What an export did to a model's keys, so that rounding them in the KV cache costs less.

Exported K is divided by powers of two, one for each RoPE pair of a KV head, and Q is multiplied by
them; and a vector that all keys have in common is for the cache to leave out. Neither changes what
attention computes (see `quantize/keys.py`). It is the same for all precisions of a bundle: they
write to one cache. With K biases, as in Qwen2, it is what 8 bits are enough for.

Norms of Q and K stand between projections and the cache, so they are here as well, once for all
precisions; in a model that has them the powers of two are in their weights.
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
    """How the keys of a bundle are to be read.

    Attributes:
        exponents: `[layers, Hkv, P]` int8: K has been divided by 2^e and Q multiplied by it, in
            both channels of a pair.
        offset: `[layers, Hkv, D]` float32, of keys after RoPE and after that; None where keys have
            nothing in common (see `has_offset`).
    """

    exponents: NDArray[np.int8]
    offset: NDArray[np.float32] | None


def has_offset(config: ModelConfig) -> bool:
    """Whether keys have a part in common: a bias that no norm comes behind."""
    return config.attention.qkv_bias and config.attention.qk_norm == "none"


def is_head_norm(name: str) -> bool:
    """Whether a tensor is a weight of a norm of Q or K, by its name within a layer or its whole
    one."""
    return name.rpartition(".")[2] in _HEAD_NORMS


def shapes(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each array that a bundle of this config has."""
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
    """Map the basis that the manifest of the bundle at `root` has under `keys`."""
    parts = {name: array for name, array in arrays.items() if not is_head_norm(name)}
    values = map_arrays(root, parts)
    return KeyBasis(values[EXPONENTS], values.get(OFFSET))


def open_head_norms(
    root: Path, arrays: Mapping[str, StoredArray]
) -> dict[str, NDArray[np.float32]]:
    """Map the weights of norms of Q and K there, in the basis, by their canonical names."""
    return map_arrays(root, {n: array for n, array in arrays.items() if is_head_norm(n)})


def fingerprint(manifest: Manifest) -> str:
    """Changes when keys of the same weights are stored otherwise."""
    return "".join(
        manifest.files[name].sha256 for name in sorted({a.file for a in manifest.keys.values()})
    )
