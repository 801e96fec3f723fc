"""Text that comes in and goes out: escapes, control characters, encodings."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from edgellm import Piece, Stats, ToolCallDelta
from edgellm.cli.main import encode_everything
from edgellm.cli.output import report, write
from edgellm.cli.text import json_line, process_escapes
from edgellm.errors import OptionError
from edgellm.kernels.native import library

Cli = Callable[..., subprocess.CompletedProcess[str]]
STATS = Stats(0.0, 1, 0, 0.0, 1, 0.0, 0, {}, "int8", "native", 0)
TITLE = "\x1b]0;pwned\x07\x9b2J"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a\nb\tc\r\"\'\\n", "a\nb\tc\r\"'\\n"),
        (r"\x41\xe9\u65e5\U0001f600", "Aé日😀"),
        (r"C:\日本\home 100\% \q \0", r"C:\日本\home 100\% \q \0"),
        ("\\", "\\"),
    ],
)
def test_escapes(text: str, expected: str) -> None:
    assert process_escapes(text) == expected


@pytest.mark.parametrize("text", [r"C:\users", r"\x4", r"\ud83d\ude00", r"\U00110000"])
def test_escapes_of_no_character(text: str) -> None:
    with pytest.raises(OptionError, match=r"is no character; write \\xHH"):
        process_escapes(text)


def test_messages_do_not_command_the_terminal(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_string(f"{TITLE}\nkey", "x")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = file.read_bytes()
    at = data.index(b"key") + 3
    file.write_bytes(data[:at] + b"\xff" + data[at + 1 :])  # of a type that there is not
    found = cli("run", str(file), "-p", "x")
    assert found.returncode == 1
    assert r"\x1b]0;pwned\x07\x9b2J key" in found.stderr
    assert found.stderr.rstrip("\n").isprintable()


@pytest.mark.slow
def test_bundles_do_not_command_the_terminal(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "home" / "bundles" / "tiny"
    env = {"EDGELLM_HOME": str(tmp_path / "home")}
    precisions = "packed" if library() is not None else "packed,int4,w8a8,f32"
    export = ("export", str(tiny_model), "-o", str(bundle), "--precisions", precisions)
    assert cli(*export, env=env).returncode == 0
    manifest = bundle / "manifest.json"
    values = {**json.loads(manifest.read_text()), "name": TITLE, "source": f"{TITLE}\n{TITLE}"}
    manifest.write_text(json.dumps(values))
    for arguments in (["show", str(bundle)], ["ls"], ["plan", "5", "-m", str(bundle)]):
        found = cli(*arguments, env=env)
        assert found.returncode == 0, found.stderr
        assert r"\x1b]0;pwned\x07\x9b2J" in found.stdout
        assert found.stdout.replace("\n", "").isprintable()


@pytest.mark.skipif(os.name != "posix", reason="paths are text there")
def test_a_path_that_is_no_text(cli: Cli) -> None:
    found = cli("run", os.fsdecode(b"/models/m\xff.gguf"), "-p", "x")
    assert found.returncode == 1
    assert r"/models/m\udcff.gguf: no such file" in found.stderr


def test_json_is_for_any_stream() -> None:
    value = {"x": "\ud83d", "y": "\x9b2J\x7f\x1b", "z": "→😀"}
    line = json_line(value)
    assert json.loads(line) == value
    assert line.isprintable()
    assert "→😀" in line


def test_a_call_with_half_an_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    """Small models write such arguments."""
    arguments = ToolCallDelta(0, arguments=r'{"x": "\ud83d"}')
    pieces = [
        Piece("", 1, 0.0, tool_calls=(ToolCallDelta(0, "call_1", "f"),)),
        Piece("", 2, 0.0, None, "tool_calls", STATS, tool_calls=(arguments,)),
    ]
    answer = write(pieces)
    shown = json.loads(capsys.readouterr().out)
    assert shown["arguments"] == {"x": "\ud83d"}
    report(answer, stats="none", as_json=True)
    assert json.loads(capsys.readouterr().out)["tool_calls"] == [shown]


@pytest.mark.parametrize("terminal", [True, False])
def test_standard_output_takes_any_text(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """Windows and old locales have another encoding."""
    data = io.BytesIO()
    stdout = io.TextIOWrapper(data, encoding="cp1252")
    monkeypatch.setattr(stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", stdout)
    encode_everything()
    print("é→\ud83d", end="", flush=True)
    expected = rb"\u2192\ud83d" if terminal else "→".encode() + rb"\ud83d"
    assert data.getvalue() == "é".encode("cp1252" if terminal else "utf-8") + expected


def test_pipes_have_the_model_s_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    text = f"a{TITLE}\rb\n"
    write([Piece(text, 1, 0.0, None, "stop", STATS)])
    assert capsys.readouterr().out == text
