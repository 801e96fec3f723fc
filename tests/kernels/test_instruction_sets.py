"""Instruction sets that the other tests go through, and those that they leave out here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from instruction_sets import HERE

from edgellm.kernels.native import ISAS


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("isa", ISAS)
def test_each_can_be_forced_where_it_is(isa: str) -> None:
    if isa not in HERE:
        pytest.skip(f"this processor has no {isa}")
    assert _forced(isa).stdout == f"{isa}\n"


@pytest.mark.usefixtures("native_library")
def test_one_that_is_unknown_is_refused() -> None:
    assert f"known are {', '.join(ISAS)}" in _forced("mmx").stderr


def _forced(isa: str) -> subprocess.CompletedProcess[str]:
    code = "from edgellm.kernels.native import isa; print(isa())"
    environment = {**os.environ, "EDGELLM_CPU_ISA": isa}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
