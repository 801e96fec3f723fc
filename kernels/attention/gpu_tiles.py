"""How attention of several sequences is cut into programs: tiles of queries, splits of keys.

A program has a KV head, a tile of one span's queries and a split of the keys. All programs of a
call shall take about as long, so a span has splits in proportion to its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgellm.kernels.gpu.device import aligned, interpreted
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks

# Of a tile: keys, a divisor of BLOCK, and query rows at most.
KEYS = 64
ROWS = 64
# Programs that share a KV head's keys, where there are few tiles of queries.
SPLITS = 32
_INTERPRETED_SPLITS = 2
# Numbers of a row and of a job of `Work`, and which of a job's is the start.
ROW_FIELDS = 6
JOB_FIELDS = 8
START = 2

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Work:
    """What the programs of a call have to do, in device memory.

    Attributes:
        rows: `[C, ROW_FIELDS]` int32; of each token its position, the number of its sequence's
            block table, which of the partial results is its first, how many it has, and how far
            they are apart: tokens of the span. The last one is 0, and keeps pairs of rows aligned.
        jobs: `[J, JOB_FIELDS]` int32; of each program its span's first row, tokens, start, number
            of the table; the tile's first query among those of the span and a KV head; the split,
            of how many, and the span's first partial result less its first row. Nothing is to do
            for 0 tokens.
        tile: query rows of a tile.
    """

    rows: torch.Tensor
    jobs: torch.Tensor
    tile: int


@dataclass(frozen=True)
class Plan:
    """The numbers of `Work` but for starts: positions count from those.

    Attributes:
        row_spans, job_spans: which span each row and job is of, `[C]` and `[J]`.
    """

    rows: Ints
    jobs: Ints
    row_spans: NDArray[np.intp]
    job_spans: NDArray[np.intp]


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles.

    Attributes:
        group: query heads of a KV head.
        most: query rows of a tile at most.
        keys: of a tile.
    """

    group: int
    most: int
    keys: int

    @classmethod
    def of(cls, blocks: DeviceBlocks, heads: int) -> Tiling:
        """For attention of `heads` query heads over such blocks."""
        group = heads // blocks.host.kv_heads
        # float32 is for reference: its products are not for tensor cores, and its tiles are large;
        # tiles of wide heads would not fit into registers
        if blocks.format == "f32":
            return cls(group, 16, 16)
        parts = 1 if blocks.host.head_dim <= 128 else 2
        return cls(group, ROWS // parts, KEYS // parts)

    def tile(self, counts: Sequence[int]) -> int:
        """Query rows of a tile where spans have so many tokens: what the longest one needs."""
        return min(self.most, max(16, aligned(max(counts) * self.group)))

    def key_tiles(self, counts: Sequence[int], starts: Sequence[int]) -> list[int]:
        """That each span's last query sees, without a window."""
        ends = (start + count for start, count in zip(starts, counts, strict=True))
        return [-(-end // self.keys) for end in ends]

    def splits(self, counts: Sequence[int], keys: Sequence[int]) -> list[int]:
        """Of each span's keys, as many tiles: many tiles keep a device busy by themselves."""
        walks = sum(tiles * count for tiles, count in zip(self._tiles(counts), keys, strict=True))
        return [min(count, max(1, _splits() * count // walks)) for count in keys]

    def jobs(self, counts: Sequence[int]) -> int:
        """Programs of a KV head, some of which may have nothing to do.

        However long the sequences are, so that a captured launch serves all of them.
        """
        tiles = sum(self._tiles(counts))
        if len(counts) == 1:
            return tiles * max(1, _splits() // tiles)
        # spans with more than one split have `_splits()` jobs together, and others one for a tile
        return tiles + _splits() - 1

    def most_jobs(self, rows: int) -> int:
        """Of any call of up to `rows` tokens."""
        return rows * -(-self.group // 16) + _splits() - 1

    def plan(self, counts: Sequence[int], keys: Sequence[int]) -> Plan:
        """The work for spans of so many tokens and tiles of keys."""
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
