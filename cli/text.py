"""Text in and out: strict UTF-8 comes in, and no commands to a terminal go out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from edgellm.errors import OptionError

# C0 but tab and line feed, DEL, and C1: among them is every first character of an escape sequence.
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))
# Characters to escape in JSON: a terminal obeys DEL and C1, and UTF-8 has no surrogates.
_TO_ESCAPE = re.compile("[\x7f-\x9f\ud800-\udfff]")
_ESCAPE = re.compile(r"\\([nrt'\"\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[xuU])")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn errors of the system in the block into an OptionError about a file."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None


def read_text(path: Path) -> str:
    """Read a text file; `-` is standard input.

    Raises:
        OptionError: the file is not readable, or not UTF-8 (with the first wrong byte's offset).
    """
    with file_errors(path):
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = "standard input" if str(path) == "-" else str(path)
        raise OptionError(
            f"{where}: not valid UTF-8 at byte {error.start} (0x{data[error.start]:02x}); "
            "convert it to UTF-8 first"
        ) from None


def process_escapes(text: str) -> str:
    r"""Replace \n, \r, \t, \', \", \\, \xHH, \uHHHH and \UHHHHHHHH; other backslashes stay.

    Raises:
        OptionError: \x, \u or \U without its digits, or with digits of no character.
    """

    def character(escape: re.Match[str]) -> str:
        code = escape[1]
        if code in _ESCAPED:
            return _ESCAPED[code]
        number = int(code[1:], 16) if len(code) > 1 else -1
        if not 0 <= number <= sys.maxunicode or 0xD800 <= number < 0xE000:
            raise OptionError(
                f"escape in the prompt: {escape[0]} at {escape.start()} is no character; "
                r"write \xHH, \uHHHH or \UHHHHHHHH, or \\ for a backslash"
            )
        return chr(number)

    return _ESCAPE.sub(character, text)


def spelled_out(text: str) -> str:
    """Spell out the unprintable characters of a line from a file, such as a terminal's escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def say(message: str) -> None:
    """Write a message of the program to stderr, as one line."""
    click.echo(f"edgellm: {spelled_out(' '.join(message.split()))}", err=True)


def without_controls(text: str) -> str:
    """Drop characters that command a terminal from a part of a model's text.

    They are dropped one by one, so an escape sequence that is split over parts is dropped too.
    """
    return text.translate(_CONTROLS)


def json_line(value: object) -> str:
    """Return a value as JSON that any terminal shows and any UTF-8 stream takes."""
    text = json.dumps(value, ensure_ascii=False)
    return _TO_ESCAPE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def parse_size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Parse a number of bytes, or of KiB, MiB or GiB behind which K, M or G stands."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{text!r}: write bytes, or a number with K, M or G, e.g. 4G")
    return int(float(match[1]) * 1024 ** " KMG".index(match[2].upper() or " "))
