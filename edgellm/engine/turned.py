"""K and V that are copied to other positions, with the keys turned.

Tokens that attend to such copies are not what they would be behind plain tokens: copies are near
what would be computed in their place, and not the same.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

from edgellm.cache.groups import CacheGroup
from edgellm.cache.prefix_index import common_prefix
from edgellm.cache.sequence import Sequence
from edgellm.engine.adapters import LoadedAdapter
from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.loop import WORKING, Wait, pieces
from edgellm.engine.request import Request
from edgellm.errors import CacheFullError, OptionError, UnsupportedModelError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.kv_shift import move
from edgellm.results import Piece

# Share of a kept end that is computed again: from 0 to 0.15 answers of SmolLM2-135M were as near.
RECOMPUTE = 0.05


def append_turned(context: Context, source: Sequence, start: int) -> None:
    """Append the tokens of a sequence from `start` on, with their K and V, keys turned.

    All tokens of the context are in the KV cache, and the engine's thread calls. No other sequence
    begins with any of the copies.

    Raises:
        CacheFullError: no block is free; nothing has changed.
    """
    sequence, inv_freq = context.sequence, context.engine.cache.rope_frequencies
    assert inv_freq is not None
    before, count = len(sequence), len(source) - start
    with sequence.reserved(count):
        sequence.use_host()
        for table, other in zip(sequence.tables, source.tables, strict=True):
            store = table.store
            store.on_host(other.ids)
            move(
                store.kv,
                other.ids,
                start,
                count,
                targets=table.ids[before // BLOCK :],
                row=before % BLOCK,
                distance=start - before,
                inv_freq=[inv_freq[layer] for layer in store.group.layers],
            )
        if sequence.shareable is None:
            sequence.shareable = before
        sequence.commit(source.tokens[start:])
    context.tokens += source.tokens[start:]


def check_turnable(engine: Engine, adapter: LoadedAdapter | None) -> None:
    """Refuse a model whose K and V cannot stand at other positions.

    Raises:
        UnsupportedModelError: its layers have states or windows, or blocks are sealed or evicted.
        OptionError: the adapter begins at tokens of the prompt, or prompts read a part.
    """
    cache = engine.cache
    movable = all(isinstance(g.group, CacheGroup) and g.group.keeps_all for g in cache.groups)
    if engine.options.prefill_mass is not None:
        raise OptionError(
            "`prefill_mass` and K and V at other positions: ends of texts whose rows read a part "
            "are not kept; leave it out, or take `recompute` 1, which copies nothing"
        )
    if cache.rope_frequencies is None or not movable:
        raise UnsupportedModelError(
            f"{engine.bundle.manifest.name} with KV cache {engine.options.kv_text}: K and V can "
            "be copied to other positions only where all layers attend to all positions, keys "
            "have no norm behind RoPE, and there is neither `kv_budget` nor a format that seals "
            "blocks (k4v4 ...); take `recompute` 1, which copies nothing"
        )
    if adapter is not None and adapter.invocation:
        raise OptionError(
            f"adapter {adapter.name!r} begins at tokens of the prompt, so K and V at other "
            "positions are not its own; take `recompute` 1, which copies nothing"
        )


def keep_end(
    engine: Engine,
    context: Context,
    tokens: list[int],
    *,
    source: Context,
    call: Call,
    recompute: float,
) -> Generator[Wait, None, int]:
    """Make a context's tokens others, and copy the end that they share with a source's.

    What stands before is computed, with the callbacks and limits of a call. The source is best one
    that was computed without copies, as each turn rounds keys of int8 again: behind 400 turns the
    log-probability of SmolLM2's next token was -2.24, not -1.53.

    Args:
        recompute: share of the common end that is computed again, from its beginning.

    Returns:
        The number of copied tokens; 0 where the source has left the KV cache, where there is no
        room for both ends, and where a limit ended the work.
    """
    thread, end = engine.thread, common_end(source.tokens, tokens)
    end -= max(1, math.ceil(recompute * end))  # copies stand behind a token that is computed
    start = len(source.tokens) - end
    try:
        yield WORKING
        if (
            end <= 0
            or len(tokens) > engine.ctx_size
            or thread.call(partial(find_again, source)) <= start
        ):
            return 0
        context.set(tokens[: len(tokens) - end])
        yield from compute(engine, context, call)
        yield WORKING
        return thread.call(partial(copy_end, context, source, start))
    except CacheFullError:
        return 0
    finally:
        context.set(tokens)


def find_again(source: Context) -> int:
    """Find a source's tokens in the KV cache again; returns how many are there."""
    with awake(source):  # others may have its blocks while what stands before is computed
        return source.cached


def compute(engine: Engine, context: Context, call: Call) -> Generator[Wait, None, None]:
    """Compute all tokens of a context in the KV cache, as far as the call's limits let it."""
    if context.cached == len(context.tokens):
        return
    options = replace(call.options, max_tokens=0, prompt_logprobs=None)
    call = replace(call, options=options, logit_filter=None, whole=True)
    context.catch_up()
    with closing(pieces(engine.loop, Request(context, call))) as pending:
        for item in pending:
            if not isinstance(item, Piece):
                yield item
    context.settle()


def copy_end(context: Context, source: Context, start: int) -> int:
    """Append a source's tokens from `start` on; returns how many, none under another adapter."""
    with awake(context), awake(source):
        count = source.cached - start
        complete = context.cached == len(context.tokens) and not source.sequence.heads
        if count <= 0 or not complete or context.sequence.root != source.sequence.root:
            return 0
        append_turned(context, source.sequence, start)
        return count


@contextmanager
def awake(context: Context) -> Iterator[None]:
    """Keep a context's blocks in the engine's thread, taken back or found again before."""
    context.wake(context)
    try:
        context.take_back()
        if not context.cached:
            cache, root = context.engine.cache, context.sequence.root
            context.sequence = cache.sequence(context.tokens, root=root)
        yield
    finally:
        context.rest(context)


def common_end(old: SequenceOf[int], new: SequenceOf[int]) -> int:
    """Count the last tokens that two sequences have in common, behind their common prefix."""
    start = common_prefix(old, new)
    return common_prefix(old[start:][::-1], new[start:][::-1])
