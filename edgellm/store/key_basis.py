"""What an export did to a model's keys, so that rounding them in the KV cache costs less.

Exported K is divided by powers of two, one for each RoPE pair of a KV head, and Q is multiplied by
them; and a vector that all keys have in common is for the cache to leave out. Neither changes what
attention computes (see `quantize/keys.py`). It is the same for all flavours of a bundle: they write
to one cache. With K biases, as in Qwen2, it is what 8 bits are enough for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import StoredArray
from edgellm.store.bundle import Manifest, map_arrays

FOLDER = "keys"
EXPONENTS = "exponents"
OFFSET = "offset"


@dataclass(frozen=True)
class KeyBasis:
    """How the keys of a bundle are to be read.

    Attributes:
        exponents: `[layers, Hkv, P]` int8: K has been divided by 2^e and Q multiplied by it, in
            both channels of a pair.
        offset: `[layers, Hkv, D]` float32, of keys after RoPE and after that; None without biases.
    """

    exponents: NDArray[np.int8]
    offset: NDArray[np.float32] | None


def shapes(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each array that a bundle of this config has."""
    heads = (config.layers, config.kv_heads)
    needed: dict[str, tuple[str, tuple[int, ...]]] = {
        EXPONENTS: ("int8", (*heads, len(config.inv_freq)))
    }
    if config.qkv_bias:
        needed[OFFSET] = "float32", (*heads, config.head_dim)
    return needed


def open_key_basis(root: Path, arrays: Mapping[str, StoredArray]) -> KeyBasis:
    """Map the arrays that the manifest of the bundle at `root` has under `keys`."""
    values = map_arrays(root, arrays)
    return KeyBasis(values[EXPONENTS], values.get(OFFSET))


def fingerprint(manifest: Manifest) -> str:
    """Changes when keys of the same weights are stored otherwise."""
    return "".join(
        manifest.files[name].sha256 for name in sorted({a.file for a in manifest.keys.values()})
    )
