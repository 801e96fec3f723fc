"""Embeddings whose rows rest between two layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from inspection import step_in_readers
from layered_checks import PROMPTS, STREAM, Groups, start_layered
from loop_checks import assert_idle

from edgellm.engine.embedding import Pooling, embeddings
from edgellm.engine.loop import iterate
from edgellm.kernels.native import library
from edgellm.llm import LLM, load

pytestmark = pytest.mark.skipif(library() is None, reason="needs the native kernels")

LONG = PROMPTS[1]


@pytest.fixture
def layered(deep_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """No stream runs ahead, so that it decodes as long as a prompt beside it is computed."""
    folder = str(load(str(deep_model)).engine.bundle.path)
    llm = start_layered(folder, ctx_size=1024, prefill="native", decode="native")
    step_in_readers(llm, monkeypatch)
    yield llm
    assert_idle(llm)


def embedding(llm: LLM, pooling: Pooling) -> np.ndarray:
    (vector,) = iterate(llm.engine.loop, embeddings(llm.engine, [LONG], pooling=pooling))
    return vector


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_they_are_the_same_in_company(
    layered: LLM, pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states behind the last layer are pooled, and nothing that rests before it."""
    groups = Groups(layered, monkeypatch)
    stream = layered.stream(PROMPTS[3], **STREAM)
    next(stream)
    together = embedding(layered, pooling)
    stream.close()
    assert len(groups.layers) > 1  # and it did rest
    np.testing.assert_array_equal(together, embedding(layered, pooling))
