"""Python programs that tests run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_python(code: str, *arguments: str, **environment: str) -> str:
    """Run it with the tests' helpers at hand; gives what it printed, and fails with its errors."""
    helpers = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [helpers, os.environ.get("PYTHONPATH")]))
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}"
    return found.stdout
