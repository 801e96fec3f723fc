"""Every Triton kernel becomes machine code for the GPUs that it is for, without one of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import edgellm.kernels.gpu.device

pytest.importorskip("torch")
pytest.importorskip("triton")

KERNELS = Path(edgellm.kernels.gpu.device.__file__).parent.parent
TARGETS = ("sm_80", "sm_86", "sm_90")


@pytest.mark.slow
def test_every_kernel_compiles_and_spills_nothing(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "edgellm.kernels.gpu.compile_report",
            "--models=SmolLM2-135M",
            "--formats=int8,int4",
            *TARGETS,
        ],
        capture_output=True,
        text=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line.split() for line in found.stdout.splitlines()[1:]]
    written = "".join(path.read_text() for path in KERNELS.glob("*/gpu*.py"))
    kernels = set(re.findall(r"def (\w+_kernel)\(", written))
    assert len(kernels) >= 7
    assert {(line[0], line[2]) for line in lines} == {(k, t) for k in kernels for t in TARGETS}
    assert all(int(line[4]) == 0 for line in lines)
