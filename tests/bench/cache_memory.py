"""What the KV cache of a model takes, group by group, beside one record over all layers.

    python tests/bench/cache_memory.py MODEL [--ctx-size 8192] [--kv-format int8]

A prompt fills the context but for some tokens, which are then decoded. Touched are the blocks that
have been written: those of a window that the sequence has passed are kept for who goes back, as far
as the pool has room. In brackets is the share of one record over all layers.
"""

from __future__ import annotations

import argparse

import numpy as np

from edgellm.cache.groups import CacheGroup
from edgellm.cache.kv_cache import KVCache
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import load

DECODED = 64
COLUMNS = (
    "layers",
    "positions",
    "MB held by the sequence",
    "MB touched",
    "one record",
    "MB of the full pool",
    "one record",
)


def rows(cache: KVCache, tokens: int) -> list[tuple[str, ...]]:
    """A row per group and their sum; blocks in MB of what one sequence and a full pool take."""
    whole, sums = -(-tokens // BLOCK), np.zeros(5)
    table = []
    for group in cache.groups:
        pool, count = group.pool, group.blocks.count
        blocks = np.array([pool.used, pool.touched, whole, pool.resident, count])
        sizes = blocks * (group.blocks.nbytes / count / 1e6)
        sums += sizes
        kind = group.group
        seen = "all" if kind.keeps_all else "state"
        if isinstance(kind, CacheGroup) and kind.window is not None:
            seen = str(kind.window)
        table.append((str(len(kind.layers)), seen, *_cells(sizes)))
    return [*table, ("together", "", *_cells(sums))]


def _cells(megabytes: np.ndarray) -> list[str]:
    held, touched, one_record, pool, pool_of_one_record = megabytes
    return [
        f"{held:.1f} ({held / one_record:.3f})",
        f"{touched:.1f} ({touched / one_record:.3f})",
        f"{one_record:.1f}",
        f"{pool:.1f} ({pool / pool_of_one_record:.3f})",
        f"{pool_of_one_record:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--ctx-size", type=int, default=8192)
    parser.add_argument("--kv-format", default="int8")
    arguments = parser.parse_args()
    llm = load(arguments.model, ctx_size=arguments.ctx_size, kv_format=arguments.kv_format)
    vocabulary = llm.engine.config.vocab_size
    count = arguments.ctx_size - DECODED
    tokens = np.random.default_rng(0).integers(0, vocabulary, count).tolist()
    with llm.session() as session:
        session.append(tokens)
        session.generate(max_tokens=DECODED, ignore_eos=True)
        print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
        for row in rows(llm.engine.cache, arguments.ctx_size):
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
