"""Fixtures: a tiny model in a small cache, and alarms that raise."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from loop_checks import AlarmError
from tiny_models import make, save_tokenizer

from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load


@pytest.fixture(scope="module")
def folder(tiny_model: Path) -> str:
    """Of a tiny model that has been exported."""
    return str(load(str(tiny_model)).engine.bundle.path)


@pytest.fixture
def tiny(folder: str) -> LLM:
    return load(folder, ctx_size=4 * BLOCK, cache_size=16 * BLOCK)


@pytest.fixture
def alarm() -> Iterator[None]:
    """SIGALRM raises AlarmError."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise AlarmError

    previous = signal.signal(signal.SIGALRM, handle)
    gc.disable()  # Python drops what is raised in a callback of its collector, hypothesis has one
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)
    gc.enable()


@pytest.fixture(scope="session")
def windowed_deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, of which all but the last see 100 tokens."""
    folder = tmp_path_factory.mktemp("windowed")
    make("gemma3_text", folder, sliding_window=100, max_position_embeddings=1024, vocab_size=320)
    save_tokenizer(folder)
    return folder
