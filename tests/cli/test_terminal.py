"""The terminal that other tests look at: does it do what a user's terminal does?"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("termios", reason="needs a pseudo-terminal")

from terminal import CTRL_C, Terminal, bash


def shown(output: str, *, keeps_wrap: bool = True) -> Terminal:
    """A terminal of 5 rows and 10 columns after a program's output."""
    program = f"import sys; sys.stdout.write({output!r})"
    terminal = Terminal([sys.executable, "-c", program], rows=5, columns=10, keeps_wrap=keeps_wrap)
    with terminal:
        assert terminal.exit_code() == 0
    return terminal


def test_line_feed_goes_to_the_first_column() -> None:
    # the driver makes \r\n of \n; IND stays in its column
    assert shown("ab\ncd\x1bDef").rows == ["ab", "cd", "  ef"]


def test_rows_above_the_region_s_end_scroll_into_history() -> None:
    terminal = shown("\x1b[5;1Hstatus\x1b[1;4r" + "\n".join("abcdefg"))
    assert terminal.vt100.scrolled == ["a", "b", "c"]
    assert terminal.rows == ["d", "e", "f", "g", "status"]
    assert not terminal.is_tidy


def test_cursor_below_the_region_stays_there() -> None:
    terminal = shown("\x1b[1;3r\x1b[5;1Hx\x1b[9By\x1b[1Az\n\n\n")
    assert terminal.rows == ["", "", "", "  z", "xy"]
    assert terminal.vt100.scrolled == []


def test_whole_screen_as_region_moves_the_cursor_home() -> None:
    terminal = shown("ab\ncd\x1b[1;3r\x1b[3;3H\x1b[rX")
    assert terminal.rows == ["Xb", "cd"]
    assert terminal.is_tidy


@pytest.mark.parametrize(
    ("keeps_wrap", "rows"), [(True, ["0123456789", "ab"]), (False, ["012345678a", "b"])]
)
def test_cursor_restored_in_the_last_column(keeps_wrap: bool, rows: list[str]) -> None:
    terminal = shown("0123456789\x1b7\x1b[5;1H\x1b8ab", keeps_wrap=keeps_wrap)
    assert terminal.rows == rows


def test_wide_character_does_not_stand_over_the_edge() -> None:
    assert shown("123456789語x").rows == ["123456789", "語x"]


def test_cursor_is_saved_once_and_restored_often() -> None:
    assert shown("a\x1b7b\x1b8c\n\x1b8d").rows == ["ad"]


def test_cursor_report() -> None:
    program = (
        "import os, sys, tty; tty.setraw(0); os.write(1, b'ab\\x1b[6n');"
        "report = os.read(0, 20); os.write(1, repr(report).encode())"
    )
    with Terminal([sys.executable, "-c", program], columns=40) as terminal:
        assert terminal.exit_code() == 0
        assert terminal.rows == ["abb'\\x1b[1;3R'"]
        assert not terminal.echoes


def test_smaller_and_larger_window(tmp_path: Path) -> None:
    with bash(tmp_path, rows=6, columns=20) as terminal:
        terminal.enter("seq 4")
        terminal.wait_for_prompt("$ ")
        terminal.resize(rows=4, columns=10)
        terminal.enter("stty size")
        terminal.wait_for_prompt("$ ")
        assert terminal.all_rows == ["$ seq 4", "1", "2", "3", "4", "$ stty siz", "e", "4 10", "$"]


def test_keys_and_signals_reach_the_foreground(tmp_path: Path) -> None:
    with bash(tmp_path) as terminal:
        for number, stop in [
            (signal.SIGINT, lambda: terminal.send(CTRL_C)),
            (signal.SIGTERM, lambda: terminal.send_signal(signal.SIGTERM)),
        ]:
            # one process, so that no signal comes between two
            terminal.enter("sh -c 'echo begun; exec sleep 100'")
            terminal.wait_for("\nbegun\n")
            stop()
            terminal.wait_for_prompt("$ ")
            terminal.enter("echo code $?")
            terminal.wait_for(f"\ncode {128 + number}\n")
            terminal.enter("clear")
            terminal.wait_for(lambda: terminal.rows == ["$"])
        terminal.enter("exit 7")
        assert terminal.exit_code() == 7


_REDRAWS = r"""
import sys, termios, tty
tty.setraw(0)
sys.stdout.write("> ")
sys.stdout.flush()
assert sys.stdin.read(2) == "hi"
sys.stdout.write("hi\r\n\n\n\x1b[6n")  # three rows down, where the cursor's place is asked for
sys.stdout.flush()
while sys.stdin.read(1) != "R":
    pass
if sys.stdin.read(1) == "\r":
    sys.stdout.write("\x1b[2A\r> ")
    sys.stdout.flush()
    sys.stdin.read(1)
"""


def test_prompt_comes_above_where_a_redraw_had_moved_the_cursor() -> None:
    with Terminal([sys.executable, "-c", _REDRAWS]) as terminal:
        terminal.wait_for_prompt("> ")
        terminal.enter("hi")
        terminal.wait_for_prompt("> ")
        assert terminal.rows == ["> hi", ">"]
        terminal.send("x")
        assert terminal.exit_code() == 0


def test_what_does_not_come_is_shown(tmp_path: Path) -> None:
    with bash(tmp_path) as terminal, pytest.raises(TimeoutError, match=r"(?s)abc.*\$"):
        terminal.wait_for("abc", timeout=0.1)
