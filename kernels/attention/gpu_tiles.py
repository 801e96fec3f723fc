"""Division of attention over several sequences into programs: tiles of queries, splits of keys.

A program has a KV head, a tile of one span's queries and a split of the keys. All programs of a
call should take the same time, so a span has splits in proportion to its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgellm.kernels.gpu.device import aligned, interpreted
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks

# Keys of a tile, a divisor of BLOCK, and the most query rows of a tile.
KEYS = 64
ROWS = 64
# Programs that share the keys of a KV head, if there are few tiles of queries.
SPLITS = 32
_INTERPRETED_SPLITS = 2
# Sizes of a row and of a job of `Work`, and the index of the start in a job.
ROW_FIELDS = 6
JOB_FIELDS = 8
START = 2

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Work:
    """Work of the programs in one call of attention, in device memory.

    Attributes:
        rows: `[C, ROW_FIELDS]` int32, one row per token: its position, index of its sequence's
            block table, index of its first partial result, number of its partial results, and their
            distance (tokens of the span). The last field is 0, and keeps pairs of rows aligned.
        jobs: `[J, JOB_FIELDS]` int32, one job per program: first row, tokens, start and block table
            of its span; first query of its tile, among the queries of the span and a KV head; index
            of its split, number of splits; the span's first partial result less its first row. A
            job with 0 tokens is empty.
        tile: number of query rows in a tile.
    """

    rows: torch.Tensor
    jobs: torch.Tensor
    tile: int


@dataclass(frozen=True)
class Plan:
    """Numbers of `Work` for spans that start at 0; their starts are added in each step.

    Attributes:
        rows, jobs: as in `Work`, with positions counted from the span's start.
        row_spans, job_spans: index of the span of each row and job, `[C]` and `[J]`.
    """

    rows: Ints
    jobs: Ints
    row_spans: NDArray[np.intp]
    job_spans: NDArray[np.intp]


@dataclass(frozen=True)
class Tiling:
    """Sizes of the tiles of queries and keys.

    Attributes:
        group: query heads per KV head.
        most: largest number of query rows in a tile.
        keys: number of keys in a tile.
    """

    group: int
    most: int
    keys: int

    @classmethod
    def of(cls, blocks: DeviceBlocks, heads: int) -> Tiling:
        """Choose sizes of tiles for attention of `heads` query heads over blocks like these."""
        group = heads // blocks.host.kv_heads
        # float32 is for reference: no tensor cores multiply it, and its tiles take more registers;
        # tiles of wide heads are halved to fit into registers
        if blocks.format == "f32":
            return cls(group, 16, 16)
        parts = max(1, aligned(blocks.host.value_dim) // 128)
        if blocks.host.sealed is not None:
            # 64 rows of 128 numbers spill 104 bytes with keys by channel, on sm_80
            rows = ROWS // max(1, aligned(blocks.host.head_dim) // 64)
            return cls(group, max(16, rows), max(32, KEYS // parts))
        # with 64 keys of latents of 512 numbers, f16 needs more shared memory than most GPUs have
        return cls(group, max(16, ROWS // parts), max(32, KEYS // parts))

    def tile(self, counts: Sequence[int]) -> int:
        """Return the query rows of a tile for spans with `counts` tokens, by the longest span."""
        return min(self.most, max(16, aligned(max(counts) * self.group)))

    def key_tiles(self, counts: Sequence[int], starts: Sequence[int]) -> list[int]:
        """Return the number of key tiles that each span's last query sees, without a window."""
        ends = (start + count for start, count in zip(starts, counts, strict=True))
        return [-(-end // self.keys) for end in ends]

    def splits(self, counts: Sequence[int], keys: Sequence[int]) -> list[int]:
        """Return the number of splits of each span's keys, in proportion to its tiles of keys.

        Many tiles of queries keep a device busy by themselves, and then have one split each.

        Args:
            keys: number of key tiles of each span.
        """
        walks = sum(tiles * count for tiles, count in zip(self._tiles(counts), keys, strict=True))
        return [min(count, max(1, _splits() * count // walks)) for count in keys]

    def jobs(self, counts: Sequence[int]) -> int:
        """Return the number of programs per KV head, some of which may be idle.

        The number does not depend on the lengths of the sequences, so that a captured launch serves
        all of them.
        """
        tiles = sum(self._tiles(counts))
        if len(counts) == 1:
            return tiles * max(1, _splits() // tiles)
        # spans with several splits have `_splits()` jobs in all, and other spans one job per tile
        return tiles + _splits() - 1

    def most_jobs(self, rows: int) -> int:
        """Return the largest number of programs per KV head in a call of up to `rows` tokens."""
        return rows * -(-self.group // 16) + _splits() - 1

    def plan(self, counts: Sequence[int], keys: Sequence[int]) -> Plan:
        """Plan the work for spans with `counts` tokens and `keys` tiles of keys."""
        tokens, parts = np.array(counts), np.array(self.splits(counts, keys))
        programs = np.array(self._tiles(counts)) * parts
        first, base, first_program = (
            np.cumsum(sizes) - sizes for sizes in (tokens, tokens * parts, programs)
        )
        of = np.repeat(np.arange(len(tokens)), tokens)
        token = np.arange(len(of)) - first[of]
        rows = np.stack([token, of, base[of] + token, parts[of], tokens[of], 0 * of], axis=1)
        span = np.repeat(np.arange(len(tokens)), programs)
        number = np.arange(len(span)) - first_program[span]
        tile, split = np.divmod(number, parts[span])
        query = tile * self.tile(counts)
        before = (base - first)[span]
        fields = [first[span], tokens[span], 0 * span, span, query, split, parts[span], before]
        jobs = np.zeros((self.jobs(counts), JOB_FIELDS), np.int32)
        jobs[: len(span)] = np.stack(fields, axis=1)
        idle = np.zeros(len(jobs) - len(span), np.intp)
        return Plan(rows.astype(np.int32), jobs, of, np.concatenate([span, idle]))

    def _tiles(self, counts: Sequence[int]) -> list[int]:
        tile = self.tile(counts)
        return [-(-count * self.group // tile) for count in counts]


def _splits() -> int:
    return _INTERPRETED_SPLITS if interpreted() else SPLITS
