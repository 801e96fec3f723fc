"""Norms of rows in Triton, for norms that no linear layer computes on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from edgellm.kernels.gpu.device import on_device
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.step.weights import Floats


@dataclass(frozen=True)
class DeviceNorm:
    """RMS norm with weights `[E]`, or layer norm with weights and a bias `[E]`, on the device."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, weight: Floats, bias: Floats | None, device: str) -> DeviceNorm:
        return cls(on_device(weight, device), None if bias is None else on_device(bias, device))


def norm_of(weight: Floats | None, bias: Floats | None, device: str) -> DeviceNorm | None:
    """Move a norm to the device, if there is one."""
    return None if weight is None else DeviceNorm.of(weight, bias, device)


@triton.jit
def norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    scale: tl.tensor,
    LAYER: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write the RMS norm or layer norm (arXiv:1607.06450) of a row to y, or add it to y.

    The grid counts rows. The variance is summed after the mean is known: with a large
    mean, squares would cancel.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64) * width
    x_ptr += row
    y_ptr += row
    mean = 0.0
    if LAYER:
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, width, BLOCK):
            k = first + tl.arange(0, BLOCK)
            total += tl.load(x_ptr + k, mask=k < width, other=0.0)
        mean = tl.sum(total, axis=0) / width
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + k, mask=k < width, other=mean) - mean
        squares += x * x
    factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + epsilon)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        inside = k < width
        y = (tl.load(x_ptr + k, mask=inside, other=0.0) - mean) * factor
        y *= tl.load(weight_ptr + k, mask=inside, other=0.0)
        if LAYER:
            y += tl.load(bias_ptr + k, mask=inside, other=0.0)
        if ADD:
            y += tl.load(y_ptr + k, mask=inside, other=0.0)
        tl.store(y_ptr + k, y * scale, mask=inside)


def normalize(
    x: torch.Tensor,
    norm: DeviceNorm,
    y: torch.Tensor,
    *,
    epsilon: float,
    add: bool = False,
    scale: float = 1.0,
) -> None:
    """Normalize rows `x` `[M, E]` into `y`, which may be `x`, or add the result to `y`.

    Args:
        scale: factor of what `y` is then.
    """
    rows, width = x.shape
    norm_kernel[(rows,)](
        x,
        norm.weight,
        norm.weight if norm.bias is None else norm.bias,
        y,
        width,
        epsilon,
        scale,
        LAYER=norm.bias is not None,
        ADD=add,
        BLOCK=min(4096, triton.next_power_of_2(width)),
        num_warps=8 if width > 1024 else 4,
        **early(),
    )
