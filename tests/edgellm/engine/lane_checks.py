"""What tests of two lanes share: prompts on the CPU provider, which plays an accelerator, while
native kernels decode."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from loop_checks import GREEDY, assert_idle, prompt, until

from edgellm import Completion
from edgellm.backends.batch import Rows, Span
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import Costs
from edgellm.engine.two_lanes import TwoLaneBatcher
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

LENGTHS = (5, 9, 300, 30, 411, 17, 128, 260)
PROMPTS = [prompt(i, length) for i, length in enumerate(LENGTHS)]
# On all cores but one, which is the host's.
PLAYED: dict[str, Any] = {"prefill": "cpu", "decode": "native", "schedule": "in-order"}
SHORT: dict[str, Any] = {**GREEDY, "max_tokens": 12}


def start(path: Path, **options: Any) -> LLM:
    """Chunks cost what they cost on a quiet machine, and a job is of one."""
    chosen = {"scheduling": "two_devices", "precision": "f32", "ctx_size": 4 * BLOCK, **options}
    llm = load(str(path), **{**PLAYED, "cache_size": 32 * BLOCK, **chosen})
    assert isinstance(llm.engine.prefill, ChunkedBackend)
    llm.engine.prefill.costs = Costs({32: 1.0, 128: 3.0})
    return llm


def assert_ended(llm: LLM) -> None:
    """Nothing is left, once the last job has seen that nobody wants it."""
    batcher = llm.engine.loop._batcher
    assert isinstance(batcher, TwoLaneBatcher)
    until(lambda: not any(t.name == "edgellm-prefill" for t in threading.enumerate()))
    assert_idle(llm)
    assert batcher._lane._job is None


def alone(llm: LLM, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> list[Completion]:
    return [llm.generate(tokens, **{**SHORT, **options}) for tokens in prompts]


def together(llm: LLM, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> list[Completion]:
    """Each in a thread of its own."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(llm.generate, each, **{**SHORT, **options}) for each in prompts]
        return [answer.result(timeout=60) for answer in answers]


def tokens_of(answers: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


class Gate:
    """Holds prompts up in the middle of the provider's chunks.

    Attributes:
        reached: a prompt is there.
        opened: it may go on.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.stopped = False
        backend = llm.engine.prefill
        run = backend.run

        def held(spans: Sequence[Span], *, should_stop: Callable[[], bool]) -> list[Rows]:
            self.reached.set()
            ends = time.monotonic() + 30
            while not self.opened.is_set() and time.monotonic() < ends:
                self.stopped = self.stopped or should_stop()
                time.sleep(0.001)
            return run(spans, should_stop=should_stop)

        monkeypatch.setattr(backend, "run", held)
