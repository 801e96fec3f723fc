"""K and V that are copied to other positions, with the keys turned.

Tokens that attend to such copies are not what they would be behind plain tokens: copies are near
what would be computed in their place, and not the same.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from edgellm.cache.groups import CacheGroup
from edgellm.cache.prefix_index import common_prefix
from edgellm.cache.sequence import Sequence
from edgellm.engine.adapters import LoadedAdapter
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.errors import OptionError, UnsupportedModelError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.kv_shift import move


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
            f"{engine.bundle.manifest.name} with KV cache {engine.options.kv_format}: K and V can "
            "be copied to other positions only where all layers attend to all positions, keys "
            "have no norm behind RoPE, and there is neither `kv_budget` nor a format that seals "
            "blocks (k4v4 ...); take `recompute` 1, which copies nothing"
        )
    if adapter is not None and adapter.invocation:
        raise OptionError(
            f"adapter {adapter.name!r} begins at tokens of the prompt, so K and V at other "
            "positions are not its own; take `recompute` 1, which copies nothing"
        )


def common_end(old: SequenceOf[int], new: SequenceOf[int]) -> int:
    """Count the last tokens that two sequences have in common, behind their common prefix."""
    start = common_prefix(old, new)
    return common_prefix(old[start:][::-1], new[start:][::-1])
