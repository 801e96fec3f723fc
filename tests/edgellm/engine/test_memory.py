"""Memory that a process has taken, in any sandbox."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgellm.machine import peak_memory_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("status", ["VmSize:\t  900 kB\nVmRSS:\t  800 kB\n", None])
def test_a_sandbox_whose_proc_says_less(
    monkeypatch: pytest.MonkeyPatch, status: str | None
) -> None:
    """gVisor's has no VmHWM; others have no /proc."""
    peak = peak_memory_bytes()

    def read(path: Path) -> str:
        if status is None:
            raise FileNotFoundError(path)
        return status

    monkeypatch.setattr(Path, "read_text", read)
    assert peak / 2 < peak_memory_bytes()
