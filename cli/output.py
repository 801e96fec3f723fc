"""Printing of an answer: its text on stdout, its statistics on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from typing import Any, Literal

import click

from edgellm import Completion, FinishReason, Piece, Stats, ToolCall
from edgellm.cli.live_line import LiveLine
from edgellm.cli.text import json_line, spelled_out, without_controls
from edgellm.results import completion

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
    dropped = f" | forgotten: {stats.dropped_tokens} tokens" if stats.dropped_tokens else ""
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
