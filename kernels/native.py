"""The compiled C++ kernels, if they were built: one shared library, called through ctypes."""

from __future__ import annotations

import ctypes
import os
import sysconfig
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import OptionError
from edgellm.kernels.head_blocks import HeadBlocks
from edgellm.kernels.kv_blocks import KV_FORMATS, KVBlocks
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.state_blocks import StateRows

ISAS = ("amx", "avx512", "avxvnni", "avx2", "neon", "scalar")
MAX_HEAD_DIM = 512
_NAME = "edgellm_cpu"
_KV_POINTERS = ("k", "v", "k_scale", "v_scale", "key_offset", "table")
_SEALED_POINTERS = ("k", "v", "k_scale", "v_scale", "table")


@cache
def library() -> ctypes.CDLL | None:
    """Load the compiled kernels; None where the package was installed without a compiler.

    Raises:
        OptionError: EDGELLM_CPU_ISA names an instruction set that is unknown, or that the processor
            lacks.
    """
    name = f"{_NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    path = Path(str(files("edgellm.kernels").joinpath(name)))
    warn_in_source_tree(path)
    if not path.exists():
        return None
    loaded = ctypes.CDLL(str(path))
    loaded.edgellm_isa.restype = ctypes.c_char_p
    loaded.edgellm_set_isa.argtypes = [ctypes.c_char_p]
    # keeps the interpreter's lock: a reader that gets it before the step keeps it for 50 µs
    workspace = ctypes.PyDLL(str(path)).edgellm_step_workspace
    loaded.edgellm_step_workspace = workspace  # type: ignore[attr-defined]
    loaded.edgellm_step_workspace.restype = ctypes.c_size_t
    loaded.edgellm_experts_workspace.restype = ctypes.c_size_t
    loaded.edgellm_bare_products.restype = ctypes.c_double
    loaded.edgellm_log_sum_exp.restype = ctypes.c_double
    loaded.edgellm_log_sum_exp.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    loaded.edgellm_top_k.restype = ctypes.c_int64
    loaded.edgellm_top_k.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    wanted = os.environ.get("EDGELLM_CPU_ISA")
    if wanted and not loaded.edgellm_set_isa(wanted.encode()):
        raise OptionError(
            f"EDGELLM_CPU_ISA is {wanted!r}; known are {', '.join(ISAS)}, and the processor must "
            "have it"
        )
    return loaded


def warn_in_source_tree(path: Path) -> None:
    """Warn if a clone's kernels are not compiled, or are older than their sources.

    Args:
        path: file of the compiled kernels.
    """
    kernels = path.parent.resolve()
    if not (kernels.parent / "pyproject.toml").exists():
        return
    if not path.exists():
        problem = (
            "not compiled; numpy and ONNX Runtime take their place and are several times slower"
        )
    elif path.stat().st_mtime < max(
        file.stat().st_mtime for pattern in ("*.cpp", "*.h") for file in kernels.rglob(pattern)
    ):
        problem = "older than their sources, and may not fit them"
    else:
        return
    warnings.warn(
        f"edgellm is imported from its sources in {kernels.parent}, where its kernels are "
        f"{problem}. `pip install .` in that folder compiles them, with a C++ compiler",
        RuntimeWarning,
        stacklevel=2,
    )


def isa() -> str | None:
    """Return the instruction set in use; None without compiled kernels."""
    loaded = library()
    return None if loaded is None else str(loaded.edgellm_isa().decode())


def library_for(blocks: KVBlocks) -> ctypes.CDLL | None:
    """Return the compiled kernels, if they are built and take heads as wide as the pool's."""
    return library() if blocks.head_dim <= MAX_HEAD_DIM else None


class Sealed(ctypes.Structure):
    """Sealed blocks of a sequence; the fields are those of cpu/kv_blocks.h, in their order."""

    _fields_ = [(name, ctypes.c_void_p) for name in _SEALED_POINTERS]


class HeadPlaces(ctypes.Structure):
    """`HeadBlocks` of a sequence; the fields are those of cpu/kv_blocks.h, in their order."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("starts", "places")),
        *((name, ctypes.c_int32) for name in ("first", "most")),
    ]

    @classmethod
    def of(cls, heads: HeadBlocks | None) -> HeadPlaces:
        """Point at the arrays, which must outlive the structure; None: the context is whole."""
        if heads is None:
            return cls()
        return cls(address(heads.starts), address(heads.places), heads.first, heads.most)


class KV(ctypes.Structure):
    """Blocks of a sequence in a pool; the fields are those of cpu/kv_blocks.h, in their order."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _KV_POINTERS),
        ("sealed", Sealed),
        *((name, ctypes.c_int32) for name in ("layers", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("latent", "format", "sealed_pool", "recent")),
        ("heads", HeadPlaces),
    ]

    @classmethod
    def of(
        cls,
        blocks: KVBlocks,
        table: NDArray[np.int64],
        sealed: NDArray[np.int64] | None = None,
        *,
        sealed_pool: int = 0,
        heads: HeadBlocks | None = None,
    ) -> KV:
        """Point at the arrays of pools and at tables, which must outlive the structure.

        Args:
            sealed: table of the sealed blocks.
            sealed_pool: number of their pool, in a step.
            heads: blocks of a condensed context.
        """
        arrays = () if blocks.sealed is None else blocks.sealed.arrays
        return cls(
            address(blocks.k),
            address(blocks.v),
            address(blocks.k_scale),
            address(blocks.v_scale),
            address(blocks.key_offset),
            address(table),
            Sealed(*map(address, arrays), address(sealed)) if arrays else Sealed(),
            blocks.layers,
            blocks.kv_heads,
            blocks.head_dim,
            blocks.latent,
            KV_FORMATS.index(blocks.format),
            sealed_pool,
            blocks.recent,
            HeadPlaces.of(heads),
        )

    @classmethod
    def of_pools(cls, pools: Sequence[object]) -> ctypes.Array[KV]:
        """Point at the arrays of a step's pools, without tables; empty ones of other kinds."""
        none = np.empty(0, np.int64)
        numbers = {id(pool): number for number, pool in enumerate(pools)}
        return (cls * len(pools))(
            *(
                cls.of(pool, none, none, sealed_pool=numbers.get(id(pool.sealed), 0))
                if isinstance(pool, KVBlocks)
                else cls()
                for pool in pools
            )
        )


class Rope(ctypes.Structure):
    """RoPE table; the fields are those of cpu/kv_blocks.h, in their order."""

    _fields_ = [("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("half", ctypes.c_int64)]

    @classmethod
    def of(cls, table: RopeTable) -> Rope:
        """Point at the table's arrays, which must outlive the structure."""
        return cls(address(table.cos), address(table.sin), table.cos.shape[1])


class StateTarget(ctypes.Structure):
    """Place of the state after some rows; the fields are those of cpu/state_rows.h, in order."""

    _fields_ = [("block", ctypes.c_void_p), ("rows", ctypes.c_int32)]


class StatePointers(ctypes.Structure):
    """Rows and their states; the fields are those of cpu/state_rows.h, in their order."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("targets", ctypes.POINTER(StateTarget)),
        ("rows", ctypes.c_int32),
    ]

    @classmethod
    def of(cls, spans: Sequence[StateRows], *, size: int) -> ctypes.Array[StatePointers]:
        """Point at the states of some spans, which must outlive the structures.

        Args:
            size: numbers of a state.

        Raises:
            ValueError: a state or its place does not fit.
        """
        for span in spans:
            span.check(size)
        return (cls * len(spans))(
            *(
                cls(
                    address(span.source),
                    (StateTarget * len(span.targets))(
                        *(StateTarget(address(state), rows) for rows, state in span.targets)
                    ),
                    span.rows,
                )
                for span in spans
            )
        )


def address(array: NDArray[Any] | None) -> int | None:
    """Return the address of an array's data; None is a null pointer."""
    if array is None:
        return None
    try:
        return ctypes.addressof(
            ctypes.c_char.from_buffer(array.data)
        )  # 1 us less than `array.ctypes`
    except (TypeError, ValueError):  # the array is read-only, has gaps, or is empty
        return int(array.ctypes.data)
