"""Printing of an answer: its text on stdout, its statistics on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Literal, TextIO

import click
from prompt_toolkit.utils import get_cwidth

from edgellm import Completion, FinishReason, Piece, Stats, ToolCall
from edgellm.cli.interrupt import around_stop
from edgellm.cli.text import json_line, spelled_out, without_controls
from edgellm.results import completion

# Time between two status lines: short enough to look alive, long enough to cost nothing.
_INTERVAL_S = 0.1
# Lines whose rows belong together, by their beginnings: code and tables, but no nested list.
_WHOLE = re.compile(r"\s*```|\s*\||( {4}|\t)(?!\s*([-*+]|\d))")
# Characters that join others or make them wide; terminals do not agree on the columns they take.
_JOINING = re.compile("[\ufe0f\u200d\U0001f1e6-\U0001f1ff\U0001f3fb-\U0001f3ff]")


class LiveLine:
    """Status line in a terminal's last row, below the answer that scrolls.

    The row is taken out of the scrolling region (DECSTBM of the VT100), and given back at the end.
    Without a terminal on both standard output and standard error, no status line is shown. A word
    that would be cut at the window's edge moves to the next row, but in code and tables.

    Args:
        enabled: whether to show the status line.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._on_terminal = sys.stdout.isatty()
        smart = os.name == "posix" and os.environ.get("TERM", "dumb") != "dumb"
        self._wraps = self._on_terminal and smart and _has_file(sys.stdout)
        self._enabled = enabled and self._wraps and sys.stderr.isatty()
        self._shown_at = 0.0
        # size of the window when the last row was taken; 0 rows: it is not taken
        self._window = os.terminal_size((0, 0))
        self._line = ""  # the answer from its last line end, or the last place of a wrap, on
        self._columns, self._at = 0, 0  # of a window so wide, the column behind it
        self._begin = ""  # the first characters behind its last line end
        self._ticks = 0  # backticks behind its last line end
        self._fenced = False  # whether it is in a block of code
        self._resized = False  # whether rows of the line were wrapped at another width
        self._dim = False
        self._stack = ExitStack()

    def __enter__(self) -> LiveLine:
        if self._wraps:
            self._stack.enter_context(around_stop(self._give_back, self._begin_line))
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        self._stack.close()

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write a part of the answer; a terminal gets no control characters.

        The answer has to begin in column 0.
        """
        if self._on_terminal:
            text = without_controls(text)
        if self._enabled:
            self._follow_window()
        if self._wraps:
            if dim != self._dim:  # thoughts that leave a block of code open are over
                self._dim, self._fenced = dim, False
            text = self._wrapped(text)
        if dim:
            click.echo(click.style(text, dim=True), nl=False)
        else:
            sys.stdout.write(text)  # click would take colours out of what goes to a file
            sys.stdout.flush()
        if self._enabled:
            self._follow_window()

    def show(self, text: str) -> None:
        """Show `text` in the status line, unless it was written less than _INTERVAL_S ago.

        The line stays as it is while the answer's last column is full: some terminals forget, when
        the cursor is restored, that the next character goes to the next line.
        """
        now = time.monotonic()
        if not self._enabled or now - self._shown_at < _INTERVAL_S:
            return
        self._shown_at = now
        window = self._follow_window()
        if window.lines < 3 or self._column(window) >= window.columns:
            return
        if window != self._window:
            # Down and up again, in case that the cursor is in the last row. IND goes down in its
            # column; before a line feed the terminal's driver would put a carriage return.
            self._window = window
            _write(f"\x1b7\x1b[r\x1b8\x1bD\x1b[1A\x1b7\x1b[1;{window.lines - 1}r\x1b8")
        _write(f"\x1b7\x1b[{window.lines};1H\x1b[2K{text[: window.columns - 1]}\x1b8")

    def _follow_window(self) -> os.terminal_size:
        """Erase all behind the answer if the window was resized, and return the window's size.

        Terminals move and wrap all rows then, each in its own way. Behind the cursor there is only
        the status line, or what has become of it.
        """
        window = os.get_terminal_size(sys.stdout.fileno())  # the real one, whatever LINES says
        changed = self._window.lines > 0 and window != self._window
        if changed and self._column(window) < window.columns:
            self._window = os.terminal_size((0, 0))
            _write("\x1b7\x1b[r\x1b8\x1b[J")
        return window

    def _give_back(self) -> None:
        """Clear the status line, and let all rows scroll again."""
        if rows := self._window.lines:
            self._window = os.terminal_size((0, 0))
            _write(f"\x1b7\x1b[r\x1b[{rows};1H\x1b[2K\x1b8")

    def _begin_line(self) -> None:
        """Count columns from 0 again, behind the text of the shell that Ctrl-Z led to."""
        self._line, self._at = "", 0

    def _wrapped(self, text: str) -> str:
        """Return what to write for a text whose words go to the next row where they do not fit."""
        window = os.get_terminal_size(sys.stdout.fileno())
        column, line, shown = self._column(window), self._line, []
        for character in text:
            if character == "\n":
                self._fenced ^= self._begin.lstrip().startswith("```") and self._ticks < 6
                self._begin, line, column = "", "", 0
                self._ticks, self._resized = 0, False
                shown.append(character)
                continue
            self._ticks += character == "`"
            if len(self._begin) < 12:
                self._begin += character
            if 0 < window.columns < column + get_cwidth(character):
                back, word = self._moved(line, character, column)
                if word is not None:
                    shown.append(f"{back}\n{word}")
                    line, column = word, sum(map(get_cwidth, word))
                    continue
            shown.append(character)
            line += character
            column = _next_column(column, character, window.columns)
        self._line, self._at = line, column
        return "".join(shown)

    def _moved(self, line: str, character: str, column: int) -> tuple[str, str | None]:
        """Return what begins the next row instead of `character`, and codes to write before.

        None: the terminal is to wrap the line as it is.
        """
        as_it_is = self._fenced or self._resized or _WHOLE.match(self._begin)
        if as_it_is or get_cwidth(character) != 1 or _JOINING.search(line):
            return "", None
        if character == " ":
            return "", ""
        word = line[max(line.rfind(" "), line.rfind("\t")) + 1 :]
        begin = column - sum(map(get_cwidth, word))
        if begin <= 0:
            return "", None
        return (f"\x1b[{begin + 1}G\x1b[K" if word else ""), word + character

    def _column(self, window: os.terminal_size) -> int:
        """Return the cursor's column; `window.columns` if the next character starts a new row."""
        if window.columns != self._columns:
            self._resized = bool(self._line)
            self._columns, self._at = window.columns, 0
            for character in self._line:
                self._at = _next_column(self._at, character, window.columns)
        return self._at


def _next_column(column: int, character: str, columns: int) -> int:
    """Return the column behind a character; `columns` if the next one starts a new row."""
    if character == "\t":
        return min(columns - 1, column // 8 * 8 + 8)
    width: int = get_cwidth(character)
    return width if column + width > columns else column + width


def _has_file(stream: TextIO) -> bool:
    """Whether a stream has a file of the system behind it, as consoles of editors have not."""
    try:
        return stream.fileno() >= 0
    except OSError:
        return False


def _write(codes: str) -> None:
    os.write(sys.stderr.fileno(), codes.encode())  # at once, also from within a signal handler


# Reasons for the end of an answer that did not reach its own end.
_ENDED: dict[FinishReason, str] = {
    "length": "length (the token limit or the end of the context)",
    "time": "time limit",
    "repetition": "repetition (the same again and again; --repetition-limit 0 lets it go on)",
    "cancelled": "cancelled",
}

# What is said of an answer's statistics: nothing, a short line, or all of them.
ShownStats = Literal["none", "short", "all"]


def shown_stats(option: bool | None) -> ShownStats:
    """Return what `--stats`, `--no-stats` or neither of them (None) asks for."""
    if option is None:
        return "short" if sys.stderr.isatty() else "none"
    return "all" if option else "none"


def write(
    pieces: Iterable[Piece], *, quiet: bool = False, end_line: bool = True, live: bool = False
) -> Completion:
    """Stream the pieces of an answer to stdout, end the line, and return the whole answer.

    Args:
        quiet: whether to print nothing.
        end_line: whether to end the answer's last line.
        live: whether to show the speed in the last row of a terminal meanwhile.
    """
    shown: list[Piece] = []
    try:
        _stream(pieces, shown, quiet=quiet, live=live)
    except BaseException:  # SystemExit too, so that the shell's prompt begins a line
        if not quiet:
            end_shown_line("".join(piece.text for piece in shown))
        raise
    answer = completion(shown)
    calls_alone = answer.tool_calls and not answer.text
    if not quiet and end_line and not answer.text.endswith("\n") and not calls_alone:
        sys.stdout.write("\n")
    if not quiet:
        for call in answer.tool_calls:
            click.echo(json_line(_call_json(call)))
        sys.stdout.flush()
    return answer


def _call_json(call: ToolCall) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, or as text if they are cut off."""
    arguments = json.loads(call.arguments) if call.complete else call.arguments
    return {"id": call.id, "name": call.name, "arguments": arguments}


def _stream(pieces: Iterable[Piece], shown: list[Piece], *, quiet: bool, live: bool) -> None:
    """Write the pieces of an answer, and collect them in `shown`."""
    with LiveLine(enabled=live and not quiet) as line:
        start, thoughts = time.monotonic(), _Thoughts(line)
        for count, piece in enumerate(pieces):
            shown.append(piece)
            if piece.reasoning and not quiet:
                thoughts.show(piece.reasoning)
            if piece.text and not quiet:
                thoughts.end()
                line.write(piece.text)
            seconds = time.monotonic() - start
            if count == 0:
                start = time.monotonic()  # the first token came with the prompt
            elif seconds > 0:
                line.show(f"{count + 1} tokens, {count / seconds:.1f} tokens/s")
        thoughts.end()


class _Thoughts:
    """Reasoning of a model before its answer: dimmed on a terminal, else on standard error."""

    def __init__(self, line: LiveLine) -> None:
        self._line = line
        self._begun = False
        self._dims = sys.stdout.isatty()

    def show(self, text: str) -> None:
        """Write a part of the reasoning."""
        self._begun = True
        if self._dims:
            self._line.write(text, dim=True)
        else:
            shown = without_controls(text) if sys.stderr.isatty() else text
            click.echo(shown, nl=False, err=True)

    def end(self) -> None:
        """End the reasoning, on a terminal with an empty line before the answer."""
        if self._begun and self._dims:
            self._line.write("\n\n")
        elif self._begun:
            click.echo(err=True)
        self._begun = False


def report(
    answer: Completion, *, stats: ShownStats, as_json: bool, notes: Iterable[str] = ()
) -> None:
    """Print answer and statistics as a JSON object on stdout, or statistics alone on stderr.

    Args:
        notes: lines to print before all statistics.
    """
    if as_json:
        values: dict[str, Any] = {"text": answer.text, "finish_reason": answer.finish_reason}
        if answer.reasoning is not None:
            values["reasoning"] = answer.reasoning
        if answer.tool_calls:
            values["tool_calls"] = [_call_json(call) for call in answer.tool_calls]
        click.echo(json_line({**values, **answer.stats.to_json()}))
    elif stats == "short":
        click.echo(short_line(answer), err=True)
    elif stats == "all":
        for note in notes:
            click.echo(f"[ {spelled_out(note)} ]", err=True)
        click.echo(stats_line(answer.stats, answer.finish_reason), err=True)


def end_shown_line(text: str) -> None:
    """Begin a new line on a terminal whose cursor stands behind `text`, by way of stderr."""
    if text and not text.endswith("\n") and sys.stdout.isatty():
        click.echo(err=True)


def short_line(answer: Completion) -> str:
    """Return the count and speed of an answer's tokens, and why it ended before its own end."""
    stats, reason = answer.stats, answer.finish_reason
    speed = f", {stats.generation_tokens_per_second:.0f} t/s" if stats.generation_tokens > 1 else ""
    tokens = "1 token" if stats.generation_tokens == 1 else f"{stats.generation_tokens} tokens"
    ended = f", ended: {_ENDED[reason]}" if reason in _ENDED else ""
    return f"[ {tokens}{speed}{ended} ]"


def stats_line(stats: Stats, reason: FinishReason) -> str:
    """Return one line of timings, with the reason if the answer ended before its own end."""
    where = ", ".join(f"{n} on {name}" for name, n in stats.prefill.items())
    gone = stats.dropped_tokens + stats.evicted_tokens
    dropped = f" | forgotten: {gone} tokens" if gone else ""
    ended = f" | ended: {_ENDED[reason]}" if reason in _ENDED else ""
    experts = ""
    if stats.experts is not None:
        read = f"{stats.experts.bytes_read / 1e6:.0f} MB read"
        experts = f" | experts in memory: {100 * stats.experts.hit_rate:.1f} %, {read}"
    guessed = [f"{n.accepted} of {n.drafted} by {name}" for name, n in stats.drafts.items()]
    drafts = f" | drafts: {', '.join(guessed)}" if guessed else ""
    drafts += f" | drafts missing of the {stats.draft_failure}" if stats.draft_failure else ""
    return (
        f"[ prompt: {stats.prompt_tokens} tokens ({stats.cached_tokens} cached, {where} "
        f"{stats.prefill_precision}), {stats.prompt_tokens_per_second:.1f} t/s | "
        f"first token: {stats.ttft_s * 1000:.0f} ms | "
        f"generation: {stats.generation_tokens} tokens, "
        f"{stats.generation_tokens_per_second:.1f} t/s{drafts}{dropped}{experts} | "
        f"peak memory: {stats.peak_memory_bytes / 1e6:.0f} MB | seed: {stats.seed}{ended} ]"
    )
