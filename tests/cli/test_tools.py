from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm import Piece, Stats, ToolCallDelta
from edgellm.cli.output import report, write
from edgellm.cli.repl import read_conversation, write_conversation
from edgellm.text.prompt import Message

Cli = Callable[..., subprocess.CompletedProcess[str]]
STATS = Stats(0.0, 1, 0, 0.0, 1, 0.0, 0, {}, "int8", "native", 0)
PIECES = [
    Piece("", 1, 0.0, reasoning="Hm."),
    Piece("So.", 2, 0.0),
    Piece("", 3, 0.0, tool_calls=(ToolCallDelta(0, "call_1", "f"),)),
    Piece("", 4, 0.0, None, "tool_calls", STATS, tool_calls=(ToolCallDelta(0, arguments="{}"),)),
]
CALL = {"id": "call_1", "name": "f", "arguments": {}}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_calls_are_lines_and_thoughts_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    answer = write(PIECES)
    assert capsys.readouterr() == (f"So.\n{json.dumps(CALL)}\n", "Hm.\n")
    report(answer, stats="none", as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["reasoning"], shown["tool_calls"]) == ("So.", "Hm.", [CALL])
    write([PIECES[0], PIECES[2], PIECES[3]])
    assert capsys.readouterr().out == f"{json.dumps(CALL)}\n"


def test_thoughts_are_dimmed_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    write(PIECES)
    assert terminal.getvalue() == f"\x1b[2mHm.\x1b[0m\n\nSo.\n{json.dumps(CALL)}\n"


def test_a_call_that_is_cut_off_is_shown_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    cut = Piece("", 4, 0.0, None, "length", STATS, tool_calls=(ToolCallDelta(0, arguments='{"a'),))
    write([PIECES[2], cut])
    assert json.loads(capsys.readouterr().out)["arguments"] == '{"a'


@pytest.mark.slow
def test_a_call_of_the_real_model(cli: Cli, tmp_path: Path) -> None:
    schema = {"properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    file = tmp_path / "tools.json"
    tool = {"name": "weather", "description": "Weather of a city", "parameters": schema}
    file.write_text(json.dumps([{"type": "function", "function": tool}]))
    arguments = ("--tools", str(file), "--temp", "0", "-n", "80", "-p", "Weather in Paris?")
    found = cli("run", *arguments, "--tool-choice", "weather")
    assert found.returncode == 0, found.stderr
    first = json.loads(found.stdout.splitlines()[0])
    assert (first["name"], set(first["arguments"])) == ("weather", {"city"})
    refused = cli("run", *arguments)
    assert refused.returncode == 1
    assert "no place for tools" in refused.stderr
    assert cli("run", *arguments, "--tool-choice", "rain").returncode == 2
    assert "no place for a system prompt, tools" in cli("run", *arguments, "--raw").stderr


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"name": "a b"}]', "\xff"])
def test_wrong_files(cli: Cli, tmp_path: Path, text: str) -> None:
    file = tmp_path / "tools.json"
    file.write_bytes(text.encode("latin-1"))
    found = cli("run", "--tools", str(file), "-p", "Hi")
    assert found.returncode == 2
    assert str(file) in found.stderr
    assert "Traceback" not in found.stderr


def test_reasoning_is_kept_in_a_saved_conversation(tmp_path: Path) -> None:
    messages = [Message("user", "Hi"), Message("assistant", "So.", reasoning="Hm.")]
    write_conversation(str(tmp_path / "chat.json"), messages)
    assert read_conversation(str(tmp_path / "chat.json")) == messages
