"""The router of a layer with experts in Triton, and the sum of what its experts give.

A slot is a row in an expert. Slots of an expert lie side by side, in the order of the rows, and
`linear` takes them in tiles. The device alone knows which experts have slots: there are as many
tiles as could be needed, and those that are not have no slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from edgellm.kernels.experts import Routing
from edgellm.kernels.experts.gpu_router import route_kernel, score_kernel
from edgellm.kernels.gpu.device import aligned, interpreted
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.linear.gpu import FEW_ROWS, MANY_TILE, Next, Rows, Tiles
from edgellm.kernels.linear.gpu_rows import TILE, CodedRows, store_inputs

# Rows whose experts a program chooses, where there are many.
_ROWS = 16
# Most shares of a program that chooses and gives slots; with twice as many a thread spills.
_AT_ONCE = 8192


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the experts of a layer: inputs, and outputs of up, of each."""

    routing: Routing
    hidden: int
    width: int

    def tiles(self, rows: int) -> int:
        """Return the largest number of tiles that the slots of so many rows can need."""
        slots, tile = rows * self.routing.used, TILE if rows <= FEW_ROWS else MANY_TILE
        return (slots + (tile - 1) * min(self.routing.experts, slots)) // tile


@dataclass(frozen=True)
class DeviceRouter:
    """Router of a layer in device memory.

    Attributes:
        weight: `[experts, E]`, and a row more if the shared expert has a share: see
            `LayerWeights.shared_router`.
        bias: of the logits, as many as `weight` has rows, or None.
        selection, factors: what is added to the scores in the choice alone, and factors of the
            shares, `[experts]`, or None.
    """

    weight: torch.Tensor
    sizes: ExpertSizes
    bias: torch.Tensor | None = None
    selection: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    @property
    def has_share(self) -> bool:
        """Whether the shared expert has a share, by the last logit."""
        return len(self.weight) > self.sizes.routing.experts


@dataclass(frozen=True)
class ExpertBuffers:
    """Buffers for the slots of a step, which layers with experts use one after the other.

    Attributes:
        scores: the router's logits `[rows, experts]`, or one more: see `DeviceRouter.weight`.
        chosen: shares of the experts that each row has, -1 for others, `[rows, experts]`.
        counts: number of slots that some rows have in each expert, `[runs of rows, experts]`.
        share, slot: share and slot of each of a row's experts, in ascending order, `[rows, used]`.
        source: row of each slot.
        table: see `Tiles`.
        activated: inputs of down of each slot; for few rows they are in `inner`, as codes.
        out: outputs of down of each slot.
        rows: buffers for `activated` as halves.
    """

    scores: torch.Tensor
    chosen: torch.Tensor
    counts: torch.Tensor
    share: torch.Tensor
    slot: torch.Tensor
    source: torch.Tensor
    table: torch.Tensor
    activated: torch.Tensor
    out: torch.Tensor
    rows: Rows
    inner: CodedRows

    @classmethod
    def empty(cls, layers: Sequence[ExpertSizes], *, rows: int, device: str) -> ExpertBuffers:
        """Allocate buffers for up to `rows` rows in any of the layers."""
        few = min(rows, FEW_ROWS)
        experts = max(layer.routing.experts for layer in layers)
        used = max(layer.routing.used for layer in layers)
        tiles = max(layer.tiles(count) for layer in layers for count in (few, rows))
        coded = TILE * max(layer.tiles(few) for layer in layers)
        width = max(layer.width for layer in layers)

        def floats(size: int) -> torch.Tensor:
            return torch.empty(size, device=device)

        def whole(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        slots = max(coded, rows * used)
        return cls(
            scores=floats(rows * (experts + 1)),
            chosen=floats(rows * experts),
            counts=whole(triton.cdiv(rows, _ROWS) * experts),
            share=floats(rows * used),
            slot=whole(rows * used),
            source=whole(slots),
            table=whole(tiles * 3),
            activated=floats(rows * used * width),
            out=floats(slots * max(layer.hidden for layer in layers)),
            rows=Rows.empty(rows * used, width, device),
            inner=CodedRows.empty(coded, width, device),
        )

    def slots(self, sizes: ExpertSizes, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `activated` and `out` for so many rows, a row for each slot."""
        slots = rows * sizes.routing.used
        padded = TILE * sizes.tiles(rows) if rows <= FEW_ROWS else slots
        activated = self.activated[: slots * sizes.width].view(slots, sizes.width)
        return activated, self.out[: padded * sizes.hidden].view(padded, sizes.hidden)


@triton.jit
def sum_kernel(
    out_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    share_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    score_ptr: tl.tensor,
    y_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    width: tl.tensor,
    scores: tl.tensor,
    USED: tl.constexpr,
    SHARED: tl.constexpr,
    SHARE: tl.constexpr,
    ADD: tl.constexpr,
    CODED: tl.constexpr,
    NORM: tl.constexpr,
    FINE: tl.constexpr,
    GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write, or add to y, GROUPS groups of what a row's slots give; the grid counts rows first.

    Args:
        scores: number of logits of a row, the last one of the shared expert's share if SHARE.
        SHARED: whether the output of a shared expert is added.
        CODED: whether y is written as codes for the next product as well; NORM, FINE: see
            `store_inputs`.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    row, groups = tl.program_id(0), width // 32
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    there = group < groups
    k = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    place = row * width + k
    y = tl.zeros([GROUPS, 32], tl.float32)
    if ADD:
        y += tl.load(y_ptr + place, mask=there[:, None], other=0.0)
    for used in range(USED):
        slot = tl.load(slot_ptr + row * USED + used).to(tl.int64)
        out = tl.load(out_ptr + slot * width + k, mask=there[:, None], other=0.0)
        y += tl.load(share_ptr + row * USED + used) * out
    if SHARED:
        out = tl.load(shared_ptr + place, mask=there[:, None], other=0.0)
        if SHARE:
            out /= 1.0 + tl.exp(-tl.load(score_ptr + row * scores + scores - 1))
        y += out
    tl.store(y_ptr + place, y, mask=there[:, None])
    if CODED:
        ptrs = codes_ptr, rest_ptr, scale_ptr, shift_ptr, squares_ptr
        store_inputs(y, row, group, there, groups, norm_ptr, ptrs, NORM, FINE)


def route(
    x: torch.Tensor,
    router: DeviceRouter,
    buffers: ExpertBuffers,
    *,
    norm: torch.Tensor | None,
    epsilon: float,
) -> Tiles:
    """Choose the experts of rows `x` `[M, E]`, and give each row a slot in those that it has.

    Args:
        norm: weights `[E]` of an RMS norm of each row before the router.
    """
    routing, (rows, width) = router.sizes.routing, x.shape
    few, scores = rows <= FEW_ROWS, len(router.weight)
    # a row alone wants all processors, some rows share what they load
    shape = (1, 1, min(1024, aligned(width))) if few and not interpreted() else (16, 8, 64)
    score_kernel[(triton.cdiv(rows, shape[0]), triton.cdiv(scores, shape[1]))](
        x,
        x if norm is None else norm,
        router.weight,
        router.weight if router.bias is None else router.bias,
        buffers.scores,
        rows,
        width,
        scores,
        epsilon,
        NORM=norm is not None,
        BIAS=router.bias is not None,
        ROWS=shape[0],
        EXPERTS=shape[1],
        BLOCK=shape[2],
        num_warps=4 if few else 8,
        **early(),
    )
    run, experts = TILE * aligned(-(-rows // TILE)), aligned(routing.experts)
    at_once = few and run * experts <= _AT_ONCE
    run = run if at_once else _ROWS
    table = buffers.table.view(-1, 3)[: router.sizes.tiles(rows)]
    for choose, place in ((True, True),) if at_once else ((True, False), (False, True)):
        route_kernel[(triton.cdiv(rows, run),)](
            buffers.scores,
            buffers.chosen,
            buffers.counts,
            buffers.share,
            buffers.slot,
            buffers.source,
            table,
            *(
                buffers.scores if part is None else part
                for part in (router.selection, router.factors)
            ),
            rows,
            routing.experts,
            scores,
            len(table),
            routing.scale,
            USED=routing.used,
            NORMALIZED=routing.normalized,
            SIGMOID=routing.scores == "sigmoid",
            SELECTION=router.selection is not None,
            SCALED=router.factors is not None,
            GROUPS=routing.groups,
            USED_GROUPS=routing.used_groups,
            CHOOSE=choose,
            PLACE=place,
            PADDED=few,
            TILE=TILE if few else MANY_TILE,
            ROWS=run,
            EXPERTS=experts,
            RUNS=aligned(len(buffers.counts) // routing.experts),
            num_warps=4 if run * experts <= 1024 else 8,
            **early(),
        )
    return Tiles(
        table=table,
        source=buffers.source,
        rows=rows,
        experts=routing.experts,
        used=routing.used,
    )


def add_up(
    buffers: ExpertBuffers,
    router: DeviceRouter,
    y: torch.Tensor,
    *,
    shared: torch.Tensor | None = None,
    add: bool,
    then: Next | None,
) -> None:
    """Write the sums of what the experts of rows give into `y` `[M, E]`, or add them to it.

    Args:
        shared: what the shared expert gives, if there is one, `[M, E]`; it may be `y`.
        then: what takes `y` next, as codes.
    """
    rows, width = y.shape
    coded = buffers.inner if then is None else then.rows
    norm = None if then is None else then.norm
    each = 32
    sum_kernel[(rows, triton.cdiv(width // 32, each))](
        buffers.out,
        buffers.slot,
        buffers.share,
        y if shared is None else shared,
        buffers.scores,
        y,
        y if norm is None else norm,
        coded.codes,
        coded.rest,
        coded.scale,
        coded.shift,
        coded.squares,
        width,
        len(router.weight),
        USED=router.sizes.routing.used,
        SHARED=shared is not None,
        SHARE=shared is not None and router.has_share,
        ADD=add,
        CODED=then is not None,
        NORM=norm is not None,
        FINE=then is not None and then.fine,
        GROUPS=each,
        num_warps=4,
        **early(),
    )
