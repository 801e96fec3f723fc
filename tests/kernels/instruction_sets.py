"""Instruction sets that this processor has, of those that the library is compiled for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

from edgellm.kernels.native import ISAS, library

# Gives the library with an instruction set.
UseISA = Callable[[str], ctypes.CDLL]


def _usable() -> tuple[str, ...]:
    native = library()
    if native is None:
        return ()
    before = native.edgellm_isa()
    usable = tuple(isa for isa in ISAS if native.edgellm_set_isa(isa.encode()))
    native.edgellm_set_isa(before)
    return usable


HERE = _usable()
# A parameter in their place where nothing is compiled, so that a test is skipped with its reason.
HERE_OR_NONE = HERE or ("none",)


def in_turn(cases: Iterable[Any], *, large: Collection[Any] = ()) -> list[Any]:
    """Each case with the best instruction set, some with another one in turn; the rest is slow.

    The code of a step is one template of all of them, whose arithmetic has tests of its own.

    Args:
        large: cases that take seconds of scalar code, and so are slow but for the best one.
    """

    def wanted(number: int, i: int, case: Any) -> bool:
        turn = i % (2 * len(HERE_OR_NONE))
        return number == 0 or (number == turn and case not in large)

    return [
        pytest.param(isa, case, marks=[] if wanted(j, i, case) else pytest.mark.slow)
        for i, case in enumerate(cases)
        for j, isa in enumerate(HERE_OR_NONE)
    ]
