"""Fixtures of the kernel tests, which also run without the rest of the package (.ci/neon)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from edgellm.kernels.native import ISAS, library


@pytest.fixture(params=ISAS)
def compiled(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """The library with each instruction set in turn; those that are not here are skipped."""
    found = library()
    if found is None:
        pytest.skip("installed without a compiler")
    before = found.edgellm_isa()
    if not found.edgellm_set_isa(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    yield found
    found.edgellm_set_isa(before)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh float arrays hold NaN and integer ones their largest value, so unwritten data shows."""
    empty, empty_like = np.empty, np.empty_like

    def poison(array: np.ndarray) -> np.ndarray:
        array.fill(np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max)
        return array

    monkeypatch.setattr(np, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(np, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
