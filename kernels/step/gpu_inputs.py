"""Inputs of a step (tokens, positions, block tables) in one piece of device memory and one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgellm.kernels.attention.gpu_tiles import (
    JOB_FIELDS,
    ROW_FIELDS,
    START,
    Plan,
    Tiling,
    Work,
)
from edgellm.kernels.checks import block_ids, indices
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.step.span import StepSpan, check_spans


@dataclass(frozen=True)
class Place:
    """Place of the tokens' K and V in one pool: its blocks, and block tables `[S, blocks]`."""

    blocks: DeviceBlocks
    tables: torch.Tensor


class SpanInputs:
    """Spans of a call in device memory, at the same addresses for each call.

    Attributes:
        tokens: token ids of all spans, `[rows]` int64.
        places: place of the spans in each pool.
    """

    def __init__(
        self,
        pools: Sequence[DeviceBlocks],
        *,
        heads: int,
        rows: int,
        positions: int,
        vocabulary: int,
        device: str,
    ) -> None:
        """Allocate memory for calls.

        Args:
            rows: largest number of tokens in a call.
            positions: number of positions in the RoPE tables.
            vocabulary: number of token ids.
        """
        self._pools = [pool.host.count for pool in pools]
        self._room = rows
        self._positions = positions
        self._vocabulary = vocabulary
        self._tiling = Tiling.of(pools[0], heads)
        # an even number keeps the tables of all pools aligned, and so kernels compiled once
        blocks = 2 * -(-positions // (2 * BLOCK))
        jobs = self._tiling.most_jobs(rows) * JOB_FIELDS // 2  # two int32 in an int64
        sizes = [rows, rows * ROW_FIELDS // 2, jobs, rows * len(pools) * blocks]
        self._host = torch.zeros(sum(sizes), dtype=torch.int64)
        self._device = self._host.to(device, copy=True)
        self._before_tables = sum(sizes[:3])
        self._span_size = len(pools) * blocks
        host = [part.numpy() for part in _parts(self._host, sizes, len(pools))]
        self._host_tokens, self._host_rows, self._host_jobs, self._host_tables = host
        self.tokens, self._rows, self._jobs, tables = _parts(self._device, sizes, len(pools))
        self.places = [Place(pool, tables[:, index]) for index, pool in enumerate(pools)]
        self._copied: dict[tuple[int, int], list[int]] = {}  # by span and pool
        self._planned: tuple[Plan, Sequence[int], Sequence[int]] | None = None

    def set(self, spans: Sequence[StepSpan]) -> None:
        """Copy spans to the device.

        Raises:
            ValueError: a token, block or position does not exist, or there are too many tokens.
        """
        check_spans(spans, pools=len(self._pools))
        counts = [len(span.tokens) for span in spans]
        if sum(counts) > self._room:
            raise ValueError(f"{sum(counts)} tokens; there is room for 1 to {self._room}")
        tokens = [token for span in spans for token in span.tokens]
        ids = indices(tokens, self._vocabulary, "token id")
        for number, span in enumerate(spans):
            self._set_tables(number, span)
        self._host_tokens[: len(ids)] = ids
        self._set_work(counts, [span.start for span in spans])
        end = self._before_tables + len(spans) * self._span_size
        # the host waits: the next call writes here again, and a chunk that was stopped has not
        # been waited for otherwise
        self._device[:end].copy_(self._host[:end])

    def work(self, counts: Sequence[int]) -> Work:
        """Return the work of programs for spans with `counts` tokens, which `set` fills in."""
        jobs = self._jobs[: self._tiling.jobs(counts)]
        return Work(self._rows[: sum(counts)], jobs, self._tiling.tile(counts))

    def _set_tables(self, number: int, span: StepSpan) -> None:
        """Write the block tables of a span, unless they are the same as in the last call.

        From one decode step to the next, most tables stay the same.

        Args:
            number: index of the span in the call.
        """
        count, end = len(span.tokens), span.start + len(span.tokens)
        if end > self._positions:
            raise ValueError(f"position {end} is beyond the {self._positions} of the RoPE table")
        for pool, sequence in enumerate(span.tables):
            table = list(sequence)
            reaches = span.start >= 0 and end <= len(table) * BLOCK
            if reaches and self._copied.get((number, pool)) == table:
                continue
            ids = block_ids(table, self._pools[pool], start=span.start, tokens=count)
            row = self._host_tables[number, pool]
            row[: len(ids)] = ids[: len(row)]
            self._copied[number, pool] = table

    def _set_work(self, counts: Sequence[int], starts: Sequence[int]) -> None:
        """Write rows and jobs of `Work`; only starts, unless tokens or tiles of keys have changed.

        From one decode step to the next, mostly the starts alone change.
        """
        keys = self._tiling.key_tiles(counts, starts)
        if self._planned is None or self._planned[1:] != (counts, keys):
            plan = self._tiling.plan(counts, keys)
            self._planned = plan, counts, keys
            self._host_rows[: len(plan.rows)] = plan.rows
            self._host_jobs[: len(plan.jobs)] = plan.jobs
        plan, of = self._planned[0], np.array(starts, np.int32)
        self._host_rows[: len(plan.rows), 0] = plan.rows[:, 0] + of[plan.row_spans]
        self._host_jobs[: len(plan.jobs), START] = of[plan.job_spans]


def _parts(memory: torch.Tensor, sizes: Sequence[int], pools: int) -> list[torch.Tensor]:
    """Split memory into tokens `[R]`, rows and jobs of `Work`, and tables `[R, pools, blocks]`."""
    tokens, rows, jobs, tables = memory.split(list(sizes))
    return [
        tokens,
        rows.view(torch.int32).view(-1, ROW_FIELDS),
        jobs.view(torch.int32).view(-1, JOB_FIELDS),
        tables.view(len(tokens), pools, -1),
    ]
