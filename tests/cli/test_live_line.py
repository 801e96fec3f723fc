"""The last line of a terminal, while an answer is written above it."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios

import pytest

from edgellm.bundle import Bundle
from edgellm.cli.live_line import LiveLine

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
ROWS = 12


def on_terminal(*arguments: str, term: str = "xterm") -> str:
    """What the command writes to a terminal of ROWS rows."""
    main, side = os.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=side,
        stderr=side,
        env={**os.environ, "TERM": term},
    )
    os.close(side)
    found = b""
    while True:
        try:
            data = os.read(main, 65536)
        except OSError:  # Linux says so at the end
            break
        if not data:
            break
        found += data
    os.close(main)
    assert process.wait() == 0
    return found.decode()


def test_speed_is_shown_and_the_row_given_back(smollm2: Bundle) -> None:
    shown = on_terminal(
        "run", str(smollm2.path), "--temp", "0", "-n", "120", "--ignore-eos", "-p", "Count to 100."
    )
    assert f"\x1b[1;{ROWS - 1}r" in shown
    assert f"\x1b[{ROWS};1H\x1b[2K" in shown
    assert "tokens/s" in shown
    assert shown.rindex("\x1b[r") > shown.rindex("tokens/s")
    assert shown.rindex("[ prompt:") > shown.rindex("\x1b[r")


@pytest.mark.parametrize(
    ("options", "term"), [(("--no-stats",), "xterm"), ((), "dumb"), (("--json",), "xterm")]
)
def test_nothing_where_it_is_not_wanted(
    smollm2: Bundle, options: tuple[str, ...], term: str
) -> None:
    arguments = ("run", str(smollm2.path), "--temp", "0", "-n", "40", "-p", "Hello", *options)
    assert "\x1b[" not in on_terminal(*arguments, term=term)


def test_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveLine(enabled=True) as line:
        line.show("12 tokens")
    assert capsys.readouterr() == ("", "")
