"""Attention over latents in Triton, as in C++ without K and V of the heads.

A head's query goes through the matrix that makes its keys, and what it attends to through the one
that makes its values: products of each head's rows with its own part of a weight, as experts have
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from edgellm.kernels.gpu.device import aligned, on_device
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks
from edgellm.kernels.hadamard.gpu import spread
from edgellm.kernels.kv_append.gpu import hadamard_size, rotated, store_row
from edgellm.kernels.kv_blocks import BLOCK, SCALED
from edgellm.kernels.latent.weights import LatentWeights
from edgellm.kernels.linear.gpu import (
    FEW_ROWS,
    MANY_TILE,
    DevicePackedWeights,
    Rows,
    Tiles,
    linear,
)
from edgellm.kernels.linear.gpu_rows import TILE, CodedRows


@dataclass(frozen=True)
class HeadRows:
    """Buffers for products of each head's rows with its own part of a weight.

    Attributes:
        most: largest number of rows of a step.
        rows: buffers for `[most * H, K]`.
        source: of each head's rows, in those of all heads of each token, `[H, most]` int32.
        tables: of `Tiles`, by the number of rows.
    """

    heads: int
    most: int
    rows: Rows
    source: torch.Tensor
    tables: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, *, heads: int, rows: int, inputs: int, device: str) -> HeadRows:
        """Allocate buffers for up to `rows` rows of `inputs` numbers of each head."""
        head, row = (torch.arange(n, dtype=torch.int32, device=device) for n in (heads, rows))
        halves = Rows.empty(rows * heads, inputs, device)
        coded = CodedRows.empty(min(rows, FEW_ROWS) * heads, inputs, device)
        source = (head[:, None] + heads * row).contiguous()
        return cls(heads, rows, Rows(coded, halves.halves, halves.scale), source)

    def tiles(self, rows: int) -> Tiles:
        """Return the tiles of so many rows of each head; a table stays where it was made."""
        if rows not in self.tables:
            each = TILE if rows <= FEW_ROWS else MANY_TILE
            table = [
                (head, head * self.most + first, min(each, rows - first))
                for first in range(0, rows, each)
                for head in range(self.heads)
            ]
            device = self.source.device
            self.tables[rows] = torch.tensor(table, dtype=torch.int32, device=device)
        return Tiles(
            table=self.tables[rows],
            source=self.source,
            rows=rows,
            experts=self.heads,
            used=self.heads,
            back=True,
        )


@dataclass(frozen=True, kw_only=True)
class DeviceLatent:
    """Weights around latents in device memory; see `LatentWeights`.

    Attributes:
        q: projection to the queries.
    """

    q: DevicePackedWeights
    key_up: DevicePackedWeights
    value_up: DevicePackedWeights
    norm: torch.Tensor
    query_norm: torch.Tensor | None
    epsilon: float

    @classmethod
    def of(cls, latent: LatentWeights, q: DevicePackedWeights, device: str) -> DeviceLatent:
        """Copy the weights to the device."""
        down = latent.query_norm
        return cls(
            q=q,
            key_up=DevicePackedWeights.of(latent.key_up, device),
            value_up=DevicePackedWeights.of(latent.value_up, device),
            norm=on_device(latent.norm, device),
            query_norm=None if down is None else on_device(down, device),
            epsilon=latent.epsilon,
        )

    def append(
        self,
        blocks: DeviceBlocks,
        tables: torch.Tensor,
        layer: int,
        rows: torch.Tensor,
        inputs: torch.Tensor,
        given: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        q: torch.Tensor,
        room: HeadRows,
    ) -> None:
        """Write keys and latents of tokens to their blocks, and what meets these to `q`.

        Args:
            tables: block ids of each sequence `[S, blocks]` int64, read on the device like `rows`.
            rows: `[C, 2 or more]` int32: position of each token, and index of its block table.
            inputs: what the projections of keys and latents give, side by side, `[C, D + rank]`.
            given: queries before RoPE, `[C, H * (D + key)]`.
            rope: RoPE table, `[positions, half]` float32 each.
            q: output `[C, H, D + rank]` float32.
        """
        host, count, (cos, sin) = blocks.host, len(inputs), rope
        heads, head_dim = room.heads, host.head_dim
        append_latent_kernel[(count, heads + 2)](
            inputs,
            given,
            self.norm,
            cos,
            sin,
            q,
            blocks.k,
            blocks.v,
            blocks.k_scale,
            blocks.v_scale,
            tables,
            rows,
            inputs.stride(0),
            given.shape[1] // heads,
            tables.stride(0),
            rows.stride(0),
            heads,
            cos.shape[1],
            layer,
            host.layers,
            self.epsilon,
            HEAD_DIM=head_dim,
            RANK=host.latent,
            KEY_WIDTH=aligned(head_dim),
            WIDTH=aligned(host.latent),
            FORMAT=blocks.format,
            HADAMARD=hadamard_size(blocks, SCALED, head_dim),
            BLOCK=BLOCK,
            num_warps=4,
            **early(),
        )
        rest, to = given.view(count * heads, -1)[:, head_dim:], q.view(count * heads, -1)
        linear(rest, self.key_up, to[:, head_dim:], room.rows, tiles=room.tiles(count))

    def values(self, seen: torch.Tensor, out: torch.Tensor, room: HeadRows) -> None:
        """Make values `[C, H * value]` of what heads attend to, `[C, H, rank]`."""
        count = len(seen) * room.heads
        linear(
            seen.view(count, -1),
            self.value_up,
            out.view(count, -1),
            room.rows,
            tiles=room.tiles(len(seen)),
        )


# one compilation for all layers
@triton.jit(do_not_specialize=["layer"])
def append_latent_kernel(
    in_ptr: tl.tensor,
    given_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    place_ptr: tl.tensor,
    stride: tl.tensor,
    given_stride: tl.tensor,
    table_stride: tl.tensor,
    place_stride: tl.tensor,
    heads: tl.tensor,
    half: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    epsilon: tl.tensor,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    HADAMARD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Turn a query of a token, or write its key or latent, which is normalized, to its block.

    The grid counts tokens, then heads, the key and the latent.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    token, head = tl.program_id(0), tl.program_id(1)
    place_ptr += token * place_stride
    position = tl.load(place_ptr)
    table_ptr += tl.load(place_ptr + 1) * table_stride
    place = tl.load(table_ptr + position // BLOCK) * layers + layer
    at = position % BLOCK
    in_ptr += token.to(tl.int64) * stride
    if head <= heads:
        query = token.to(tl.int64) * heads + head
        row_ptr = in_ptr
        if head < heads:
            row_ptr = given_ptr + query * given_stride
        d = tl.arange(0, KEY_WIDTH)
        cos_ptr += position.to(tl.int64) * half
        sin_ptr += position.to(tl.int64) * half
        x = rotated(
            row_ptr,
            row_ptr,
            norm_ptr,
            cos_ptr,
            sin_ptr,
            d,
            d < HEAD_DIM,
            half,
            1.0,
            0,
            False,
            False,
        )
        if HADAMARD > 0:
            x = spread(x, HADAMARD)
        if head < heads:
            tl.store(q_ptr + query * (HEAD_DIM + RANK) + d, x, mask=d < HEAD_DIM)
        else:
            store_row(x, k_ptr, k_scale_ptr, place, at, True, HEAD_DIM, FORMAT, BLOCK)
    else:
        # names of their own: those of the other branch are narrower
        e = tl.arange(0, WIDTH)
        latent = tl.load(in_ptr + HEAD_DIM + e, mask=e < RANK, other=0.0)
        latent *= 1.0 / tl.sqrt(tl.sum(latent * latent, axis=0) / RANK + epsilon)
        latent *= tl.load(norm_ptr + e, mask=e < RANK, other=0.0)
        store_row(latent, v_ptr, v_scale_ptr, place, at, False, RANK, FORMAT, BLOCK)
