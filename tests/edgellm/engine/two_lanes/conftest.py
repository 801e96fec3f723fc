"""Fixtures: a bundle for both lanes, and a model in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lane_checks import assert_ended, start
from loops import assert_no_new_thread

from edgellm.kernels.native import library
from edgellm.llm import LLM


@pytest.fixture(scope="session")
def bundle_path(
    export_static: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if library() is None:
        pytest.skip("decode is native: needs a compiler")
    precisions = ("f32", "int4", "packed", "w8a8", "w8a16-qdq")
    return export_static(tmp_path_factory.mktemp("lanes") / "bundle", precisions=precisions)


@pytest.fixture
def tiny(bundle_path: Path) -> Iterator[LLM]:
    llm = start(bundle_path)
    threads = set(threading.enumerate())
    yield llm
    assert_ended(llm)
    assert_no_new_thread(threads)
