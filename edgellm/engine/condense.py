"""Condensed contexts: the rows of K and V that a context needs to be told again, and no others.

The model is asked to repeat the context part by part, each with the first block and the part alone
in sight, and the rows are kept that a query of the repetition attends to most, of all KV heads of a
cache group together (KVzip, Kim et al., arXiv:2505.23416). So what is kept does not hang on the
question that comes later. In sight of the whole context, as published, a repetition found no better
rows, and its cost grows with the square of the length. Layers that read K and V of another layer
have no say in what that one keeps.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Span
from edgellm.backends.registry import NATIVE
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
from edgellm.kernels.head_blocks import choose_rows, whole_blocks
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.results import Condensed

Shares = NDArray[np.float32]

# Blocks that the model repeats at a time, fewer where the context is nearly full.
REPEATED = 4
_ASKED = "\n\nRepeat the previous context:\n\n"
# Rows at both ends that every head keeps.
_FIRST, _LAST = 4, 32


def check_condensable(engine: Engine, tokens: list[int]) -> None:
    """Refuse a model, options or tokens that cannot be condensed.

    Raises:
        UnsupportedModelError, OptionError, ContextOverflowError: it is refused, see
            `Session.condense`.
    """
    options, selection = engine.options, engine.selection
    if not selection.native:
        raise OptionError(
            f"`prefill` is {selection.prefill} and `decode` {selection.decode}: the C++ kernels "
            f"alone read a condensed context; take {NATIVE} for both"
        )
    if options.kv_budget is not None or options.prefill_mass is not None:
        raise OptionError(
            "a context is condensed as a whole, and with `kv_budget` or `prefill_mass` parts of "
            "it are not read; leave them out"
        )
    if not any(group.group.condensable for group in engine.cache.groups):
        raise UnsupportedModelError(
            f"{engine.bundle.manifest.name} with KV cache {options.kv_text}: a context is "
            "condensed in layers that attend to all positions, without latents, and in a format "
            "that packs no blocks, such as int8"
        )
    if len(tokens) <= 2 * BLOCK:
        raise OptionError(
            f"the session has {len(tokens)} tokens; {2 * BLOCK + 1} are the fewest to condense"
        )
    _repetitions(engine, tokens)


def condense(
    engine: Engine, context: Context, *, keep: float, call: Call
) -> Generator[Wait, None, Condensed]:
    """Drop rows of K and V of a context's whole blocks, after computing all of it.

    Tokens whose K and V are copies, or stand behind a gap, are computed in place before.

    Args:
        keep: share of the rows that is kept.

    Raises:
        EdgeLLMError: see `Session.condense`.
    """
    tokens, _ = context.read()
    check_condensable(engine, tokens)
    if any(engine.thread.call(lambda: context.sequence.heads)):
        raise OptionError("the session is condensed already; condense a new one, with less to keep")
    context.replace(tokens)
    asked, parts = _repetitions(engine, tokens)
    yield from compute(engine, context, call)
    rows = parts[-1].stop * BLOCK
    shares = [
        np.zeros((group.kv.layers, group.kv.kv_heads, rows), np.float32)
        if group.group.condensable
        else None
        for group in engine.cache.groups
    ]
    for part in parts:
        yield from _repeat(context, tokens, asked, part, shares)
    yield WORKING
    kept = [None if of is None else _kept(of, keep) for of in shares]
    return engine.thread.call(partial(_condensed, context, kept, tokens, rows))


def _repetitions(engine: Engine, tokens: list[int]) -> tuple[list[int], list[range]]:
    """Return the tokens that ask for a repetition, and the blocks of each part.

    The block of the last token stays whole, as an answer begins with that token.

    Raises:
        ContextOverflowError: there is no room.
    """
    asked, blocks = engine.tokenizer.encode(_ASKED, add_bos=False), (len(tokens) - 1) // BLOCK
    size = min(REPEATED, (engine.ctx_size - len(tokens) - len(asked)) // BLOCK)
    if size < 1:
        raise ContextOverflowError(
            f"{len(tokens)} tokens leave no room behind them to repeat {BLOCK} in a context of "
            f"{engine.ctx_size}; raise `ctx_size` to {len(tokens) + len(asked) + BLOCK} or more"
        )
    return asked, [range(i, min(i + size, blocks)) for i in range(0, blocks, size)]


def _repeat(
    context: Context,
    tokens: list[int],
    asked: list[int],
    part: range,
    shares: list[Shares | None],
) -> Generator[Wait, None, None]:
    """Compute the repetition of a part behind a fork of the context, and raise the shares of the
    part's rows."""
    thread, rows = context.engine.thread, [*asked, *tokens[part.start * BLOCK : part.stop * BLOCK]]
    yield WORKING
    sequence = thread.call(partial(_forked, context, tokens))
    try:
        for i in range(0, len(rows), sequence.rows_at_once):
            yield WORKING
            some = rows[i : i + sequence.rows_at_once]
            thread.call(partial(_tell, context, sequence, some, part, shares))
    finally:
        thread.call(sequence.close)


def _forked(context: Context, tokens: list[int]) -> Sequence:
    """Fork a context's sequence, whose tokens no other one is to find behind it.

    Raises:
        CacheFullError: the context left the cache meanwhile.
    """
    with awake(context):
        _check_there(context, tokens)
        sequence = context.sequence.fork()
    if sequence.shareable is None:
        sequence.shareable = len(sequence)
    return sequence


def _check_there(context: Context, tokens: list[int]) -> None:
    if context.tokens != tokens:
        raise OptionError("the session was changed while it was condensed; it is not condensed")
    if context.sequence.tokens != tokens:
        raise CacheFullError("other answers have taken the session's place in the KV cache")


def _tell(
    context: Context,
    sequence: Sequence,
    rows: list[int],
    part: range,
    shares: list[Shares | None],
) -> None:
    """Compute rows of a repetition, which see the first block and the part."""
    seen = sorted({0, *part})
    at = slice(part.start * BLOCK, part.stop * BLOCK)
    told = [
        None if each is None else np.zeros((*each.shape[:2], len(seen) * BLOCK), np.float32)
        for each in shares
    ]
    heads = [
        None
        if each is None
        else whole_blocks(
            table.store.kv, [table.ids[i] for i in seen], first=each.shape[2] // BLOCK
        )
        for each, table in zip(shares, sequence.tables, strict=True)
    ]
    span = Span(
        sequence,
        rows,
        adapter=None if context.adapter is None else context.adapter.weights,
        all_states=False,
        heads=heads,
        shares=told,
    )
    context.engine.prefill.run([span])
    for each, raised in zip(shares, told, strict=True):
        if each is not None and raised is not None:
            np.maximum(each[:, :, at], raised[:, :, -len(part) * BLOCK :], out=each[:, :, at])


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
        _check_there(context, tokens)
        context.sequence.condense(kept, rows // BLOCK)
    counts = [len(of) for group in kept if group is not None for of in group]
    return Condensed(rows, sum(counts) / (len(counts) * rows))
