"""A quantized linear layer in Triton, on the same panels as the C++ kernels (`packed.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton

from edgellm.kernels.gpu.device import aligned, interpreted, on_device
from edgellm.kernels.gpu.elementwise import Activation
from edgellm.kernels.linear.gpu_gemm import gemm_kernel, rows_kernel
from edgellm.kernels.linear.gpu_gemv import gemv_kernel
from edgellm.kernels.linear.gpu_packed import embed_kernel
from edgellm.kernels.linear.packed import PANEL, PackedWeights
from edgellm.kernels.quantized import GROUP, Kind

# The interpreter takes as long for a small tile as for a large one.
_INTERPRETED_PANELS = 128


@dataclass(frozen=True)
class DevicePackedWeights:
    """PackedWeights in device memory.

    Attributes:
        data: bytes as in `PackedWeights`.
        table: values of the codes, `[16]` float32; kinds without a table have `data` here, because
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
            table = torch.tensor(first.kind.table, dtype=torch.float32, device=device)
        outputs = sum(part.outputs for part in parts)
        return cls(data, table, outputs, first.inputs, first.kind)


def stackable(upper: PackedWeights, lower: PackedWeights) -> bool:
    """Whether the panels of two weights can lie one behind the other as those of one weight."""
    same = (upper.kind, upper.inputs) == (lower.kind, lower.inputs)
    return same and upper.outputs % PANEL == 0


@dataclass(frozen=True)
class Peaks:
    """Maximum of each panel's outputs y, and sum of exp(y - largest); both `[panels]`."""

    largest: torch.Tensor
    share: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Buffers for rows as halves `[M, K]`, and for their scales `[M]`."""

    halves: torch.Tensor
    scale: torch.Tensor


def panels_per_program(panels: int) -> int:
    """Return the panels per program: one on a device, whose memory needs hundreds of programs."""
    return min(_INTERPRETED_PANELS, triton.next_power_of_2(panels)) if interpreted() else 1


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
    peaks: Peaks | None = None,
) -> None:
    """Compute y = activation(f(x) W^T + bias) for float32 rows `x` `[M, K]` and `y` `[M, N]`.

    f is the norm, if any. `y` may be some columns of a wider array.

    Args:
        rows: buffers for `x` as halves, used where M is more than 1.
        norm: weights `[K]` of an RMSNorm f of each row before the product.
        bias, up_bias: `[N]` float32, if any.
        up: second weight of a gated MLP: the activation is multiplied by f(x) up^T + up_bias.
        softcap: soft cap, if any: outputs `y` become `softcap * tanh(y / softcap)`.
        add: whether to add the result to `y`.
        peaks: maxima of the outputs, filled only for M = 1.

    Raises:
        ValueError: the rows have another width, or the second weight has another shape.
    """
    second = weight if up is None else up
    if x.shape[1] != weight.inputs:
        raise ValueError(f"rows have {x.shape[1]} numbers; the weight has {weight.inputs} inputs")
    if (second.outputs, second.inputs) != (weight.outputs, weight.inputs):
        raise ValueError(f"the second weight is {second.outputs} x {second.inputs}, another shape")
    panels = -(-weight.outputs // PANEL)
    kinds = (weight.kind,) if up is None else (weight.kind, up.kind)
    if x.shape[0] == 1:
        each = panels_per_program(panels)
        most = min(_groups(kind) for kind in kinds) // len(kinds)
        gemv_kernel[(triton.cdiv(panels, each),)](
            x,
            x if norm is None else norm,
            weight.data,
            weight.table,
            second.data,
            second.table,
            y if bias is None else bias,
            y if up_bias is None else up_bias,
            y,
            y if peaks is None else peaks.largest,
            y if peaks is None else peaks.share,
            weight.inputs,
            weight.outputs,
            epsilon,
            0.0 if softcap is None else softcap,
            NORM=norm is not None,
            BIAS=bias is not None,
            ACTIVATION=activation,
            GATED=up is not None,
            UP_BIAS=up_bias is not None,
            CAP=softcap is not None,
            ADD=add,
            PEAKS=peaks is not None,
            KIND=weight.kind,
            UP_KIND=second.kind,
            PANELS=each,
            GROUPS=min(triton.next_power_of_2(weight.inputs // GROUP), most),
            num_warps=4,
        )
        return
    _prepare(x, norm, epsilon, rows)
    tile = 16 if x.shape[0] <= 16 else 64
    wide = 8 if tile > 16 and up is None else 4
    each = panels_per_program(panels) if interpreted() else min(wide, aligned(panels))
    gemm_kernel[(triton.cdiv(panels, each), triton.cdiv(x.shape[0], tile))](
        rows.halves,
        rows.scale,
        weight.data,
        weight.table,
        second.data,
        second.table,
        y if bias is None else bias,
        y if up_bias is None else up_bias,
        y,
        x.shape[0],
        weight.inputs,
        weight.outputs,
        y.stride(0),
        0.0 if softcap is None else softcap,
        BIAS=bias is not None,
        ACTIVATION=activation,
        GATED=up is not None,
        UP_BIAS=up_bias is not None,
        CAP=softcap is not None,
        ADD=add,
        KIND=weight.kind,
        UP_KIND=second.kind,
        ROWS=tile,
        PANELS=each,
        GROUPS=2,
        num_warps=4,
    )


def _groups(kind: Kind) -> int:
    """Return the groups in one step of a vector product.

    The number leaves registers for four programs per core.
    """
    return 32 if kind.bits == 4 else 16


def embed(
    weight: DevicePackedWeights, tokens: torch.Tensor, x: torch.Tensor, *, scale: float = 1.0
) -> None:
    """Write rows `tokens` `[M]` of a weight, times `scale`, into `x` `[M, K]` float32."""
    block = min(1024, triton.next_power_of_2(weight.inputs))
    embed_kernel[(x.shape[0], triton.cdiv(weight.inputs, block))](
        tokens, weight.data, weight.table, x, weight.inputs, scale, KIND=weight.kind, BLOCK=block
    )


def _prepare(x: torch.Tensor, norm: torch.Tensor | None, epsilon: float, rows: Rows) -> None:
    inputs = x.shape[1]
    rows_kernel[(x.shape[0],)](
        x,
        x if norm is None else norm,
        rows.halves,
        rows.scale,
        inputs,
        epsilon,
        NORM=norm is not None,
        BLOCK=min(4096, triton.next_power_of_2(inputs)),
    )
