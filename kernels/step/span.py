"""What a step computes: rows of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.kv_blocks import BlockTable

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class StepSpan:
    """Consecutive tokens of one sequence.

    Attributes:
        tables: the sequence's block ids in each pool, those of the new positions among them.
        start: the position of the first token.
        logit_rows: the last so many tokens go through the LM head.
    """

    tables: Sequence[BlockTable]
    tokens: Sequence[int]
    start: int
    logit_rows: int


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that rows go through in one call, where others come before or after.

    Attributes:
        layers: their indices, one after the other.
        entering: the residual of each row before the first of them `[tokens, E]`, in segments with
            Q, K and V beside it; None before layer 0, which begins with the embedding.
    """

    layers: range
    entering: Floats | None = None


def check_group(group: LayerGroup, *, layers: int, rows: int, hidden: int, logit_rows: int) -> None:
    """Refuse layers that are not there, or that do not begin with what they are given.

    Raises:
        ValueError: it is so, or logits are wanted before the last layer.
    """
    start, stop = group.layers.start, group.layers.stop
    if group.layers.step != 1 or not 0 <= start < stop <= layers:
        raise ValueError(f"layers {group.layers}; needed are some of range({layers})")
    if logit_rows and stop < layers:
        raise ValueError(f"{logit_rows} rows of logits before the last layer")
    x = group.entering
    if x is None and start > 0:
        raise ValueError(f"nothing enters layer {start}; needed is float32 ({rows}, {hidden})")
    if x is None:
        return
    if start == 0:
        raise ValueError("a residual that enters layer 0; needed is none")
    if x.dtype != np.float32 or x.shape != (rows, hidden) or not x.flags.c_contiguous:
        raise ValueError(f"entering is {x.dtype} {x.shape}; needed is float32 ({rows}, {hidden})")


def check_spans(spans: Sequence[StepSpan], *, pools: int) -> None:
    """Refuse a call without tokens, or for logits of more than there are.

    Raises:
        ValueError: it is one, or a span has tables in more or fewer pools.
    """
    if not spans:
        raise ValueError("0 spans; needed are 1 or more")
    for span in spans:
        count = len(span.tokens)
        if count < 1 or not 0 <= span.logit_rows <= count:
            raise ValueError(f"{count} tokens and {span.logit_rows} rows of logits")
        if len(span.tables) != pools:
            raise ValueError(f"{len(span.tables)} tables; needed is one in each of {pools} pools")
