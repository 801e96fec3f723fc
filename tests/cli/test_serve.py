"""What `edgellm serve` refuses before it loads anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from edgellm.cli.main import edgellm


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "which others can reach"),
        (("--port", "70000"), "--port is 70000"),
        (("--max-n", "0"), "--max-n is 0"),
        (("--api-key", ""), "--api-key is"),
        (("--api-key-file", "nothing"), "--api-key-file nothing"),
        (("--heartbeat-s", "0"), "--heartbeat-s is 0"),
        (("a/x", "b/x"), "under an id of its own"),
        (("x=",), "write ID=NAME"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(edgellm, ["serve", *arguments], standalone_mode=False)
    assert message in result.output
    assert result.return_value == 2  # the exit code


def test_a_file_without_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n  \n")
    result = CliRunner().invoke(
        edgellm, ["serve", "--api-key-file", str(keys)], standalone_mode=False
    )
    assert "there is no key in it" in result.output
