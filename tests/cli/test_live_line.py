"""The last line of a terminal, while an answer is written above it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

if os.name != "posix":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

from terminal import Terminal

from edgellm.cli.live_line import LiveLine
from edgellm.store.bundle import Bundle

# Lines that end at, before and behind the last column of windows of 10 and 13 columns.
TEXT = "".join(f"{'abcdefghij' * 3}"[:length] + f"{length}\n" for length in range(6, 28))
WIDE = "".join("x" * length + "日本語🙂é\ty\n" for length in range(8))
# Shows the line after every piece, of 1, 2, 3, ... characters.
PROGRAM = """
import sys
from edgellm.cli import live_line
live_line._INTERVAL_S = 0
text, enabled = sys.argv[1], sys.argv[2] == "live"
sys.stdout.write("above\\n" * int(sys.argv[3]))
with live_line.LiveLine(enabled=enabled) as line:
    at, length = 0, 1
    while at < len(text):
        piece = text[at : at + length]
        sys.stdout.write(piece)
        sys.stdout.flush()
        line.wrote(piece)
        line.show(f"{at} so far")
        at, length = at + length, length % 7 + 1
print("end")
"""


def shown(
    text: str, how: str, above: int, *, rows: int, columns: int, keeps_wrap: bool
) -> Terminal:
    command = [sys.executable, "-c", PROGRAM, text, how, str(above)]
    with Terminal(command, rows=rows, columns=columns, keeps_wrap=keeps_wrap) as terminal:
        assert terminal.exit_code() == 0
    return terminal


@pytest.mark.parametrize("text", [TEXT, WIDE, "short", ""], ids=["TEXT", "WIDE", "short", "empty"])
@pytest.mark.parametrize(
    ("above", "rows", "columns"), [(0, 4, 10), (3, 4, 10), (9, 3, 13), (40, 30, 13), (0, 2, 10)]
)
@pytest.mark.parametrize("keeps_wrap", [True, False])
def test_text_is_as_it_is_without(
    text: str, above: int, rows: int, columns: int, keeps_wrap: bool
) -> None:
    size = {"rows": rows, "columns": columns, "keeps_wrap": keeps_wrap}
    live = shown(text, "live", above, **size)
    assert live.is_tidy
    plain = shown(text, "plain", above, **size)
    # to make room for the line, one more row may have scrolled off
    assert [row for row in live.all_rows if row] == [row for row in plain.all_rows if row]
    assert (b" so " in live.raw) == (rows >= 3 and text != "")


@pytest.mark.parametrize(
    ("options", "term"), [(("--no-stats",), "xterm"), ((), "dumb"), (("--json",), "xterm")]
)
def test_nothing_where_it_is_not_wanted(
    smollm2: Bundle, options: tuple[str, ...], term: str
) -> None:
    arguments = ("run", str(smollm2.path), "--temp", "0", "-n", "40", "-p", "Hello", *options)
    command = [sys.executable, "-m", "edgellm.cli.main", *arguments]
    with Terminal(command, env={**os.environ, "TERM": term}) as terminal:
        assert terminal.exit_code() == 0
        assert b"\x1b[" not in terminal.raw


def test_nothing_where_errors_go_elsewhere() -> None:
    command = [sys.executable, "-c", PROGRAM, TEXT, "live", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == (f"{TEXT}end\n", "")


def test_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveLine(enabled=True) as line:
        line.show("12 tokens")
    assert capsys.readouterr() == ("", "")
