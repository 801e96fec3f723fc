"""Chunk attention in C++ (`cpu.cpp`), on int8 and float32 blocks."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.kv_blocks import BlockTable, KVBlocks


class _Call(ctypes.Structure):
    """Arguments of one call; the same fields, in the same order, as in cpu.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("k", "v", "k_scale", "v_scale", "table", "q", "out")
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                "layers",
                "layer",
                "kv_heads",
                "heads",
                "head_dim",
                "tokens",
                "start",
                "window",
                "threads",
            )
        ),
    )


def takes(blocks: KVBlocks) -> bool:
    """Whether this kernel knows the format."""
    return blocks.format in ("int8", "f32")


def attend(
    library: ctypes.CDLL,
    blocks: KVBlocks,
    table: BlockTable,
    layer: int,
    q: NDArray[np.float32],
    start: int,
    *,
    window: int | None = None,
    threads: int = 1,
) -> NDArray[np.float32]:
    """See `attend` in `__init__.py`; `library` is `kernels.native.library()`."""
    tokens, heads, head_dim = q.shape
    queries = np.ascontiguousarray(q)
    ids = np.asarray(table, np.int64)
    out = np.empty(q.shape, np.float32)
    _, layers, kv_heads, _, _ = blocks.k.shape
    call = _Call(
        _address(blocks.k),
        _address(blocks.v),
        _address(blocks.k_scale),
        _address(blocks.v_scale),
        _address(ids),
        _address(queries),
        _address(out),
        layers,
        layer,
        kv_heads,
        heads,
        head_dim,
        tokens,
        start,
        window or 0,
        threads,
    )
    library.edgellm_attend(ctypes.byref(call))
    return out


def _address(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data
