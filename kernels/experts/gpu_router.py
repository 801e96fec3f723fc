"""Choice of experts for rows, and of slots in them for each row, in Triton; see `gpu.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from edgellm.kernels.gpu.early import allow_next, wait_for_last


# one compilation for all numbers of rows
@triton.jit(do_not_specialize=["rows"])
def score_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    router_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    score_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    experts: tl.tensor,
    epsilon: tl.tensor,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute the router's logits of ROWS rows for EXPERTS experts; the grid counts rows first."""
    allow_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)[None, :, None]
    score = tl.zeros([ROWS, EXPERTS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, 1, BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)[None, None, :]
        x = tl.load(x_ptr + row * width + k, mask=(row < rows) & (k < width), other=0.0)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + k, mask=k < width, other=0.0)
        there = (expert < experts) & (k < width)
        score += x * tl.load(router_ptr + expert * width + k, mask=there, other=0.0)
    total = tl.sum(score, axis=2)
    if NORM:
        total *= 1.0 / tl.sqrt(tl.sum(squares, axis=2) / width + epsilon)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)[None, :]
    if BIAS:
        total += tl.load(bias_ptr + expert, mask=expert < experts, other=0.0)
    known = (row < rows) & (expert < experts)
    tl.store(score_ptr + row * experts + expert, total, mask=known)


@triton.jit
def best(rank: tl.tensor, place: tl.tensor, there: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Return which of each row's ranks `[R, X]` are the COUNT best; no rank is NaN.

    Of equal ones the first places are taken. Those at one place are taken together.
    """
    TAKEN: tl.constexpr = -(1 << 62)
    # floats from 0 on are in the order of their bits, and those below in the reverse one
    order = rank.to(tl.int32, bitcast=True)
    order = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.int64)
    order = tl.where(there, order << 16 | 65535 - place, TAKEN)
    for _ in range(COUNT):
        order = tl.where(order == tl.max(order, axis=1)[:, None], TAKEN, order)
    return there & (order == TAKEN)


@triton.jit
def in_best_groups(
    rank: tl.tensor,
    group: tl.tensor,
    there: tl.tensor,
    PAIRS: tl.constexpr,
    GROUPS: tl.constexpr,
    USED_GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return which experts `[R, X]` are in the groups with the best one or, if PAIRS, best two."""
    worth = rank
    for number in range(GROUPS):
        member = there & (group == number)
        each = tl.where(member, rank, float("-inf"))
        first = tl.max(each, axis=1)[:, None]
        value = first
        if PAIRS:
            top = each == first
            second = tl.max(tl.where(top, float("-inf"), each), axis=1)[:, None]
            second = tl.where(tl.sum(top.to(tl.int32), axis=1)[:, None] > 1, first, second)
            value += tl.where(second == float("-inf"), 0.0, second)  # a group of one expert
        worth = tl.where(member, value, worth)
    return best(worth, group, there, USED_GROUPS)


@triton.jit
def best_shares(
    score: tl.tensor,
    there: tl.tensor,
    selection: tl.tensor,
    group: tl.tensor,
    scale: tl.tensor,
    USED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr,
    SELECTION: tl.constexpr,
    GROUPS: tl.constexpr,
    USED_GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return the shares of the USED best experts by logits `[R, X]`, and -1 for the others.

    Of equal ones the first are taken. NaN chooses experts as well, and shows in their shares.

    Args:
        selection, group: bias in the choice, and group, of each expert, `[1, X]`.
    """
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-score))
    else:
        weight = tl.exp(score - tl.max(score, axis=1)[:, None])
        if SELECTION:  # which is added to what the softmax gives
            weight /= tl.sum(weight, axis=1)[:, None]
    rank = weight
    if SELECTION:
        rank += selection
    rank = tl.where(rank == rank, rank, 0.0)
    open = there
    if GROUPS > 1:
        open = in_best_groups(rank, group, there, SIGMOID, GROUPS, USED_GROUPS)
    chosen = best(rank, tl.arange(0, score.shape[1])[None, :], open, USED)
    if SELECTION and NORMALIZED and not SIGMOID:
        # a bias may choose experts whose part of the softmax is 0 as a float32
        weight = tl.exp(score - tl.max(tl.where(chosen, score, float("-inf")), axis=1)[:, None])
    if NORMALIZED or not SIGMOID:
        whole = tl.sum(tl.where(chosen if NORMALIZED else there, weight, 0.0), axis=1)
        scale /= whole[:, None]
    return tl.where(chosen, weight * scale, -1.0)


# one compilation for all numbers of rows
@triton.jit(do_not_specialize=["rows", "tiles"])
def route_kernel(
    score_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    count_ptr: tl.tensor,
    share_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    source_ptr: tl.tensor,
    table_ptr: tl.tensor,
    selection_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    scores: tl.tensor,
    tiles: tl.tensor,
    scale: tl.tensor,
    USED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr,
    SELECTION: tl.constexpr,
    SCALED: tl.constexpr,
    GROUPS: tl.constexpr,
    USED_GROUPS: tl.constexpr,
    CHOOSE: tl.constexpr,
    PLACE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    RUNS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Choose the experts of ROWS rows, or give each of them a slot, or both; the grid counts rows.

    Args:
        scores: number of logits of a row.
        SCALED: whether shares have factors.
        CHOOSE, PLACE: what is done. A single program does both; of several, none can give a slot
            before all have chosen.
        PADDED: whether the slots of an expert begin with a tile.
        TILE: number of slots of a tile.
        RUNS: power of two from the number of programs on.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, EXPERTS)
    each = row * experts + expert[None, :]
    there = (row < rows) & (expert < experts)[None, :]
    if CHOOSE:
        at = row * scores + expert[None, :]
        score = tl.load(score_ptr + at, mask=there, other=float("-inf"))
        selection = tl.zeros([1, EXPERTS], tl.float32)
        if SELECTION:
            selection += tl.load(selection_ptr + expert, mask=expert < experts, other=0.0)[None, :]
        share = best_shares(
            score,
            there,
            selection,
            (expert // (experts // GROUPS))[None, :],
            scale,
            USED,
            NORMALIZED,
            SIGMOID,
            SELECTION,
            GROUPS,
            USED_GROUPS,
        )
    else:
        share = tl.load(chosen_ptr + each, mask=there, other=-1.0)
    chosen = there & (share != -1.0)  # NaN is a share as well
    one = chosen.to(tl.int32)
    total = tl.sum(one, axis=0)
    before = total * 0
    if not PLACE:
        tl.store(chosen_ptr + each, share, mask=there)
        tl.store(count_ptr + tl.program_id(0) * experts + expert, total, mask=expert < experts)
    else:
        if not CHOOSE:
            run = tl.arange(0, RUNS)[:, None]
            known = (run < tl.cdiv(rows, ROWS)) & (expert < experts)[None, :]
            counts = tl.load(count_ptr + run * experts + expert[None, :], mask=known, other=0)
            total = tl.sum(counts, axis=0)
            before = tl.sum(tl.where(run < tl.program_id(0), counts, 0), axis=0)
        held = tl.cdiv(total, TILE)
        begin = tl.cumsum(held, axis=0) - held
        first = begin * TILE if PADDED else tl.cumsum(total, axis=0) - total
        slot = (first + before)[None, :] + tl.cumsum(one, axis=0) - one
        place = row * USED + tl.cumsum(one, axis=1) - one
        tl.store(slot_ptr + place, slot, mask=chosen)
        if SCALED:
            share *= tl.load(factor_ptr + expert, mask=expert < experts, other=0.0)[None, :]
        tl.store(share_ptr + place, share, mask=chosen)
        tl.store(source_ptr + slot, row + 0 * slot, mask=chosen)
        if tl.program_id(0) == 0:
            for tile in range(tl.max(held, axis=0)):
                entry_ptr = table_ptr + (begin + tile) * 3
                left = total - tile * TILE
                tl.store(entry_ptr, expert, mask=left > 0)
                tl.store(entry_ptr + 1, first + tile * TILE, mask=left > 0)
                tl.store(entry_ptr + 2, tl.minimum(left, TILE), mask=left > 0)
            needed = tl.sum(held, axis=0)
            for start in range(needed, tiles, EXPERTS):
                tl.store(table_ptr + (start + expert) * 3 + 2, 0, mask=start + expert < tiles)
