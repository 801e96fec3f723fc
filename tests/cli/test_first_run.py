"""A line on stderr where the kernels are not built."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.cli.options import say_if_kernels_are_missing


@pytest.mark.parametrize("writable", [True, False])
def test_missing_kernels_are_said_once(
    edgellm_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    writable: bool,
) -> None:
    monkeypatch.setattr("edgellm.devices.native_isa", lambda: None)
    if not writable:
        edgellm_home.touch()  # no folder
    for _ in range(3):
        say_if_kernels_are_missing()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("edgellm: the C++ kernels are not built, so decode") == (1 if writable else 3)
    monkeypatch.setattr("sys.prefix", "/another/environment")
    say_if_kernels_are_missing()
    assert "the C++ kernels are not built" in capsys.readouterr().err


def test_kernels_that_are_there_are_not_said(
    edgellm_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgellm.devices.native_isa", lambda: "scalar")
    say_if_kernels_are_missing()
    assert capsys.readouterr() == ("", "")
    assert not edgellm_home.exists()
