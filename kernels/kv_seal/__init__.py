"""Sealing: full KV blocks of int8 rows become blocks of fewer bits (`sealed_blocks.py`), in C++.

`gpu.py` has it in Triton.
"""

from __future__ import annotations

from edgellm.kernels.kv_blocks import BlockTable, KVBlocks
from edgellm.kernels.kv_seal import native
from edgellm.kernels.native import library_for

__all__ = ["seal"]


def seal(
    blocks: KVBlocks,
    table: BlockTable,
    sealed: BlockTable,
    layer: int,
    numbers: range,
    *,
    threads: int = 1,
) -> None:
    """Seal blocks of a sequence in one layer.

    Args:
        blocks, table: pool of int8 rows, and block ids of the sequence.
        sealed: ids of its sealed blocks.
        numbers: numbers of the blocks.

    Raises:
        ValueError: a block or layer does not exist, or C++ was not built.
    """
    compiled = library_for(blocks)
    if compiled is None:
        raise ValueError(f"{blocks.format} without C++ kernels; needed is another format")
    native.seal(compiled, blocks, table, sealed, layer, numbers, threads=threads)
