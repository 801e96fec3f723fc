"""Launches that begin while the launch before them ends, on GPUs that can do that (Hopper on).

Between two dependent launches a device idles for one to two microseconds, and a decode step has
hundreds of short launches. With "programmatic dependent launch" the programs of the next one start
as soon as all of this one have, do what depends on no other launch, and wait.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from edgellm.kernels.gpu.device import interpreted

# Oldest compute capability with such launches.
OLDEST = (9, 0)


def early() -> dict[str, Any]:
    """Return the options, EARLY among them, of a launch that calls `wait_for_last`."""
    import torch

    if interpreted() or not torch.cuda.is_available():
        return {"EARLY": False}
    if torch.cuda.get_device_capability() < OLDEST:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def allow_next(EARLY: tl.constexpr) -> None:
    """Let the next launch begin; only what no launch writes may be read before `wait_for_last`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr) -> None:
    """Wait until all launches before this one have ended."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(ptr: tl.tensor, EARLY: tl.constexpr) -> None:
    """Ask for the lines of memory at some addresses, which may be read before `wait_for_last`."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [ptr.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
