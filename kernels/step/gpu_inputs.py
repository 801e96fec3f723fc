"""Inputs of a step (tokens, positions, block tables) in one piece of device memory and one copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from edgellm.kernels.checks import block_ids, indices, sealed_ids
from edgellm.kernels.gpu.kv_blocks import (
    STATE_ROW_FIELDS,
    STATE_SPAN_FIELDS,
    DeviceBlocks,
    DevicePool,
    DeviceSealed,
    DeviceStateRows,
    DeviceStates,
    SealedPlace,
)
from edgellm.kernels.kv_blocks import BLOCK, SEALINGS, SealedBlocks
from edgellm.kernels.sealed_blocks import sealed_end
from edgellm.kernels.state_blocks import StateView
from edgellm.kernels.step.span import StepSpan, check_spans, check_states


@dataclass(frozen=True)
class Place:
    """Place of the tokens' K and V in one pool: its blocks, and block tables `[S, blocks]`.

    Attributes:
        sealed: the same of its sealed blocks, where its format seals blocks.
    """

    blocks: DeviceBlocks
    tables: torch.Tensor
    sealed: SealedPlace | None


class SpanInputs:
    """Spans of a call in device memory, at the same addresses for each call.

    Attributes:
        tokens: token ids of all spans, `[rows]` int64.
        places: place of the spans in each pool of K and V, by its number.
        states: rows and blocks with their states in each other pool, by its number.
    """

    def __init__(
        self,
        pools: Sequence[DevicePool],
        *,
        tilings: Collection[Tiling],
        rows: int,
        positions: int,
        vocabulary: int,
        device: str,
    ) -> None:
        """Allocate memory for calls.

        Args:
            tilings: those of attention, of each kind of heads.
            rows: largest number of tokens in a call.
            positions: number of positions in the RoPE tables.
            vocabulary: number of token ids.
        """
        self._pools = [pool.host for pool in pools]
        kv = {n: pool for n, pool in enumerate(pools) if not isinstance(pool, DeviceStates)}
        states = {n: pool for n, pool in enumerate(pools) if isinstance(pool, DeviceStates)}
        self._room = rows
        self._positions = positions
        self._vocabulary = vocabulary
        self._tilings = list(tilings)
        # an even number keeps the tables of all pools aligned, and so kernels compiled once
        blocks = 2 * -(-positions // (2 * BLOCK))
        # two int32 in an int64
        jobs = max(each.most_jobs(rows) for each in tilings) * JOB_FIELDS // 2
        each = rows * (STATE_SPAN_FIELDS + STATE_ROW_FIELDS) // 2
        work = (len(tilings) * of for of in (rows * ROW_FIELDS // 2, jobs))
        sizes = [rows, *work, len(states) * each, rows * len(kv) * blocks]
        self._host = torch.zeros(sum(sizes), dtype=torch.int64)
        self._device = self._host.to(device, copy=True)
        self._before_tables = sum(sizes[:4])
        self._span_size = len(kv) * blocks
        shape = len(tilings), len(kv)
        host = _parts(self._host, sizes, *shape)
        self.tokens, self._rows, self._jobs, on_device, tables = _parts(self._device, sizes, *shape)
        self._tabled = list(kv)
        self.places = _places(kv, {n: tables[:, index] for index, n in enumerate(kv)})
        self.states = {
            n: DeviceStateRows(states[n], *_state_parts(each, rows))
            for n, each in zip(states, on_device, strict=True)
        }
        self._host_states = {
            n: [part.numpy() for part in _state_parts(each, rows)]
            for n, each in zip(states, host[3], strict=True)
        }
        self._host_tokens, self._host_rows, self._host_jobs, _, self._host_tables = (
            part.numpy() for part in host
        )
        self._copied: dict[tuple[int, int], list[int]] = {}  # by span and pool
        self._planned: dict[int, tuple[Plan, Sequence[int], Sequence[int]]] = {}  # by tiling

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
        if self.states:
            for span in spans:
                check_states(span, self._pools)
        for number, span in enumerate(spans):
            self._set_tables(number, span)
        self._host_tokens[: len(ids)] = ids
        for number in range(len(self._tilings)):
            self._set_work(number, counts, [span.start for span in spans])
        for pool in self.states:
            self._set_states(pool, counts, [span.states[pool] for span in spans])
        end = self._before_tables + len(spans) * self._span_size
        # the host waits: the next call writes here again, and a chunk that was stopped has not
        # been waited for otherwise
        self._device[:end].copy_(self._host[:end])

    def work(self, counts: Sequence[int]) -> dict[Tiling, Work]:
        """Return the work of programs for spans with `counts` tokens, which `set` fills in."""
        return {
            tiling: Work(rows[: sum(counts)], jobs[: tiling.jobs(counts)], tiling.tile(counts))
            for tiling, rows, jobs in zip(self._tilings, self._rows, self._jobs, strict=True)
        }

    def _set_tables(self, number: int, span: StepSpan) -> None:
        """Write the block tables of a span, unless they are the same as in the last call.

        From one decode step to the next, most tables stay the same.

        Args:
            number: index of the span in the call.
        """
        count, end = len(span.tokens), span.start + len(span.tokens)
        if end > self._positions:
            raise ValueError(f"position {end} is beyond the {self._positions} of the RoPE table")
        for index, n in enumerate(self._tabled):
            table, pool = list(span.tables[n]), self._pools[n]
            reaches = span.start >= 0 and end <= len(table) * BLOCK
            if isinstance(pool, SealedBlocks):
                reaches = span.start >= 0 and sealed_end(end) <= max(1, len(table))
            if reaches and self._copied.get((number, index)) == table:
                continue
            if isinstance(pool, SealedBlocks):
                ids = sealed_ids(table, pool, tokens=end)
            else:
                ids = block_ids(table, pool.count, start=span.start, tokens=count)
            row = self._host_tables[number, index]
            row[: len(ids)] = ids[: len(row)]
            self._copied[number, index] = table

    def _set_states(
        self, pool: int, counts: Sequence[int], views: Sequence[StateView | None]
    ) -> None:
        """Write spans and rows of `DeviceStateRows`."""
        spans, rows = self._host_states[pool]
        first = 0
        for number, (count, view) in enumerate(zip(counts, views, strict=True)):
            assert view is not None  # checked
            spans[number] = first, count, -1 if view.source is None else view.source, 0
            rows[first : first + count] = number, -1
            for after, block in view.targets:
                rows[first + after - 1, 1] = block
            first += count

    def _set_work(self, number: int, counts: Sequence[int], starts: Sequence[int]) -> None:
        """Write rows and jobs of `Work`; only starts, unless tokens or tiles of keys have changed.

        From one decode step to the next, mostly the starts alone change.

        Args:
            number: index of the tiling.
        """
        tiling, rows, jobs = self._tilings[number], self._host_rows[number], self._host_jobs[number]
        keys = tiling.key_tiles(counts, starts)
        if number not in self._planned or self._planned[number][1:] != (counts, keys):
            plan = tiling.plan(counts, keys)
            self._planned[number] = plan, counts, keys
            rows[: len(plan.rows)] = plan.rows
            jobs[: len(plan.jobs)] = plan.jobs
        plan, of = self._planned[number][0], np.array(starts, np.int32)
        rows[: len(plan.rows), 0] = plan.rows[:, 0] + of[plan.row_spans]
        jobs[: len(plan.jobs), START] = of[plan.job_spans]


def _places(
    pools: Mapping[int, DeviceBlocks | DeviceSealed], tables: Mapping[int, torch.Tensor]
) -> dict[int, Place]:
    """Return the place of the tokens in each pool of rows, with that of the sealed blocks."""
    places = {}
    for n, pool in pools.items():
        if isinstance(pool, DeviceSealed):
            continue
        sealing, sealed = SEALINGS.get(pool.format), None
        for other, each in pools.items():
            if isinstance(each, DeviceSealed) and each.host is pool.host.sealed and sealing:
                sealed = SealedPlace(each, tables[other], sealing)
        places[n] = Place(pool, tables[n], sealed)
    return places


def _parts(
    memory: torch.Tensor, sizes: Sequence[int], tilings: int, pools: int
) -> list[torch.Tensor]:
    """Split memory into tokens `[R]`, rows and jobs of `Work` for each tiling, a part `[6 R]` for
    each pool of states, and tables `[R, pools, blocks]`."""
    tokens, rows, jobs, states, tables = memory.split(list(sizes))
    return [
        tokens,
        rows.view(torch.int32).view(tilings, -1, ROW_FIELDS),
        jobs.view(torch.int32).view(tilings, -1, JOB_FIELDS),
        states.view(torch.int32).view(-1, len(tokens) * (STATE_SPAN_FIELDS + STATE_ROW_FIELDS)),
        tables.view(len(tokens), pools, -1),
    ]


def _state_parts(memory: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the memory of a pool into spans and rows of `DeviceStateRows`."""
    spans, rest = memory.split([rows * STATE_SPAN_FIELDS, rows * STATE_ROW_FIELDS])
    return spans.view(rows, STATE_SPAN_FIELDS), rest.view(rows, STATE_ROW_FIELDS)
