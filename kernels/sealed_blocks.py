"""Storage of sealed KV blocks: full blocks of 128 tokens, packed to fewer bits.

    k        [blocks, layers, kv_heads, BLOCK/16, head_dim * key_bits / 32, 16, 4]  uint8
    v        [blocks, layers, kv_heads, BLOCK/4, head_dim * value_bits / 8, 4]      uint8
    k_scale  [blocks, layers, kv_heads, BLOCK], or [.., 2, head_dim] for channels   f16
    v_scale  [blocks, layers, kv_heads, value_scales, BLOCK]                        f16

with the bits, channels and scales of the format's `Sealing` (`kv_blocks.py`). A byte of two codes
has number `i` of a row in its low half and number `i + head_dim / 2` in its high half; one of four
codes has numbers `i`, `i + head_dim / 4` and so on, from its low bits up.

A row in block `m` of a sequence reads blocks 0, `m - 1` and `m` as int8 rows after the Hadamard
transform, K and V both, and the blocks between as sealed ones, however a prompt is cut. So its bits
depend on its position alone. `kv_seal/` makes a sealed block of int8 rows:

    k8    the keys' codes as they are, with their scales
    k4    a key is not transformed: number c of it is (2 code - 15) half_c + mid_c, with `half` and
          `mid` of each channel of the block one behind the other in `k_scale`
    v4    a value is (2 code - 15) * scale, after the Hadamard transform
    v2    a value is (2 code - 3) * scale, after it, with a scale for each half of a row

Keys differ from channel to channel far more than from row to row, so a scale for each channel takes
4 bits where a scale for each row takes 8.

Where keys have scales for channels, a row can read the best blocks alone, at most `kv_read` tokens
with those that are not sealed: for each KV head those where one of its queries likely has the
largest score, as told by `half`, `mid` and the codes of a quarter of the channels
(`attention/best_blocks.h`). Rows of an answer at 16 positions from a multiple of 16 on choose among
the blocks on the shortlist of the first of them that is computed (`step/`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.kv_blocks import BLOCK, PANEL, QUAD, SEALINGS, KVFormat, SealedBlocks

# Of an answer in each pool, None in one without; see `allocate_shortlists`.
Shortlists = Sequence[NDArray[np.int32] | None]
# The formats whose sealed blocks can be chosen by their keys.
CHOSEN_FORMATS = tuple(name for name, sealing in SEALINGS.items() if sealing.channels)
# Blocks on a shortlist at least: all sealed ones up to position 8,575.
SHORTLIST = 64
# Shortlists of a head; the same number as in step/call.h.
SHORTLISTS = 64
# Blocks that are not sealed.
HOT = 3
# The fewest tokens to read: the first block, the last two, and a sealed one.
LEAST_READ, MOST_READ = (HOT + 1) * BLOCK, 2**31 - 1


def first_choosing(kv_read: int) -> int:
    """Return the first position whose row reads a part of what it sees."""
    return kv_read // BLOCK * BLOCK


def allocate_shortlists(
    layers: int, kv_heads: int, kv_read: int, *, least: int = SHORTLIST
) -> NDArray[np.int32]:
    """Allocate shortlists of an answer, before there are any.

    Args:
        layers: number of layers of the model, some of which may read K and V of another.
        least: number of blocks on each, unless rows read more than half as many sealed ones.

    Returns:
        `[layers, Hkv, SHORTLISTS, 1 + blocks]`: the position of the row whose best blocks they are,
        plus 1, or 0, and the blocks. Position p has list p // 16 % SHORTLISTS.
    """
    blocks = max(least, 2 * (kv_read // BLOCK - HOT))
    return np.zeros((layers, kv_heads, SHORTLISTS, 1 + blocks), np.int32)


def sealed_end(tokens: int) -> int:
    """Return the number behind the last sealed block of `tokens` tokens; the first one is 1."""
    return max(1, (tokens - 1) // BLOCK - 1)


def allocate_sealed(
    *, format: KVFormat, blocks: int, layers: int, kv_heads: int, head_dim: int
) -> SealedBlocks:
    """Allocate a pool of sealed blocks; pages are not touched, so memory grows as they are written.

    Args:
        head_dim: multiple of 8.

    Raises:
        ValueError: the format seals no blocks.
    """
    if format not in SEALINGS:
        raise ValueError(f"{format} seals no blocks; needed is one of {', '.join(SEALINGS)}")
    sealing = SEALINGS[format]
    head = blocks, layers, kv_heads
    key_row, value_row = (head_dim * bits // 8 for bits in (sealing.key_bits, sealing.value_bits))
    return SealedBlocks(
        np.empty((*head, BLOCK // PANEL, key_row // QUAD, PANEL, QUAD), np.uint8),
        np.empty((*head, BLOCK // QUAD, value_row, QUAD), np.uint8),
        np.empty((*head, *((2, head_dim) if sealing.channels else (BLOCK,))), np.float16),
        np.empty((*head, sealing.value_scales, BLOCK), np.float16),
    )


def sealed_bytes(*, format: KVFormat, layers: int, kv_heads: int, head_dim: int) -> int:
    """Return the size of one sealed block in bytes: BLOCK tokens, K and V, all layers."""
    sizes = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
    return allocate_sealed(format=format, blocks=1, **sizes).nbytes
