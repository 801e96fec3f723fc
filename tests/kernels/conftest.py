"""Fixtures of the kernel tests, which also run without the rest of the package (.ci/neon)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from edgellm.kernels.native import ISAS, library

UseISA = Callable[[str], ctypes.CDLL]


@pytest.fixture
def use_isa() -> Iterator[UseISA]:
    """Gives the library with an instruction set until the test ends; skips where it is not here."""
    found = library()
    if found is None:
        pytest.skip("installed without a compiler")
    before = found.edgellm_isa()

    def use(isa: str) -> ctypes.CDLL:
        if not found.edgellm_set_isa(isa.encode()):
            pytest.skip(f"this processor has no {isa}")
        return found

    yield use
    found.edgellm_set_isa(before)


@pytest.fixture(params=ISAS)
def compiled(request: pytest.FixtureRequest, use_isa: UseISA) -> ctypes.CDLL:
    """The library with each instruction set in turn."""
    return use_isa(request.param)


@pytest.fixture
def eight_cores() -> Iterator[None]:
    """Lets the kernels start up to eight threads, also where there are fewer cores."""
    found = library()
    if found is not None:
        found.edgellm_assume_cores(8)
    yield
    if found is not None:
        found.edgellm_assume_cores(0)


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
