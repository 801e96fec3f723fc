"""The library as a C program calls it; .ci/cross runs the same program on other systems."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

from record_calls import record
from requirements import unavailable

from edgellm.kernels import native

HERE = Path(__file__).parent


def test_a_c_program_finds_what_the_references_give(tmp_path: Path) -> None:
    """Every function of the library, on every instruction set of this processor."""
    compiler = shutil.which("c++")
    if native.library() is None or compiler is None:
        unavailable("native", "installed without a compiler")
    name = f"edgellm_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    shared, program = Path(native.__file__).parent / name, tmp_path / "c_interface"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{Path(native.__file__).parent}"]
    source = str(HERE / "c_interface.cpp")
    subprocess.run([compiler, *flags, source, str(shared), "-o", str(program)], check=True)
    record(tmp_path / "calls")
    found = subprocess.run([program, tmp_path / "calls"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{native.isa()}: " in found.stdout
