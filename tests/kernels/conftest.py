"""Fixtures of the kernel tests, which also run without the rest of the package (.ci/neon)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from instruction_sets import HERE_OR_NONE, UseISA
from profiles import load_profile
from requirements import unavailable

from edgellm.kernels.native import library

load_profile()

_CORES = max(2, os.cpu_count() or 1)


@pytest.fixture
def native_library() -> ctypes.CDLL:
    """The compiled kernels."""
    return library() or unavailable("native", "installed without a compiler")


@pytest.fixture
def use_isa(native_library: ctypes.CDLL) -> Iterator[UseISA]:
    """Gives the library with an instruction set of `instruction_sets.HERE` until the test ends."""
    before = native_library.edgellm_isa()

    def use(isa: str) -> ctypes.CDLL:
        assert native_library.edgellm_set_isa(isa.encode())
        return native_library

    yield use
    native_library.edgellm_set_isa(before)


@pytest.fixture(params=HERE_OR_NONE)
def compiled(request: pytest.FixtureRequest, use_isa: UseISA) -> ctypes.CDLL:
    """The library with each instruction set in turn."""
    return use_isa(request.param)


def _assume_cores(count: int) -> None:
    native = library()
    if native is not None:
        native.edgellm_assume_cores(count)


@pytest.fixture(scope="session", autouse=True)
def some_cores() -> None:
    """Lets the kernels start a second thread, also where a worker has one core."""
    _assume_cores(_CORES)


@pytest.fixture
def eight_cores() -> Iterator[None]:
    """Lets the kernels start up to eight threads, also where there are fewer cores."""
    _assume_cores(8)
    yield
    _assume_cores(_CORES)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh float arrays hold NaN and integer ones their largest value, so unwritten data shows."""
    empty, empty_like = np.empty, np.empty_like

    def poison(array: np.ndarray) -> np.ndarray:
        array.fill(np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max)
        return array

    monkeypatch.setattr(np, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(np, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.fixture
def poisoned_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh float tensors hold NaN, so what was never written shows."""
    torch = pytest.importorskip("torch")
    empty = torch.empty

    def poison(*shape: Any, **options: Any) -> Any:
        tensor = empty(*shape, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poison)
