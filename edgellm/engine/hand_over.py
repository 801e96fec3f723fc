"""A prompt that one process computes and another one goes on from: its KV blocks pass through a
block store.

Blocks are called by their content, the arithmetic included, so the answer has the bits that it has
where the prompt was computed; what does not arrive, or is not what it is called, is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.cache.block_store import BlockStore
from edgellm.cache.kv_cache import group_name
from edgellm.engine.loaded_model import LoadedModel
from edgellm.kernels.kv_blocks import BLOCK


def full_prefix(tokens: Sequence[int]) -> Sequence[int]:
    """What of a prompt can be handed over: full blocks before the last token, which is always
    computed where the answer is."""
    return tokens[: (len(tokens) - 1) // BLOCK * BLOCK]


def block_names(engine: LoadedModel, tokens: Sequence[int], *, salt: str = "") -> list[bytes]:
    """The names of a prompt's full blocks, first to last, those of each cache group."""
    index = engine.cache.index
    names = index.names(tokens, root=index.salted_root(salt))
    return [group_name(name, group) for name in names for group in engine.cache.groups]


def cached_tokens(engine: LoadedModel, tokens: Sequence[int], *, salt: str = "") -> int:
    """How many of a prompt's first tokens need not be computed."""
    root = engine.cache.index.salted_root(salt)
    with engine.lock, engine.cache.change():
        return engine.cache.cached_prefix(tokens, root=root)


def write_prefix(
    engine: LoadedModel, tokens: Sequence[int], store: BlockStore, *, salt: str = ""
) -> int:
    """Write what has been computed of a prompt to a store, in full blocks.

    Returns:
        How many tokens these are, if the store had room.
    """
    root = engine.cache.index.salted_root(salt)
    with engine.lock, engine.cache.change():
        sequence = engine.cache.sequence(tokens, root=root)
        try:
            engine.cache.write(sequence, store)
            return len(sequence) // BLOCK * BLOCK
        finally:
            sequence.close()


def read_prefix(
    engine: LoadedModel, tokens: Sequence[int], store: BlockStore, *, salt: str = ""
) -> int:
    """Have what a store has of a prompt in the KV cache, for the answer to it.

    Returns:
        How many of its first tokens need not be computed.
    """
    root = engine.cache.index.salted_root(salt)
    with engine.lock, engine.cache.change():
        return engine.cache.read(tokens, store, root=root)
