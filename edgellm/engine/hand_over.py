"""Handover of a prompt's KV blocks from one process to another, through a block store.

Blocks are named by their content, the arithmetic included, so the answer has the bits that it has
where the prompt was computed. Blocks that do not arrive, or do not match their name, are computed
again.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.cache.block_store import BlockStore
from edgellm.cache.kv_cache import group_name
from edgellm.engine.loaded_model import LoadedModel
from edgellm.kernels.kv_blocks import BLOCK


def full_prefix(tokens: Sequence[int]) -> Sequence[int]:
    """Return the part of a prompt that can be handed over: full blocks before the last token, which
    is always computed where the answer is."""
    return tokens[: (len(tokens) - 1) // BLOCK * BLOCK]


def block_names(engine: LoadedModel, tokens: Sequence[int], *, salt: str = "") -> list[bytes]:
    """Return a name for each full block of a prompt and each cache group, first block first."""
    index = engine.cache.index
    names = index.names(tokens, root=index.salted_root(salt))
    return [group_name(name, group) for name in names for group in engine.cache.groups]


def cached_tokens(engine: LoadedModel, tokens: Sequence[int], *, salt: str = "") -> int:
    """Return the number of leading tokens of a prompt that are cached."""
    root = engine.cache.index.salted_root(salt)
    return engine.thread.call(lambda: engine.cache.cached_prefix(tokens, root=root))


def write_prefix(
    engine: LoadedModel, tokens: Sequence[int], store: BlockStore, *, salt: str = ""
) -> int:
    """Write the computed full blocks of a prompt to a store.

    Returns:
        The number of tokens in these blocks; the store may have lacked room for some.
    """
    root = engine.cache.index.salted_root(salt)

    def write() -> int:
        sequence = engine.cache.sequence(tokens, root=root)
        try:
            engine.cache.write(sequence, store)
            return len(sequence) // BLOCK * BLOCK
        finally:
            sequence.close()

    return engine.thread.call(write)


def read_prefix(
    engine: LoadedModel, tokens: Sequence[int], store: BlockStore, *, salt: str = ""
) -> int:
    """Read the blocks that a store has of a prompt into the KV cache, for the answer to it.

    Returns:
        The number of leading tokens that need not be computed.
    """
    root = engine.cache.index.salted_root(salt)
    return engine.thread.call(lambda: engine.cache.read(tokens, store, root=root))
