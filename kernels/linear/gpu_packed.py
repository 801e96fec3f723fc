"""Places of the parts of packed weights in device memory, in Triton; see `packed.py`.

A kernel gets a `Kind` as a constant, and is compiled for its attributes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgellm.kernels.gpu.early import allow_next, wait_for_last


@triton.jit
def code_float(code: tl.tensor) -> tl.tensor:
    """Convert integers from 0 to 2^23 - 1 to floats, by way of the mantissa of 2^23.

    The conversion instruction runs at an eighth of the rate of an addition.
    """
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def looked_up(table: tl.tensor, code: tl.tensor) -> tl.tensor:
    """Look codes up in a table `[16]`.

    The gather works in shared memory. From global memory Triton would load entries in another
    layout than that of the codes, and convert it before and after.
    """
    return tl.reshape(tl.gather(table, tl.ravel(code), 0), code.shape)


@triton.jit
def run_size(groups: tl.tensor, KIND: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Return the size of whole blocks with so many groups, in UNIT bytes."""
    if KIND.blocked:
        size = groups // 8 * ((KIND.block_bytes + 8 * KIND.group_bytes) // UNIT)
    else:
        size = groups * (KIND.group_bytes // UNIT)
    return size


@triton.jit
def group_offset(group: tl.tensor, KIND: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Return the start of groups, in UNIT bytes behind their panel's."""
    start = run_size(group, KIND, UNIT)
    if KIND.blocked:
        start += group % 8 * (KIND.group_bytes // UNIT) + KIND.block_bytes // UNIT
    return start


@triton.jit
def panel_start(
    panel: tl.tensor, groups: tl.tensor, KIND: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """Return the start of panels, in UNIT bytes."""
    return panel.to(tl.int64) * run_size(groups, KIND, UNIT)


@triton.jit
def block_start(
    panel: tl.tensor, group: tl.tensor, groups: tl.tensor, KIND: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """Return the start of the blocks that groups lie in, in UNIT bytes; blocked kinds only."""
    return panel_start(panel, groups, KIND, UNIT) + run_size(group, KIND, UNIT)


@triton.jit
def group_start(
    panel: tl.tensor, group: tl.tensor, groups: tl.tensor, KIND: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """Return the start of groups of panels, in UNIT bytes."""
    return panel_start(panel, groups, KIND, UNIT) + group_offset(group, KIND, UNIT)


@triton.jit
def scales(
    data_ptr: tl.tensor,
    panel: tl.tensor,
    group: tl.tensor,
    groups: tl.tensor,
    lane: tl.tensor,
    part: tl.tensor,
    there: tl.tensor,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Load the scales of output `lane` of panels as floats.

    Args:
        part: half of a group: 0, or 1 for the second 16 inputs of kinds with two scales a group.
        there: mask of the scales to load.
    """
    halves_ptr = data_ptr.to(tl.pointer_type(tl.float16))
    if KIND.blocked:
        byte = group_start(panel, group, groups, KIND, 1) + 64 * KIND.bits + 16 * part + lane
        code = tl.load(data_ptr + byte, mask=there, other=0).to(tl.int32)
        half = block_start(panel, group, groups, KIND, 2) + lane
        scale = tl.load(halves_ptr + half, mask=there, other=0.0).to(tl.float32)
        scale *= code_float(code ^ 128) - 128.0  # signed bytes
    else:
        half = group_start(panel, group, groups, KIND, 2) + 32 * KIND.bits + lane
        scale = tl.load(halves_ptr + half, mask=there, other=0.0).to(tl.float32)
    return scale


@triton.jit
def offsets(
    data_ptr: tl.tensor,
    panel: tl.tensor,
    group: tl.tensor,
    groups: tl.tensor,
    lane: tl.tensor,
    there: tl.tensor,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Load the offsets of output `lane` of panels as floats; affine kinds only."""
    halves_ptr = data_ptr.to(tl.pointer_type(tl.float16))
    if KIND.blocked:
        byte = group_start(panel, group, groups, KIND, 1) + 64 * KIND.bits + 16 + lane
        code = tl.load(data_ptr + byte, mask=there, other=0).to(tl.int32)
        half = block_start(panel, group, groups, KIND, 2) + 16 + lane
        offset = tl.load(halves_ptr + half, mask=there, other=0.0).to(tl.float32)
        offset *= -code_float(code)
    else:
        half = group_start(panel, group, groups, KIND, 2) + 32 * KIND.bits + 16 + lane
        offset = tl.load(halves_ptr + half, mask=there, other=0.0).to(tl.float32)
    return offset


@triton.jit
def embed_kernel(
    tokens_ptr: tl.tensor,
    data_ptr: tl.tensor,
    table_ptr: tl.tensor,
    x_ptr: tl.tensor,
    inputs: tl.tensor,
    scale: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Dequantize rows of a weight, times `scale`; the grid counts tokens, then blocks of inputs."""
    allow_next(EARLY)
    wait_for_last(EARLY)
    token = tl.load(tokens_ptr + tl.program_id(0)).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = k < inputs
    panel, lane, group, groups, quad = token // 16, token % 16, k // 32, inputs // 32, k % 32 // 4
    byte_ptr = data_ptr + group_start(panel, group, groups, KIND, 1) + lane * 4 + k % 4
    if KIND.bits == 8:
        code = tl.load(byte_ptr + quad * 64, mask=there, other=0).to(tl.int32) ^ 128
    else:
        code = tl.load(byte_ptr + quad % 4 * 64, mask=there, other=0).to(tl.int32)
        code = tl.where(quad < 4, code & 15, code >> 4)
    if KIND.bits == 5:
        high = tl.load(byte_ptr + 256, mask=there, other=0).to(tl.int32)
        code |= (high >> quad & 1) << 4
    if KIND.bits == 6:
        high = tl.load(byte_ptr + 256 + quad // 4 * 64, mask=there, other=0).to(tl.int32)
        code |= (high >> quad % 4 * 2 & 3) << 4
    x = (
        code_float(code) - KIND.zero
        if KIND.table is None
        else tl.load(table_ptr + code).to(tl.float32)
    )
    part = quad // 4 if KIND.group == 16 else 0
    x *= scales(data_ptr, panel, group, groups, lane, part, there, KIND)
    if KIND.affine:
        x += offsets(data_ptr, panel, group, groups, lane, there, KIND)
    tl.store(x_ptr + tl.program_id(0).to(tl.int64) * inputs + k, x * scale, mask=there)
