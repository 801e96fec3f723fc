"""Fixtures: a tiny model, and that no test leaves anything behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from asynchronous_checks import is_idle
from inspection import set_costs
from loops import assert_no_new_thread

from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    """A step has room for 100 rows, whatever the machine."""
    llm = load(str(tiny_model), ctx_size=8 * BLOCK, cache_size=64 * BLOCK)
    if not llm.engine.decoder.exact_rows:
        pytest.skip("needs the native kernels")
    set_costs(llm, 1e-3)
    return llm


@pytest.fixture(autouse=True)
def nothing_is_left(tiny: LLM) -> Iterator[None]:
    """No test leaves a thread, an answer that is on its way, or a block that somebody holds."""
    threads = set(threading.enumerate())
    yield
    assert_no_new_thread(threads)
    assert is_idle(tiny)
