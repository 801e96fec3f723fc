"""A quantized linear layer in Triton, on the same panels as the C++ kernels (`panels.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from edgellm.kernels.int4 import GROUP

from edgellm.kernels.gpu.device import aligned, interpreted, on_device
from edgellm.kernels.linear.gpu_gemm import gemm_kernel, rows_kernel
from edgellm.kernels.linear.gpu_gemv import gemv_kernel
from edgellm.kernels.linear.panels import PANEL, Panels

# The interpreter takes as long for a small tile as for a large one.
_INTERPRETED_PANELS = 128


@dataclass(frozen=True)
class DevicePanels:
    """Panels in device memory, as bytes `[panels, groups, bytes]` and views of them."""

    data: torch.Tensor
    outputs: int
    inputs: int
    bits: int
    affine: bool

    @classmethod
    def of(cls, panels: Panels, device: str) -> DevicePanels:
        bits = 8 if panels.kind == "int8_symmetric" else 4
        data = on_device(panels.data, device)
        return cls(data, panels.outputs, panels.inputs, bits, panels.kind == "int4_affine")

    @property
    def words(self) -> torch.Tensor:
        return self.data.view(torch.int32)

    @property
    def halves(self) -> torch.Tensor:
        return self.data.view(torch.float16)


@triton.jit
def embed_kernel(
    tokens_ptr: tl.tensor,
    bytes_ptr: tl.tensor,
    halves_ptr: tl.tensor,
    x_ptr: tl.tensor,
    inputs: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Rows of an int8 weight; the grid counts tokens, then blocks of inputs."""
    token = tl.load(tokens_ptr + tl.program_id(0)).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    record = (token // 16) * (inputs // 32) + k // 32
    byte = record * 544 + k % 32 // 4 * 64 + token % 16 * 4 + k % 4
    code = tl.load(bytes_ptr + byte, mask=k < inputs, other=0).to(tl.int8, bitcast=True)
    scale = tl.load(halves_ptr + record * 272 + 256 + token % 16, mask=k < inputs, other=0.0)
    x = code.to(tl.float32) * scale.to(tl.float32)
    tl.store(x_ptr + tl.program_id(0).to(tl.int64) * inputs + k, x, mask=k < inputs)


@dataclass(frozen=True)
class Peaks:
    """Of each panel's outputs y: the largest, and the sum of exp(y - largest); `[panels]` both."""

    largest: torch.Tensor
    share: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Room for rows as halves `[M, K]` and their scales `[M]`."""

    halves: torch.Tensor
    scale: torch.Tensor


def panels_a_program(panels: int) -> int:
    """On a device one: it takes hundreds of programs to keep its memory busy."""
    return min(_INTERPRETED_PANELS, triton.next_power_of_2(panels)) if interpreted() else 1


def linear(
    x: torch.Tensor,
    weight: DevicePanels,
    y: torch.Tensor,
    rows: Rows,
    *,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    up: DevicePanels | None = None,
    add: bool = False,
    peaks: Peaks | None = None,
) -> None:
    """y = f(x) W^T for rows `x` `[M, K]` float32 and `y` `[M, N]` float32.

    Args:
        rows: room for `x` as halves, where M is more than 1.
        norm: weights `[K]` of an RMSNorm of each row before the product.
        up: a second weight: y = SiLU(f(x) W^T) * (f(x) up^T).
        add: to what is in `y`.
        peaks: filled for one row.

    Raises:
        ValueError: rows of another width, or a second weight of another shape.
    """
    second = weight if up is None else up
    if x.shape[1] != weight.inputs:
        raise ValueError(f"rows have {x.shape[1]} numbers; the weight has {weight.inputs} inputs")
    if (second.outputs, second.inputs, second.bits) != (weight.outputs, weight.inputs, weight.bits):
        raise ValueError(f"the second weight is {second.outputs} x {second.inputs}, another shape")
    panels = -(-weight.outputs // PANEL)
    groups = weight.inputs // GROUP
    if x.shape[0] == 1:
        each = panels_a_program(panels)
        gemv_kernel[(triton.cdiv(panels, each),)](
            x,
            x if norm is None else norm,
            weight.words,
            weight.halves,
            second.words,
            second.halves,
            y,
            y if peaks is None else peaks.largest,
            y if peaks is None else peaks.share,
            weight.inputs,
            weight.outputs,
            epsilon,
            NORM=norm is not None,
            GATED=up is not None,
            ADD=add,
            PEAKS=peaks is not None,
            BITS=weight.bits,
            AFFINE=weight.affine,
            UP_AFFINE=second.affine,
            PANELS=each,
            GROUPS=min(triton.next_power_of_2(groups), _groups(weight.bits, gated=up is not None)),
            num_warps=4,
        )
        return
    _prepare(x, norm, epsilon, rows)
    tile = 16 if x.shape[0] <= 16 else 64
    wide = 8 if tile > 16 and up is None else 4
    each = panels_a_program(panels) if interpreted() else min(wide, aligned(panels))
    gemm_kernel[(triton.cdiv(panels, each), triton.cdiv(x.shape[0], tile))](
        rows.halves,
        rows.scale,
        weight.data,
        weight.halves,
        second.data,
        second.halves,
        y,
        x.shape[0],
        weight.inputs,
        weight.outputs,
        GATED=up is not None,
        ADD=add,
        BITS=weight.bits,
        AFFINE=weight.affine,
        UP_AFFINE=second.affine,
        ROWS=tile,
        PANELS=each,
        GROUPS=2,
        num_warps=4,
    )


def _groups(bits: int, *, gated: bool) -> int:
    """Groups in one go of a vector product: as many as leave registers for four programs a core."""
    return (32 if bits == 4 else 16) // (2 if gated else 1)


def embed(weight: DevicePanels, tokens: torch.Tensor, x: torch.Tensor) -> None:
    """Rows `tokens` `[M]` of an int8 weight into `x` `[M, K]` float32."""
    block = min(1024, triton.next_power_of_2(weight.inputs))
    embed_kernel[(x.shape[0], triton.cdiv(weight.inputs, block))](
        tokens, weight.data, weight.halves, x, weight.inputs, BLOCK=block
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
