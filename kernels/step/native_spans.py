"""Spans of a step as C++ has them, after checks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import block_ids, check_reads, sealed_ids
from edgellm.kernels.head_blocks import check_heads
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks, SealedBlocks
from edgellm.kernels.native import HeadPlaces, StateTarget, address
from edgellm.kernels.state_blocks import StateBlocks, StateView
from edgellm.kernels.step.checks import Pool
from edgellm.kernels.step.span import StepSpan, check_shares, check_shortlists, check_states


class NativeSpan(ctypes.Structure):
    """Span of a step; the fields are those of call.h, in their order."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("tables", "adapter", "states", "heads", "shares", "shortlists")
        ),
        *((name, ctypes.c_int32) for name in ("rows", "start", "logit_rows")),
        *((name, ctypes.c_int32) for name in ("adapter_start", "kv_read")),
        ("mass", ctypes.c_float),
        ("share_blocks", ctypes.c_int32),
        ("listed", ctypes.c_int32),
    ]


class _StateSpan(ctypes.Structure):
    """States of a span in a pool; the fields are those of call.h, in their order."""

    _fields_ = [("source", ctypes.c_void_p), ("targets", ctypes.POINTER(StateTarget))]

    @classmethod
    def of(cls, view: StateView | None) -> _StateSpan:
        if view is None:
            return cls()
        states = view.blocks.states
        first, size = address(states) or 0, states.strides[0]
        targets = [StateTarget(first + block * size, rows) for rows, block in view.targets]
        source = None if view.source is None else first + view.source * size
        return cls(source, (StateTarget * len(targets))(*targets))


@dataclass(frozen=True)
class SpanParts:
    """Arrays that a span's structure points at, and that must outlive it."""

    tables: list[NDArray[np.int64]]
    table_pointers: NDArray[np.uint64]
    states: ctypes.Array[_StateSpan] | None
    heads: ctypes.Array[HeadPlaces] | None
    shares: NDArray[np.uint64] | None
    shortlists: NDArray[np.uint64] | None

    def span(self, span: StepSpan, adapter: int | None) -> NativeSpan:
        """Make the structure of the span whose parts they are.

        Args:
            adapter: address of the span's adapter.
        """
        lengths = [each.shape[2] for each in span.shares if each is not None]
        return NativeSpan(
            address(self.table_pointers),
            adapter,
            None if self.states is None else ctypes.addressof(self.states),
            None if self.heads is None else ctypes.addressof(self.heads),
            address(self.shares),
            address(self.shortlists),
            len(span.tokens),
            span.start,
            span.logit_rows,
            span.adapter_start,
            span.kv_read or 0,
            span.prefill_mass or 0.0,
            lengths[0] // BLOCK if lengths else 0,
            max((each.shape[3] - 1 for each in span.shortlists if each is not None), default=0),
        )


def span_parts(
    span: StepSpan, pools: Sequence[Pool], *, layers: int, positions: int, most_heads: int
) -> SpanParts:
    """Return what a span points at, after checks.

    Args:
        layers: number of layers of the model.
        positions: number of positions of the RoPE table.
        most_heads: largest number of query heads of a layer.

    Raises:
        ValueError: a block or position does not exist, or what is to be read is refused.
    """
    count = len(span.tokens)
    if span.start + count > positions:
        raise ValueError(
            f"position {span.start + count} is beyond the {positions} of the RoPE table"
        )
    seals = any(isinstance(pool, SealedBlocks) for pool in pools)
    tables = []
    for table, pool in zip(span.tables, pools, strict=True):
        if isinstance(pool, KVBlocks):
            chosen = span.kv_read if pool.sealed is not None or not seals else None
            check_reads(pool, most_heads, chosen, span.prefill_mass)
            tables.append(block_ids(table, pool.count, start=span.start, tokens=count))
        elif isinstance(pool, SealedBlocks):
            tables.append(sealed_ids(table, pool, tokens=span.start + count))
        else:
            tables.append(np.empty(0, np.int64))
    states = heads = shares = shortlists = None
    if any(isinstance(pool, StateBlocks) for pool in pools):
        check_states(span, pools)
        states = (_StateSpan * len(span.states))(*map(_StateSpan.of, span.states))
    if any(span.heads):
        if span.prefill_mass is not None:
            raise ValueError(
                "a share of the attention on a condensed context; needed is a whole one"
            )
        for each, pool in zip(span.heads, pools, strict=True):
            if each is not None and isinstance(pool, KVBlocks):
                check_heads(each, pool, start=span.start)
        heads = (HeadPlaces * len(pools))(*map(HeadPlaces.of, span.heads))
    if any(each is not None for each in span.shares):
        check_shares(span, pools)
        shares = np.array([address(each) or 0 for each in span.shares], np.uint64)
    if any(each is not None for each in span.shortlists):
        check_shortlists(span, pools, layers=layers)
        shortlists = np.array([address(each) or 0 for each in span.shortlists], np.uint64)
    pointers = np.array([address(table) for table in tables], np.uint64)
    return SpanParts(tables, pointers, states, heads, shares, shortlists)
