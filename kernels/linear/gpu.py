"""A quantized linear layer in Triton, on the same panels as the C++ kernels (`packed.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from edgellm.kernels.gpu.device import aligned, interpreted, on_device
from edgellm.kernels.gpu.early import early
from edgellm.kernels.gpu.elementwise import Activation
from edgellm.kernels.linear.gpu_gemm import gemm_kernel, rows_kernel
from edgellm.kernels.linear.gpu_packed import embed_kernel
from edgellm.kernels.linear.gpu_product import product_kernel
from edgellm.kernels.linear.gpu_rows import TILE, CodedRows, code_rows
from edgellm.kernels.linear.packed import PANEL, PackedWeights
from edgellm.kernels.quantized import GROUP, Kind

# Most rows whose products take int8 codes and read weights once.
FEW_ROWS = 32
# Rows of a program, where there are more.
MANY_TILE = 64
# The interpreter takes as long for a small tile as for a large one.
_INTERPRETED_PANELS = 64


@dataclass(frozen=True)
class DevicePackedWeights:
    """PackedWeights in device memory.

    Attributes:
        data: bytes as in `PackedWeights`.
        table: values of the codes, `[16]` int8; kinds without a table have `data` here, because
            kernels need a pointer.
    """

    data: torch.Tensor
    table: torch.Tensor
    outputs: int
    inputs: int
    kind: Kind

    @classmethod
    def of(cls, panels: PackedWeights, device: str) -> DevicePackedWeights:
        return cls.stacked([panels], device)

    @classmethod
    def stacked(cls, parts: Sequence[PackedWeights], device: str) -> DevicePackedWeights:
        """Join weights that are `stackable` to one weight with the outputs of all."""
        first = parts[0]
        array = first.data if len(parts) == 1 else np.concatenate([part.data for part in parts])
        data = on_device(array, device)
        table = data
        if first.kind.table is not None:
            table = torch.tensor(first.kind.table, dtype=torch.int8, device=device)
        outputs = sum(part.outputs for part in parts)
        return cls(data, table, outputs, first.inputs, first.kind)

    @classmethod
    def runs(cls, parts: Sequence[PackedWeights], device: str) -> list[DevicePackedWeights]:
        """Join neighbours to one weight each, where they are `stackable`."""
        runs = [[parts[0]]]
        for panels in parts[1:]:
            if stackable(runs[-1][-1], panels):
                runs[-1].append(panels)
            else:
                runs.append([panels])
        return [cls.stacked(run, device) for run in runs]


def stackable(upper: PackedWeights, lower: PackedWeights) -> bool:
    """Whether the panels of two weights can lie one behind the other as those of one weight."""
    same = (upper.kind, upper.inputs) == (lower.kind, lower.inputs)
    return same and upper.outputs % PANEL == 0


@dataclass(frozen=True)
class Peaks:
    """Maximum of each panel's outputs y, and sum of exp(y - largest); both `[M, panels]`."""

    largest: torch.Tensor
    share: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Buffers for rows `[M, K]` as products take them.

    Attributes:
        coded: up to `FEW_ROWS` rows as codes.
        halves, scale: more rows as halves `[M, K]`, and their scales `[M]`.
    """

    coded: CodedRows
    halves: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def empty(cls, rows: int, inputs: int, device: str) -> Rows:
        return cls(
            CodedRows.empty(min(rows, FEW_ROWS), inputs, device),
            torch.empty((rows, inputs), dtype=torch.float16, device=device),
            torch.empty(rows, device=device),
        )


@dataclass(frozen=True)
class Next:
    """Next product that takes the outputs of this one.

    Attributes:
        rows: where the outputs are written as codes.
        norm: weights of an RMS norm before it, if any.
        fine: whether codes have 16 bits.
    """

    rows: CodedRows
    norm: torch.Tensor | None = None
    fine: bool = False


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles of slots, each of one expert's, for products with the stacked weights of experts.

    Slots of an expert lie side by side. Those of up to `FEW_ROWS` rows begin with a tile of eight.

    Attributes:
        table: expert, first slot and number of slots of each tile, `[T, 3]` int32; a tile may have
            none.
        source: row of each slot, int32; None: the inputs are slots.
        rows: number of rows of the step.
        experts: number of experts.
        used: number of experts, and slots, of a row.
        back: whether a result goes to the place of the slot's row among the inputs, which are rows
            for each expert then; else results are slots.
    """

    table: torch.Tensor
    source: torch.Tensor | None
    rows: int
    experts: int
    used: int
    back: bool = False


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Everything of a product but its rows; see `linear`."""

    weight: DevicePackedWeights
    y: torch.Tensor
    norm: torch.Tensor | None
    epsilon: float
    bias: torch.Tensor | None
    activation: Activation | None
    up: DevicePackedWeights | None
    up_bias: torch.Tensor | None
    softcap: float | None
    add: bool
    tiles: Tiles | None

    @property
    def second(self) -> DevicePackedWeights:
        return self.weight if self.up is None else self.up

    @property
    def outputs(self) -> int:
        """Number of outputs, of each expert if there are any."""
        return self.weight.outputs // (1 if self.tiles is None else self.tiles.experts)

    @property
    def back(self) -> bool:
        return self.tiles is not None and self.tiles.back

    @property
    def panels(self) -> int:
        return -(-self.outputs // PANEL)

    @property
    def slots(self) -> list[torch.Tensor]:
        """Table and source of `tiles`; kernels need pointers without them, too."""
        if self.tiles is None:
            return [self.y, self.y]
        source = self.tiles.source
        return [self.tiles.table, self.tiles.table if source is None else source]

    @property
    def pointers(self) -> list[torch.Tensor]:
        """Weights, tables, biases and outputs, in the order of the kernels' parameters."""
        weight, second, y = self.weight, self.second, self.y
        biases = (y if bias is None else bias for bias in (self.bias, self.up_bias))
        return [weight.data, weight.table, second.data, second.table, *biases, y]

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "BIAS": self.bias is not None,
            "ACTIVATION": self.activation,
            "GATED": self.up is not None,
            "UP_BIAS": self.up_bias is not None,
            "CAP": self.softcap is not None,
            "ADD": self.add,
            "EXPERTS": self.tiles is not None,
            "SOURCES": self.tiles is not None and self.tiles.source is not None,
            "BACK": self.back,
            "KIND": self.weight.kind,
            "UP_KIND": self.second.kind,
        }


def linear(
    x: torch.Tensor,
    weight: DevicePackedWeights,
    y: torch.Tensor,
    rows: Rows,
    *,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    up: DevicePackedWeights | None = None,
    up_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    add: bool = False,
    fine: bool = False,
    peaks: Peaks | None = None,
    coded: CodedRows | None = None,
    then: Next | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Compute y = activation(f(x) W^T + bias) for float32 rows `x` `[M, K]` and `y` `[M, N]`.

    f is the norm, if any. `y` may be some columns of a wider array. Up to `FEW_ROWS` rows are
    rounded to int8 with a scale for every 32 inputs; a row's outputs do not
    depend on the others where there are as many tiles of eight rows.

    Args:
        rows: buffers for `x`.
        norm: weights `[K]` of an RMSNorm f of each row before the product.
        bias, up_bias: `[N]` float32, if any.
        up: second weight of a gated MLP: the activation is multiplied by f(x) up^T + up_bias.
        softcap: soft cap, if any: outputs `y` become `softcap * tanh(y / softcap)`.
        add: whether to add the result to `y`.
        fine: whether few rows are rounded to 16 bits instead.
        peaks: maxima of the outputs, filled only for few rows.
        coded: few rows, coded already, with the weights of the norm.
        then: what comes next, for few rows; unless they are added, outputs are not in `y` then.
        tiles: slots of experts, if `weight` has those of all: `y` has a row for each slot then, or
            for each of `x`.

    Raises:
        ValueError: the rows have another width, or the second weight has another shape.
    """
    if x.shape[1] != weight.inputs:
        raise ValueError(f"rows have {x.shape[1]} numbers; the weight has {weight.inputs} inputs")
    call = _Call(
        weight=weight,
        y=y,
        norm=norm,
        epsilon=epsilon,
        bias=bias,
        activation=activation,
        up=up,
        up_bias=up_bias,
        softcap=softcap,
        add=add,
        tiles=tiles,
    )
    second = call.second
    if (second.outputs, second.inputs) != (weight.outputs, weight.inputs):
        raise ValueError(f"the second weight is {second.outputs} x {second.inputs}, another shape")
    count = len(x) if tiles is None else tiles.rows
    if count <= FEW_ROWS:
        if coded is None:
            code_rows(x, rows.coded, norm=norm, fine=fine)
        _few(count, coded or rows.coded, call, fine=fine, peaks=peaks, then=then)
    else:
        _prepare(x, norm, epsilon, rows)
        _many(count, rows, call)


def _few(
    count: int,
    rows: CodedRows,
    call: _Call,
    *,
    fine: bool,
    peaks: Peaks | None,
    then: Next | None,
) -> None:
    """Multiply rows that were coded."""
    y, groups = call.y, call.weight.inputs // GROUP
    tiles = 1 if call.tiles is not None else triton.next_power_of_2(-(-count // TILE))
    one = count == 1 and not call.back
    warps, steps = _shape(call, tiles, one=one)
    # codes of 32 outputs have a scale, which are two panels
    panels = 1 if then is None else 2
    if interpreted():
        panels = max(panels, min(_INTERPRETED_PANELS, triton.next_power_of_2(call.panels)))
    after = rows if then is None else then.rows
    norm = None if then is None else then.norm
    sections = 1 if call.tiles is None else len(call.tiles.table)
    product_kernel[(triton.cdiv(call.panels, panels), sections)](
        rows.codes,
        rows.rest,
        rows.scale,
        rows.shift,
        rows.squares,
        *call.pointers,
        y if peaks is None else peaks.largest,
        y if peaks is None else peaks.share,
        y if norm is None else norm,
        after.codes,
        after.rest,
        after.scale,
        after.shift,
        after.squares,
        *call.slots,
        count,
        call.weight.inputs,
        call.outputs,
        y.stride(0),
        call.epsilon,
        0.0 if call.softcap is None else call.softcap,
        **call.constants,
        NORM=call.norm is not None,
        PEAKS=peaks is not None,
        CODED=then is not None,
        NEXT_NORM=norm is not None,
        NEXT_FINE=then is not None and then.fine,
        FINE=fine,
        ONE=one,
        TILES=tiles,
        PANELS=panels,
        WARPS=warps,
        STEPS=steps,
        SPAN=triton.next_power_of_2(groups),
        ASM=not interpreted(),
        num_warps=panels * warps,
        # variants of a row's sums have the same operations, but for the number of tiles
        enable_fp_fusion=False,
        **early(),
    )


def _shape(call: _Call, tiles: int, *, one: bool) -> tuple[int, int]:
    """Return the warps that share a panel, and the groups that a warp takes at a time.

    A row's bits depend on the warps, which therefore do not depend on the rows.
    """
    if interpreted():
        return min(16, triton.next_power_of_2(call.weight.inputs // GROUP)), 1
    # an H100 wants 2,000 warps in flight, and loads of 8 groups for each of them; two weights with
    # offsets or several rows, and int5_k, leave fewer registers for them
    kind = call.weight.kind
    tight = (call.up is not None and (kind.affine or not one)) or (kind.bits == 5 and kind.blocked)
    panels = call.panels * (1 if call.tiles is None else call.tiles.used)
    return 4 if panels > 300 else 8, max(1, (2 if tight else 4) // tiles)


def _many(count: int, rows: Rows, call: _Call) -> None:
    """Multiply rows that are halves."""
    wide = 8 if call.up is None else 4
    panels = call.panels
    if interpreted():
        wide = _INTERPRETED_PANELS
    each = min(wide, aligned(panels))
    sections = triton.cdiv(count, MANY_TILE) if call.tiles is None else len(call.tiles.table)
    gemm_kernel[(triton.cdiv(panels, each), sections)](
        rows.halves,
        rows.scale,
        *call.pointers,
        *call.slots,
        count,
        call.weight.inputs,
        call.outputs,
        call.y.stride(0),
        0.0 if call.softcap is None else call.softcap,
        **call.constants,
        ROWS=MANY_TILE,
        PANELS=each,
        GROUPS=2,
        num_warps=4,
    )


def embed(
    weight: DevicePackedWeights, tokens: torch.Tensor, x: torch.Tensor, *, scale: float = 1.0
) -> None:
    """Write rows `tokens` `[M]` of a weight, times `scale`, into `x` `[M, K]` float32."""
    block = min(1024, triton.next_power_of_2(weight.inputs))
    embed_kernel[(x.shape[0], triton.cdiv(weight.inputs, block))](
        tokens,
        weight.data,
        weight.table,
        x,
        weight.inputs,
        scale,
        KIND=weight.kind,
        BLOCK=block,
        **early(),
    )


def _prepare(x: torch.Tensor, norm: torch.Tensor | None, epsilon: float, rows: Rows) -> None:
    inputs = x.shape[1]
    rows_kernel[(x.shape[0],)](
        x,
        x if norm is None else norm,
        rows.halves,
        rows.scale,
        x.stride(0),
        inputs,
        epsilon,
        NORM=norm is not None,
        BLOCK=min(4096, triton.next_power_of_2(inputs)),
    )
