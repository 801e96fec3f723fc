"""Fixtures: a tiny model, and that no test leaves anything behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from asynchronous_checks import assert_no_thread_is_left, live_requests, used_blocks

from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    llm = load(str(tiny_model), ctx_size=8 * BLOCK, cache_size=64 * BLOCK)
    if not llm.engine.decoder.exact_rows:
        pytest.skip("needs the native kernels")
    return llm


@pytest.fixture(autouse=True)
def nothing_is_left(tiny: LLM) -> Iterator[None]:
    """No test leaves a thread, an answer that is on its way, or a block that somebody holds."""
    threads = set(threading.enumerate())
    yield
    assert_no_thread_is_left(threads)
    assert live_requests(tiny) == 0
    assert used_blocks(tiny) == 0
