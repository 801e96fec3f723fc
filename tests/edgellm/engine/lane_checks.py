"""What tests of two lanes share: prompts on the CPU provider, which plays an accelerator, while
native kernels decode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspection import lane, lane_is_empty, watch_steps
from loop_checks import assert_idle
from loops import prompt
from waiting import until

from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import Costs
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

LENGTHS = (5, 9, 300, 30, 411, 17, 128, 260)
PROMPTS = [prompt(i, length) for i, length in enumerate(LENGTHS)]
# On all cores but one, which is the host's.
PLAYED: dict[str, Any] = {"prefill": "cpu", "decode": "native", "schedule": "in-order"}


def start(path: Path, **options: Any) -> LLM:
    """Chunks cost what they cost on a quiet machine, and a job is of one."""
    chosen = {"scheduling": "two_devices", "precision": "f32", "ctx_size": 4 * BLOCK, **options}
    llm = load(str(path), **{**PLAYED, "cache_size": 32 * BLOCK, **chosen})
    assert isinstance(llm.engine.prefill, ChunkedBackend)
    llm.engine.prefill.costs = Costs({32: (1.0,), 128: (3.0,)})
    return llm


def wait_for_lane(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each step find its prompt computed, however slow the provider's thread is."""

    def around(step: Callable[[], None]) -> None:
        until(lambda: not lane(llm).busy)
        step()

    watch_steps(llm, monkeypatch, around)


def assert_ended(llm: LLM) -> None:
    """Nothing is left, once the last job has seen that nobody wants it."""
    until(lambda: not any(t.name == "edgellm-prefill" for t in threading.enumerate()))
    assert_idle(llm)
    assert lane_is_empty(llm)
