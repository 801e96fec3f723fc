"""Text from files and standard input, strictly UTF-8."""

from __future__ import annotations

import sys
from pathlib import Path

from edgellm.errors import OptionError


def read_text(path: Path) -> str:
    """The content of a file; `-` is standard input.

    Raises:
        OptionError: not readable, or not UTF-8, with the offset of the first wrong byte.
    """
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = "standard input" if str(path) == "-" else str(path)
        raise OptionError(
            f"{where}: not valid UTF-8 at byte {error.start} (0x{data[error.start]:02x}); "
            "convert it to UTF-8 first"
        ) from None
