"""Sealing in C++ (`cpu.h`)."""

from __future__ import annotations

import ctypes

from edgellm.kernels.checks import block_ids, sealed_ids
from edgellm.kernels.kv_blocks import BLOCK, BlockTable, KVBlocks
from edgellm.kernels.native import KV


class _Call(ctypes.Structure):
    """Arguments of one call of sealing; the fields are those of call.h, in their order."""

    _fields_ = [
        ("kv", KV),
        *((name, ctypes.c_int32) for name in ("layer", "first", "end", "threads")),
    ]


def seal(
    library: ctypes.CDLL,
    blocks: KVBlocks,
    table: BlockTable,
    sealed: BlockTable,
    layer: int,
    numbers: range,
    *,
    threads: int = 1,
) -> None:
    """Seal blocks of a sequence; see `seal` in `__init__.py`.

    Args:
        library: the compiled kernels.

    Raises:
        ValueError: the format seals no blocks, or a layer or block does not exist.
    """
    if not 0 <= layer < blocks.layers or numbers.step != 1 or numbers.start < 0:
        raise ValueError(f"blocks {numbers} of layer {layer}; there are {blocks.layers} layers")
    if blocks.sealed is None:
        raise ValueError(f"{blocks.format} seals no blocks")
    if not numbers:
        return
    ids = block_ids(table, blocks.count, start=numbers.start * BLOCK, tokens=len(numbers) * BLOCK)
    into = sealed_ids(sealed, blocks.sealed, tokens=(numbers.stop + 1) * BLOCK + 1)
    call = _Call(KV.of(blocks, ids, into), layer, numbers.start, numbers.stop, threads)
    library.edgellm_seal(ctypes.byref(call))
