"""An installation out of a clone, and imports from the clone's folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import warnings
from pathlib import Path

import pytest
from requirements import unavailable

from edgellm.kernels.native import warn_in_source_tree

ROOT = Path(__file__).parent.parent
EXTENSION = f"edgellm_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"


def test_an_installation_builds_the_kernels_into_the_clone(tmp_path: Path) -> None:
    """With setup.py as it is, and a C file in the place of the kernels."""
    pytest.importorskip("setuptools")
    if sys.platform == "win32" or not any(map(shutil.which, ("cc", "gcc", "clang"))):
        unavailable("native", "no compiler")
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "file.c").write_text("int edgellm;\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "edgellm"\nversion = "1"\n'
        '[tool.setuptools]\npackages = ["edgellm.kernels"]\n'
        '[tool.setuptools.package-dir]\n"edgellm.kernels" = "kernels"\n'
        '[[tool.setuptools.ext-modules]]\nname = "edgellm.kernels.edgellm_cpu"\n'
        'sources = ["kernels/file.c"]\n'
    )
    command = [sys.executable, "setup.py", "build_ext"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kernels" / EXTENSION).exists()
    assert len([*(tmp_path / "build").rglob(EXTENSION)]) == 1  # what is installed


def test_the_extension_lies_where_it_is_looked_for() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        setuptools = tomllib.load(file)["tool"]["setuptools"]
    assert [e["name"] for e in setuptools["ext-modules"]] == ["edgellm.kernels.edgellm_cpu"]
    assert setuptools["package-dir"]["edgellm.kernels"] == "kernels"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("installed", None),
        ("built", None),
        ("missing", "where its kernels are not compiled"),
        ("old", "where its kernels are older than their sources"),
    ],
)
def test_imports_from_a_clone(tmp_path: Path, state: str, words: str | None) -> None:
    kernels = tmp_path / "kernels"
    (kernels / "cpu").mkdir(parents=True)
    (kernels / "cpu" / "file.h").touch()
    if state != "installed":
        (tmp_path / "pyproject.toml").touch()
    if state in ("built", "old"):
        (kernels / EXTENSION).touch()
        os.utime(kernels / EXTENSION, (1, 1) if state == "old" else None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_in_source_tree(kernels / EXTENSION)
    assert len(seen) == (words is not None)
    assert all(words in str(warning.message) for warning in seen if words)
