"""Spans and groups of layers that a step computes: rows of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.head_blocks import HeadBlocks
from edgellm.kernels.kv_blocks import BLOCK, BlockTable, KVBlocks
from edgellm.kernels.lora import AdapterWeights
from edgellm.kernels.sealed_blocks import HOT, SHORTLISTS, Shortlists
from edgellm.kernels.state_blocks import StateBlocks, StateView

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class StepSpan:
    """Span of a step: consecutive tokens of one sequence.

    Attributes:
        tables: block ids of the sequence in each pool, including blocks of the new positions; not
            read of pools of states.
        states: blocks that the states are read from and written to in each pool, None in one of K
            and V; may be left out where no layer has a state.
        tokens: token ids.
        start: position of the first token.
        logit_rows: number of last tokens that go through the LM head.
        adapter: adapter of the tokens; None: the model as it is.
        adapter_start: number of first tokens that go without it.
        kv_read: tokens that each row reads at most, in C++ alone, see `sealed_blocks.py`; the first
            two layers read all. None: all layers do.
        shortlists: in each pool that seals blocks, in C++ alone, see `allocate_shortlists`; the
            same from span to span of an answer. Left out: each row looks at all sealed blocks.
        prefill_mass: share of the attention, about, that whole blocks of rows from position 4,096
            on read, in C++ alone, in layers with K and V of their own that see all positions. None:
            all layers read all.
        heads: blocks of a condensed context in each pool, in C++ alone, None where it is whole; may
            be left out where it is whole in all. Tables have other blocks behind them.
        shares: in each pool whose keys they are asked for, in C++ alone, the largest share of the
            attention of a query of the span that each of the first keys has that it reads,
            `[layers, Hkv, T]`, with T a multiple of BLOCK: a larger one takes a number's place.
    """

    tables: Sequence[BlockTable]
    tokens: Sequence[int]
    start: int
    logit_rows: int
    adapter: AdapterWeights | None = None
    adapter_start: int = 0
    states: Sequence[StateView | None] = ()
    kv_read: int | None = None
    prefill_mass: float | None = None
    heads: Sequence[HeadBlocks | None] = ()
    shares: Sequence[Floats | None] = ()
    shortlists: Shortlists = ()

    def last_rows(self, count: int) -> StepSpan:
        """Return the span of the last `count` rows, where those before need no more layers."""
        before = len(self.tokens) - count
        return replace(
            self,
            tokens=self.tokens[before:],
            start=self.start + before,
            adapter_start=max(self.adapter_start - before, 0),
        )


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Group of layers that rows go through in one call; other calls run the layers around it.

    Attributes:
        layers: consecutive indices of the layers.
        entering: residual of each row before the first layer `[tokens, E]`, of several streams side
            by side, in graphs of segments with Q, K and V beside it; None: layer 0 begins with the
            embedding.
    """

    layers: range
    entering: Floats | None = None


def check_group(group: LayerGroup, *, layers: int, rows: int, width: int, logit_rows: int) -> None:
    """Refuse a group of layers that does not exist, or whose entering residual does not fit.

    Args:
        layers: number of layers of the model.
        rows: number of tokens in the call.
        width: numbers of a row of the residual.
        logit_rows: number of tokens that go through the LM head.

    Raises:
        ValueError: the group is refused, or logits are asked for before the last layer.
    """
    start, stop = group.layers.start, group.layers.stop
    if group.layers.step != 1 or not 0 <= start < stop <= layers:
        raise ValueError(f"layers {group.layers}; needed are some of range({layers})")
    if logit_rows and stop < layers:
        raise ValueError(f"{logit_rows} rows of logits before the last layer")
    x = group.entering
    if x is None and start > 0:
        raise ValueError(f"nothing enters layer {start}; needed is float32 ({rows}, {width})")
    if x is None:
        return
    if x.dtype != np.float32 or x.shape != (rows, width) or not x.flags.c_contiguous:
        raise ValueError(f"entering is {x.dtype} {x.shape}; needed is float32 ({rows}, {width})")


def check_spans(spans: Sequence[StepSpan], *, pools: int) -> None:
    """Refuse a call without spans, or a span without tokens or with too many rows of logits.

    Raises:
        ValueError: the call is refused, or a span has not one table in each pool.
    """
    if not spans:
        raise ValueError("0 spans; needed are 1 or more")
    for span in spans:
        count = len(span.tokens)
        if count < 1 or not 0 <= span.logit_rows <= count:
            raise ValueError(f"{count} tokens and {span.logit_rows} rows of logits")
        if not 0 <= span.adapter_start <= count:
            raise ValueError(f"{count} tokens, {span.adapter_start} of them without an adapter")
        if len(span.tables) != pools:
            raise ValueError(f"{len(span.tables)} tables; needed is one in each of {pools} pools")


def check_states(span: StepSpan, pools: Sequence[object]) -> None:
    """Refuse a span whose states do not fit the pools, or its tokens.

    Raises:
        ValueError: a pool of states has no view, a block does not exist, or the targets are not in
            the order of rows that ends behind the last token.
    """
    if len(span.states) != len(pools):
        raise ValueError(
            f"states of {len(span.states)} pools; needed is one in each of {len(pools)}"
        )
    for view, pool in zip(span.states, pools, strict=True):
        if not isinstance(pool, StateBlocks):
            continue
        if view is None or view.blocks is not pool:
            raise ValueError("states of another pool, or none")
        rows, blocks = [0, *(count for count, _ in view.targets)], view.ids
        if rows != sorted(set(rows)) or rows[-1] != len(span.tokens):
            raise ValueError(f"states after {rows[1:]} of {len(span.tokens)} tokens")
        if not all(0 <= block < pool.count for block in blocks):
            raise ValueError(f"state blocks {blocks}; the pool has {pool.count}")


def check_shares(span: StepSpan, pools: Sequence[object]) -> None:
    """Refuse arrays of shares that do not fit the pools and the tokens before the span.

    Raises:
        ValueError: they are refused.
    """
    if len(span.shares) != len(pools):
        raise ValueError(f"shares in {len(span.shares)} pools; needed are those in {len(pools)}")
    lengths = {each.shape[2] for each in span.shares if each is not None}
    heads = span.heads or [None] * len(pools)
    there = [span.start if each is None else BLOCK * each.least for each in heads]
    for shares, pool in zip(span.shares, pools, strict=True):
        if shares is None:
            continue
        if not isinstance(pool, KVBlocks) or pool.sealed or pool.latent or pool.recent:
            raise ValueError("shares in a pool of states, latents or a part of the blocks")
        if shares.shape[:2] != (pool.layers, pool.kv_heads) or shares.dtype != np.float32:
            raise ValueError(
                f"shares are {shares.dtype} {shares.shape}; needed are float32 of {pool.layers} "
                f"layers with {pool.kv_heads} heads"
            )
        if not shares.flags.c_contiguous or not shares.flags.writeable:
            raise ValueError("shares with gaps, or that cannot be written")
    if len(lengths) > 1 or any(n % BLOCK or not 0 < n <= min(there) for n in lengths):
        raise ValueError(f"shares of {sorted(lengths)} keys of the first {min(there)}")


def check_shortlists(span: StepSpan, pools: Sequence[object], *, layers: int) -> None:
    """Refuse shortlists that do not fit the pools and the number of tokens to read.

    Raises:
        ValueError: they are refused.
    """
    if span.kv_read is None or len(span.shortlists) != len(pools):
        raise ValueError(
            f"shortlists in {len(span.shortlists)} of {len(pools)} pools, {span.kv_read} tokens to "
            "read"
        )
    listed = max(each.shape[-1] for each in span.shortlists if each is not None) - 1
    if listed < span.kv_read // BLOCK - HOT:
        raise ValueError(f"shortlists of {listed} blocks, {span.kv_read} tokens to read")
    for lists, pool in zip(span.shortlists, pools, strict=True):
        if not isinstance(pool, KVBlocks) or pool.sealed is None:
            right = lists is None
        else:
            shape = layers, pool.kv_heads, SHORTLISTS, 1 + listed
            right = lists is not None and lists.shape == shape and lists.dtype == np.int32
        if not right:
            raise ValueError(f"shortlists are not int32, or do not fit {layers} layers and a pool")
        if lists is not None and not (lists.flags.c_contiguous and lists.flags.writeable):
            raise ValueError("shortlists with gaps, or that cannot be written")
