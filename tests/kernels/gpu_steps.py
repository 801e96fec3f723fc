"""What the tests of the Triton step share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import random_model

from edgellm.kernels.gpu.kv_blocks import DeviceBlocks, DevicePool, DeviceStates
from edgellm.kernels.kv_blocks import (
    BlockTable,
    KVFormat,
)
from edgellm.kernels.state_blocks import StateBlocks
from edgellm.kernels.step import (
    StepSpan,
    gpu_layer,
    gpu_mlp,
)
from edgellm.kernels.step.gpu import DeviceStep


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a layer calls what launches kernels."""
    counts: Counter[str] = Counter()
    for name in ("linear", "append_rotated", "attend", "normalize"):

        def call(*arguments: Any, name: str = name, launch: Any = None, **options: Any) -> None:
            counts[name] += 1
            launch(*arguments, **options)

        for module in (gpu_layer, gpu_mlp):
            launch = getattr(module, name, None)
            if launch is not None:
                monkeypatch.setattr(module, name, partial(call, launch=launch))
    return counts


def poison(blocks: Any) -> None:
    """Fill them with NaN or the largest code."""
    for array in blocks.arrays:
        array.fill(np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max)


def device_step(model: random_model.Model, format: KVFormat, device: str) -> DeviceStep:
    """With blocks that hold NaN or the largest code."""
    return step_on(model, model.views(format), device)[0]


def step_on(
    model: random_model.Model, views: Sequence[random_model.View], device: str
) -> tuple[DeviceStep, list[DevicePool]]:
    """A step on poisoned pools, and those."""
    pools: list[DevicePool] = []
    for view in views:
        poison(view.blocks)
        kind = DeviceStates if isinstance(view.blocks, StateBlocks) else DeviceBlocks
        pools.append(kind.like(view.blocks, device))
        pools[-1].fetch(range(view.blocks.count))
    return DeviceStep(model.weights, model.ropes, pools, device), pools


def span(
    tables: Sequence[BlockTable],
    tokens: Sequence[int],
    start: int,
    end: int,
    *,
    logit_rows: int | None = None,
) -> StepSpan:
    """Those of `tokens` at positions `start .. end`; logits of all of them, or of the last ones."""
    rows = end - start if logit_rows is None else logit_rows
    return StepSpan(tables=tables, tokens=tokens[start:end], start=start, logit_rows=rows)


def tables(model: random_model.Model) -> list[list[int]]:
    return [list(view.table) for view in model.views("f32")]
