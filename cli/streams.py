"""Standard streams: closed ones (`<&-`, `>&-`), and the encoding of standard output."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def open_closed_streams() -> None:
    """Open closed standard streams again, so that no other file gets their numbers.

    Standard input is at its end then, and standard error is discarded. Writing to standard output
    is an error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # takes the lowest free number, which is this stream's
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def encode_everything() -> None:
    """Let standard output take any text.

    Files and programs get UTF-8. A terminal gets its own encoding, with escapes for characters that
    it lacks.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding = None if sys.stdout.isatty() else "utf-8"
        sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")


def discard_output() -> None:
    """Discard text still buffered for standard output, whose reader has gone or never was."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
