"""Checks of the arguments of compiled kernels: ids, positions, dtypes and shapes.

The kernels themselves check nothing. A number out of range would read or write foreign memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.kv_blocks import (
    BLOCK,
    LEAST_MASS,
    MASS_FORMAT,
    BlockTable,
    KVBlocks,
    SealedBlocks,
)
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.sealed_blocks import CHOSEN_FORMATS, LEAST_READ, MOST_READ, sealed_end

# Query heads of a KV head that choose together: the rows of a task of attention.
MOST_CHOOSING = 96


def indices(values: Sequence[int] | NDArray[np.int64], count: int, what: str) -> NDArray[np.int64]:
    """Return `values` as an int64 array, after a check that each is from 0 to `count - 1`.

    Args:
        what: name of a value in errors.

    Raises:
        ValueError: a value is out of range, or no integer.
    """
    numbers = np.asarray(values)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise ValueError(f"a {what} is a whole number below {count}, not {numbers.dtype}")
    ids: NDArray[np.int64] = np.ascontiguousarray(numbers, np.int64)
    # one pass for both ends: a negative number is a huge one without its sign
    if ids.ndim != 1 or (ids.size and ids.view(np.uint64).max() >= count):
        raise ValueError(f"a {what} is from 0 to {count - 1}; here are {_extremes(ids)}")
    return ids


def block_ids(table: BlockTable, blocks: int, *, start: int, tokens: int) -> NDArray[np.int64]:
    """Return a block table as an array, after a check that it covers `tokens` from `start` on.

    Args:
        blocks: number of blocks in the pool.

    Raises:
        ValueError: the pool has no such block, or the table is too short.
    """
    ids = indices(table, blocks, "block id")
    if start < 0 or start + tokens > len(ids) * BLOCK:
        raise ValueError(
            f"positions {start} to {start + tokens} do not lie in a table of {len(ids)} blocks"
        )
    return ids


def sealed_ids(table: BlockTable, blocks: SealedBlocks, *, tokens: int) -> NDArray[np.int64]:
    """Return a table of sealed blocks as an array, after a check that it covers those of `tokens`
    tokens.

    Raises:
        ValueError: the pool has no such block, or the table is too short.
    """
    ids = indices(table, blocks.count, "sealed block id")
    needed = sealed_end(tokens)
    if needed > max(1, len(ids)):
        raise ValueError(f"a table of {len(ids)} sealed blocks; needed are those before {needed}")
    return ids


def check_reads(
    blocks: KVBlocks, heads: int, kv_read: int | None, prefill_mass: float | None
) -> None:
    """Refuse to read a part of a cache whose blocks do not tell which, or too small a part.

    Args:
        heads: number of query heads.
        kv_read, prefill_mass: number of tokens, or share of the attention; None: all.

    Raises:
        ValueError: it is refused.
    """
    group, format = heads // blocks.kv_heads, blocks.format
    right = format in CHOSEN_FORMATS and group <= MOST_CHOOSING
    if kv_read is not None and not (right and LEAST_READ <= kv_read <= MOST_READ):
        raise ValueError(
            f"{kv_read} tokens to read of {format} for {group} heads of each KV head; needed are "
            f"{LEAST_READ} to {MOST_READ} of {' or '.join(CHOSEN_FORMATS)} for {MOST_CHOOSING} at "
            "most"
        )
    right = format == MASS_FORMAT and not blocks.latent and not blocks.recent
    if prefill_mass is not None and not (right and LEAST_MASS <= prefill_mass <= 1):
        raise ValueError(
            f"{prefill_mass} of the attention on {format}; needed is {LEAST_MASS} to 1 "
            f"on {MASS_FORMAT} without latents and without blocks that are left out"
        )


def floats(array: NDArray[Any], shape: tuple[int, ...], what: str) -> NDArray[np.float32]:
    """Return a float32 array without gaps, as the kernels read it.

    Args:
        what: name of the array in errors.

    Raises:
        ValueError: the array has another dtype or shape.
    """
    if array.dtype != np.float32 or array.shape != shape:
        raise ValueError(f"{what} is float32 {shape}, not {array.dtype} {array.shape}")
    return np.ascontiguousarray(array)


def check_rope(table: RopeTable, head_dim: int, end: int) -> None:
    """Refuse a RoPE table that is wider than a head or does not reach to position `end`.

    Raises:
        ValueError: the table does not fit, or is not float32 without gaps.
    """
    cos, sin = table
    positions, half = cos.shape
    if cos.dtype != np.float32 or sin.dtype != np.float32 or sin.shape != cos.shape:
        raise ValueError("cosines and sines are float32 and of one shape")
    if not (cos.flags.c_contiguous and sin.flags.c_contiguous):
        raise ValueError("cosines and sines have no gaps")
    if 2 * half > head_dim or end > positions:
        raise ValueError(
            f"the RoPE table has {positions} positions of {2 * half} dimensions; needed are {end}, "
            f"and a head has {head_dim}"
        )


def _extremes(ids: NDArray[np.int64]) -> str:
    return f"{ids.min()} to {ids.max()}" if ids.ndim == 1 else f"an array of {ids.ndim} dimensions"
