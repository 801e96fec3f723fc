"""Condensed contexts: the rows of K and V that a context needs to be told again, and no others.

The model is asked to repeat the context, and a row that no query of the repetition attends to is
dropped, from each KV head as many as its attention allows (KVzip, Kim et al., arXiv:2505.23416). So
what is kept does not hang on the question that comes later.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Span
from edgellm.backends.registry import NATIVE
from edgellm.cache.groups import CacheGroup
from edgellm.cache.sequence import Sequence
from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.loop import WORKING, Wait
from edgellm.engine.turned import awake, compute
from edgellm.errors import (
    CacheFullError,
    ContextOverflowError,
    OptionError,
    UnsupportedModelError,
)
from edgellm.kernels.head_blocks import choose_rows
from edgellm.kernels.kv_blocks import BLOCK

Shares = NDArray[np.float32]

# Tokens that the model is shown again at a time, behind the whole context; fewer where the context
# is nearly full, and never fewer than a block.
REPEATED = 1024
_ASKED = "\n\nRepeat the previous context:\n\n"
_ASKED_ON = "\n\nRepeat the part of the previous context that begins with: "
# Rows at both ends that every head keeps.
_FIRST, _LAST = 4, 32
# Tokens that tell where a part begins.
_BEGINNING = 8


@dataclass(frozen=True)
class Condensed:
    """Outcome of condensing a context.

    Attributes:
        rows: number of leading tokens of which rows were dropped.
        keep: share of their rows that is left.
    """

    rows: int
    keep: float


def check_condensable(engine: Engine, context: Context) -> None:
    """Refuse a model or options whose context cannot be condensed.

    Raises:
        UnsupportedModelError, OptionError: it is refused.
    """
    options, selection = engine.options, engine.selection
    if (selection.prefill, selection.decode) != (NATIVE, NATIVE):
        raise OptionError(
            f"`prefill` is {selection.prefill} and `decode` {selection.decode}: the C++ kernels "
            f"alone read a condensed context; take {NATIVE} for both"
        )
    if options.kv_budget is not None or options.prefill_mass is not None:
        raise OptionError(
            "a context is condensed as a whole, and with `kv_budget` or `prefill_mass` parts of "
            "it are not read; leave them out"
        )
    if not any(_condensable(engine)):
        raise UnsupportedModelError(
            f"{engine.bundle.manifest.name} with KV cache {options.kv_format}: a context is "
            "condensed in layers that attend to all positions, without latents, and in a format "
            "that packs no blocks, such as int8"
        )
    if any(context.sequence.heads):
        raise OptionError("the session is condensed already; condense a new one, with less to keep")


def _condensable(engine: Engine) -> list[bool]:
    """Return, for each cache group, whether its rows can be dropped head by head."""
    groups = [group.group for group in engine.cache.groups]
    return [isinstance(g, CacheGroup) and g.keeps_all and not g.latent for g in groups]


def condense(
    engine: Engine, context: Context, *, keep: float, call: Call
) -> Generator[Wait, None, Condensed]:
    """Drop rows of K and V of a context's whole blocks, after computing all of it.

    Args:
        keep: share of the rows that is kept.

    Raises:
        OptionError: the context is shorter than two blocks.
        ContextOverflowError: there is no room behind it to repeat it.
        CacheFullError: no block is free.
    """
    tokens, _ = context.read()
    context.set(tokens)
    rows = len(tokens) // BLOCK * BLOCK
    if rows < 2 * BLOCK:
        raise OptionError(
            f"the session has {len(tokens)} tokens; {2 * BLOCK} are the fewest to condense"
        )
    parts = _repetitions(engine, tokens, rows)
    yield from compute(engine, context, call)
    shares = [
        np.zeros((group.kv.layers, group.kv.kv_heads, rows), np.float32) if here else None
        for group, here in zip(engine.cache.groups, _condensable(engine), strict=True)
    ]
    sequence = engine.thread.call(partial(_forked, context))
    try:
        for part in parts:
            for i in range(0, len(part), sequence.rows_at_once):
                yield WORKING
                span = Span(
                    sequence,
                    part[i : i + sequence.rows_at_once],
                    adapter=None if context.adapter is None else context.adapter.weights,
                    all_states=False,
                    shares=shares,
                )
                engine.thread.call(partial(engine.prefill.run, [span]))
            engine.thread.call(partial(sequence.truncate, len(tokens)))
        yield WORKING
        kept = [None if of is None else _kept(of, keep) for of in shares]
        return engine.thread.call(partial(_condensed, context, kept, tokens, rows))
    finally:
        engine.thread.call(sequence.close)


def _repetitions(engine: Engine, tokens: list[int], rows: int) -> list[list[int]]:
    """Return what is computed behind the context to see which rows it takes to repeat it.

    Raises:
        ContextOverflowError: there is no room.
    """
    asked, asked_on, behind = (
        engine.tokenizer.encode(text, add_bos=False) for text in (_ASKED, _ASKED_ON, "\n\n")
    )
    before = max(len(asked), len(asked_on) + _BEGINNING + len(behind))
    room = engine.ctx_size - len(tokens) - before
    if room < BLOCK:
        raise ContextOverflowError(
            f"{len(tokens)} tokens leave no room behind them to repeat {BLOCK} in a context of "
            f"{engine.ctx_size}; raise `ctx_size` to {len(tokens) + before + BLOCK} or more"
        )
    size = min(REPEATED, room)
    parts = [tokens[i : min(i + size, rows)] for i in range(0, rows, size)]
    first, *others = parts
    return [[*asked, *first], *([*asked_on, *of[:_BEGINNING], *behind, *of] for of in others)]


def _forked(context: Context) -> Sequence:
    """Fork a context's sequence, whose tokens no other one is to find behind it."""
    with awake(context):
        sequence = context.sequence.fork()
    if sequence.shareable is None:
        sequence.shareable = len(sequence)
    return sequence


def _kept(shares: Shares, keep: float) -> list[NDArray[np.int64]]:
    """Return the rows that each KV head of a group keeps, by `shares` `[layers, Hkv, T]`."""
    of_heads = shares.reshape(-1, shares.shape[2])
    of_heads[:, :_FIRST] = of_heads[:, -_LAST:] = np.inf
    return choose_rows(of_heads, keep)


def _condensed(
    context: Context,
    kept: list[list[NDArray[np.int64]] | None],
    tokens: list[int],
    rows: int,
) -> Condensed:
    """Drop the other rows.

    Raises:
        CacheFullError: no block is free, or the context left the cache meanwhile.
    """
    with awake(context):
        if context.sequence.tokens[:rows] != tokens[:rows]:
            raise CacheFullError("other answers have taken the session's place in the KV cache")
        context.sequence.condense(kept, rows // BLOCK)
    counts = [len(of) for group in kept if group is not None for of in group]
    return Condensed(rows, sum(counts) / (len(counts) * rows))
