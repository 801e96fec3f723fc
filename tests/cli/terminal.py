"""A real pseudo-terminal, and programs on it with a user who types and reads the screen."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import pyte
from vt100 import Vt100
from waiting import until

CTRL_C = "\x03"
CTRL_D = "\x04"
CTRL_Z = "\x1a"
# Below pytest's own ceiling, so that the screen is shown.
_CEILING_S = 240.0
# Makes the terminal on stdin the controlling one, so that Ctrl-C becomes a signal, then turns into
# the program. Popen's preexec_fn could do it, but must not be used in a process with threads.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios;"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Screen:
    """Rows of text on a pseudo-terminal.

    Attributes:
        side: the programs' end, a file descriptor; -1 once it is closed.

    Args:
        keeps_wrap, reflows: see Vt100.

    Raises:
        TimeoutError: what was waited for did not come; the message shows the screen.
    """

    def __init__(
        self,
        *,
        rows: int = 24,
        columns: int = 80,
        keeps_wrap: bool = True,
        reflows: bool = False,
    ) -> None:
        self.raw = b""
        self._answers = b""
        self.vt100 = Vt100(columns, rows, self._answer, keeps_wrap=keeps_wrap, reflows=reflows)
        self._stream = pyte.ByteStream(self.vt100)
        self._synced = 0
        self._main, self.side = os.openpty()
        os.set_blocking(self._main, False)
        self._set_size(rows, columns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rows(self) -> list[str]:
        """What stands on the screen, without spaces at the ends and empty rows below."""
        rows = [row.rstrip() for row in self.vt100.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def all_rows(self) -> list[str]:
        """Those that have scrolled off, and then those on the screen."""
        return [*self.vt100.scrolled, *self.rows]

    @property
    def text(self) -> str:
        """All rows, each with a line end."""
        return "".join(f"{row}\n" for row in self.all_rows)

    @property
    def row(self) -> int:
        """The cursor's row, counted from the first row that ever was, from 0."""
        return len(self.vt100.scrolled) + self.vt100.cursor.y

    @property
    def is_tidy(self) -> bool:
        """All rows scroll, the cursor is to be seen, and lines wrap."""
        modes = self.vt100.mode
        return (
            self.vt100.margins is None
            and not self.vt100.cursor.hidden
            and {pyte.modes.DECTCEM, pyte.modes.DECAWM} <= modes
        )

    def sync(self) -> None:
        """Read all that was written to `side` so far."""
        self._synced += 1
        os.write(self.side, f"\x1b]2;{self._synced}\x07".encode())  # a title
        self.wait_for(lambda: self.vt100.title == str(self._synced))

    def resize(self, *, rows: int, columns: int) -> None:
        """Change the size, once all that was written for the old one has been read."""
        while self._read(0):
            pass
        self._set_size(rows, columns)
        self.vt100.resize(rows, columns)

    def wait_for(self, what: str | Callable[[], bool], *, timeout: float = _CEILING_S) -> None:
        """Read on until a text stands on the screen, or has, or until a condition holds."""
        arrived = (lambda: what in self.text) if isinstance(what, str) else what
        end = time.monotonic() + timeout
        while not arrived():
            if not self._read(end - time.monotonic()) and not arrived():
                raise TimeoutError(f"{what!r} did not come; the screen:\n{self}")

    def close(self) -> None:
        """Close both ends."""
        for end in (self._main, self.side):
            if end >= 0:
                os.close(end)
        self._main = self.side = -1

    def __str__(self) -> str:
        edge = "+" + "-" * self.vt100.columns + "+"
        at = f"cursor in row {self.vt100.cursor.y}, column {self.vt100.cursor.x}"
        return "\n".join([*self.vt100.scrolled, edge, *self.rows, edge, at])

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _write(self, data: bytes) -> None:
        while data:
            _, writable, _ = select.select([], [self._main], [], 0.05)
            if writable:
                data = data[os.write(self._main, data[:1024]) :]
            self._read(0)  # a program that waits to be read does not read

    def _read(self, timeout: float) -> bool:
        """Take what the program has written; False at its end or when nothing came in time."""
        readable, _, _ = select.select([self._main], [], [], max(0.0, timeout))
        if not readable:
            return False
        try:
            data = os.read(self._main, 65536)
        except OSError:  # Linux says so when the last program has closed the terminal
            return False
        self.raw += data
        self._stream.feed(data)
        answers, self._answers = self._answers, b""
        self._write(answers)
        return bool(data)

    def _answer(self, text: str) -> None:
        self._answers += text.encode()


class Terminal(Screen):
    """A program with a screen, a keyboard and a line discipline.

    Args:
        command: the program and its arguments.
        env: its whole environment; by default this process's. TERM is xterm unless it says so.
        folder: where it starts.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        rows: int = 24,
        columns: int = 80,
        keeps_wrap: bool = True,
    ) -> None:
        super().__init__(rows=rows, columns=columns, keeps_wrap=keeps_wrap)
        self.folder = folder or Path.cwd()
        self._typed_in_row = -1
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, *command],
            stdin=self.side,
            stdout=self.side,
            stderr=self.side,
            start_new_session=True,
            cwd=folder,
            env={"TERM": "xterm", **(os.environ if env is None else env)},
        )
        os.close(self.side)
        self.side = -1

    @property
    def echoes(self) -> bool:
        """Lines are put together and echoed by the terminal, as a shell's child expects it."""
        flags = termios.tcgetattr(self._main)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON and flags & termios.ISIG)

    def send(self, keys: str) -> None:
        """Press keys; Enter is \\r."""
        # a program that redraws moves the cursor over empty rows below; they hold nothing typed
        self._typed_in_row = min(self.row, len(self.all_rows) - 1)
        self._write(keys.encode())

    def paste(self, text: str) -> None:
        """Paste, as terminals do it for a program that has asked for bracketed paste."""
        self.send(f"\x1b[200~{text}\x1b[201~")

    def enter(self, line: str) -> None:
        """Type a line, see it on the screen, and press Enter."""
        self.send(line)
        rest = line[-(self.vt100.columns - 10) :]
        self.wait_for(lambda: rest in "".join(self.vt100.display))
        self.send("\r")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes in the foreground."""
        foreground = os.tcgetpgrp(self._main)
        if foreground > 0:  # 0 when nobody is left; to killpg that is this very process's group
            os.killpg(foreground, number)

    def wait_for_prompt(self, prompt: str, *, timeout: float = _CEILING_S) -> None:
        """Read on until a new empty prompt begins a row below what was typed."""

        def is_asked() -> bool:
            vt100 = self.vt100
            below = self.row > self._typed_in_row
            return (
                below
                and vt100.cursor.x == len(prompt)
                and (vt100.display[vt100.cursor.y].rstrip() == prompt.rstrip())
            )

        self.wait_for(is_asked, timeout=timeout)

    def wait_for_raw_keys(self) -> None:
        """Wait until the program echoes keys itself; before that the terminal does, too."""
        until(lambda: not self.echoes)

    def exit_code(self, *, timeout: float = _CEILING_S) -> int:
        """Read to the end; the exit code as a shell gives it, 128 and more for a signal."""
        end = time.monotonic() + timeout
        while self._read(end - time.monotonic()):
            pass
        try:
            code = self._process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the program did not end; the screen:\n{self}") from None
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        """Kill what still runs."""
        if self._main < 0:
            return
        with suppress(OSError):
            self.send_signal(signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        super().close()


def bash(
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    rows: int = 24,
    columns: int = 80,
    keeps_wrap: bool = True,
) -> Terminal:
    """A shell at its prompt `$ `, in which `edgellm` is the command that is tested."""
    command = folder / "bin" / "edgellm"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m edgellm.cli.main "$@"\n')
    command.chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if k not in ("LINES", "COLUMNS", "NO_COLOR")}
    terminal = Terminal(
        ["bash", "--norc", "--noprofile"],
        folder=folder,
        env={
            **inherited,
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PS1": "$ ",
            "HISTFILE": os.devnull,
            "INPUTRC": os.devnull,
            "LC_ALL": "C.UTF-8",
            **(env or {}),
        },
        rows=rows,
        columns=columns,
        keeps_wrap=keeps_wrap,
    )
    terminal.wait_for_prompt("$ ")
    return terminal
