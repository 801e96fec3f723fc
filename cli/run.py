"""`edgellm run`: one answer, or a chat."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import click

from edgellm.answer import LogitFilter
from edgellm.cli.interrupt import cancel_on_interrupt
from edgellm.cli.live_line import LiveLine
from edgellm.cli.options import LoadArguments, load_options, model_argument, sampling_options
from edgellm.cli.progress import count_progress, export_progress
from edgellm.cli.text import read_text
from edgellm.errors import OptionError
from edgellm.fim import Gap, Order
from edgellm.llm import LLM, SamplingArguments, load
from edgellm.named_prefix import open_prefix
from edgellm.results import Piece, Stats
from edgellm.trace import write_trace

_STDIN = "-"
_INTERRUPTED = 130


@click.command()
@model_argument
@click.argument("prompt", required=False)
@load_options
@sampling_options
@click.option("-p", "--prompt", "prompt_option", metavar="TEXT", help="The same as PROMPT.")
@click.option(
    "-f", "--file", type=click.Path(path_type=Path, allow_dash=True), help="Read the prompt there."
)
@click.option("-sys", "--system-prompt", "system", help="What the model is told first.")
@click.option(
    "--cache", metavar="PREFIX", help="Begin with a text that `edgellm cache add` has kept."
)
@click.option("-e", "--escape", is_flag=True, help=r"Process \n, \t, \\ in the prompt.")
@click.option("--prefix", "--in-prefix", "prefix", help="Fill a gap behind this text; see infill.")
@click.option("--suffix", "--in-suffix", "suffix", help="Fill a gap before this text.")
@click.option("--raw", is_flag=True, help="Continue the prompt as text, without chat template.")
@click.option("-j", "--json-schema", help="Answer in JSON that fits this schema ({} for any).")
@click.option(
    "--stats/--no-stats", default=None, help="Timings on stderr.  [default: on a terminal]"
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what ran when during prefill, for chrome://tracing or ui.perfetto.dev.",
)
@click.option("--json", "as_json", is_flag=True, help="Print answer and timings as a JSON object.")
def run(
    *,
    name: str,
    prompt: str | None,
    prompt_option: str | None,
    file: Path | None,
    load_arguments: LoadArguments,
    sampling: SamplingArguments,
    system: str | None,
    cache: str | None,
    escape: bool,
    prefix: str | None,
    suffix: str | None,
    raw: bool,
    json_schema: str | None,
    stats: bool | None,
    trace: Path | None,
    as_json: bool,
) -> int:
    """Ask MODEL, or chat with it if there is no PROMPT.

    The prompt comes from PROMPT, -p, -f or a pipe; `-` reads standard input and puts it before
    what -p says. Only the model's text goes to stdout.
    """
    show_stats = sys.stderr.isatty() if stats is None else stats
    if prefix is not None or suffix is not None:
        if (prompt, prompt_option, file, cache) != (None, None, None, None):
            raise OptionError("--prefix and --suffix take the place of a prompt and of --cache")
        gap = Gap(prefix=prefix or "", suffix=suffix or "")
        return fill(name, gap, load_arguments, sampling, show_stats=show_stats, as_json=as_json)
    text = _prompt_text(prompt, prompt_option, file)
    if text is not None and escape:
        text = _process_escapes(text)
    if text is not None and not text.strip():
        raise OptionError("the prompt is empty; give a text with -p, -f or a pipe")
    with export_progress() as exporting:
        llm = load(name, **load_arguments, export_progress=exporting)
    if cache is not None:
        system, text, raw = _begin_with(llm, cache, system, text, raw)
    if raw and system is not None:
        raise OptionError("--raw has no place for a system prompt; put it into the prompt")
    if text is None:
        if trace is not None:
            raise OptionError("--trace is of one answer; give a prompt")
        from edgellm.cli.repl import chat

        return chat(llm, sampling=sampling, system=system, show_stats=show_stats)
    logit_filter = _json_filter(llm, json_schema)
    return _answer(llm, text, sampling, system, raw, logit_filter, show_stats, trace, as_json)


def _prompt_text(prompt: str | None, option: str | None, file: Path | None) -> str | None:
    """The prompt from all places it can come from; None asks for a chat."""
    parts = []
    if prompt == _STDIN or option == _STDIN:
        parts.append(_without_line_end(read_text(Path(_STDIN))))
    if file is not None:
        parts.append(_without_line_end(read_text(file)))
    parts += [text for text in (prompt, option) if text is not None and text != _STDIN]
    if len([text for text in (prompt, option) if text not in (None, _STDIN)]) > 1:
        raise OptionError("the prompt is given twice, as PROMPT and with -p")
    if not parts and not sys.stdin.isatty():
        parts.append(_without_line_end(read_text(Path(_STDIN))))
    return "\n\n".join(parts) if parts else None


def _begin_with(
    llm: LLM, cache: str, system: str | None, text: str | None, raw: bool
) -> tuple[str | None, str | None, bool]:
    """System prompt, prompt and --raw with a kept prefix, whose KV cache is there afterwards."""
    prefix, session = open_prefix(llm.engine, cache)
    session.close()
    if prefix.kind == "text":
        if text is None:
            raise OptionError(f"--cache {cache}: a text to continue, so give a prompt")
        return system, prefix.text + text, True
    if raw or system is not None:
        raise OptionError(f"--cache {cache} is a system prompt; leave out --raw and -sys")
    return prefix.text, text, False


def _without_line_end(text: str) -> str:
    """The text without the line end that echo and editors put after it, as llama.cpp does."""
    return text.removesuffix("\n").removesuffix("\r")


def _process_escapes(text: str) -> str:
    r"""Turn \n, \t, \x41, \u00e9 and their like into what they stand for."""
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise OptionError(f"escape in the prompt: {error.reason} at {error.start}") from None


def _answer(
    llm: LLM,
    text: str,
    sampling: SamplingArguments,
    system: str | None,
    raw: bool,
    logit_filter: LogitFilter | None,
    show_stats: bool,
    trace: Path | None,
    as_json: bool,
) -> int:
    with cancel_on_interrupt() as cancel, count_progress("prefill") as progress:
        if raw:
            session = llm.session()
            session.append(text, parse_special=True)
            pieces = session.stream(
                llm.sampling(**sampling),
                cancel=cancel,
                progress=progress,
                logit_filter=logit_filter,
            )
            shown, found = write(pieces, quiet=as_json, live=show_stats)
        else:
            conversation = llm.chat(system=system, **sampling)
            shown, found = write(
                conversation.stream(
                    text, cancel=cancel, progress=progress, logit_filter=logit_filter
                ),
                quiet=as_json,
                live=show_stats,
            )
        interrupted = cancel.is_set()
    if trace is not None:
        write_trace(trace, found.tasks)
    _report(shown, found, show_stats=show_stats, as_json=as_json)
    return _INTERRUPTED if interrupted else 0


def fill(
    name: str,
    gap: Gap,
    load_arguments: LoadArguments,
    sampling: SamplingArguments,
    *,
    order: Order | None = None,
    single_line: bool = False,
    template: bool = False,
    show_stats: bool,
    as_json: bool,
) -> int:
    """Write what belongs into a gap to stdout, exactly as it is."""
    if not gap.prefix and not gap.suffix:
        raise OptionError("nothing stands around the gap; give --prefix or --suffix")
    with export_progress() as exporting:
        llm = load(name, **load_arguments, export_progress=exporting)
    if template:
        click.echo("[ asked in words: this is no fill-in-the-middle ]", err=True)
    with cancel_on_interrupt() as cancel, count_progress("prefill") as progress:
        pieces = llm.stream_infill(
            gap.prefix,
            gap.suffix,
            extra=gap.extra,
            path=gap.path,
            repository=gap.repository,
            order=order,
            single_line=single_line,
            template=template,
            cancel=cancel,
            progress=progress,
            **sampling,
        )
        text, stats = write(pieces, quiet=as_json, end_line=False)
    _report(text, stats, show_stats=show_stats, as_json=as_json)
    return _INTERRUPTED if cancel.is_set() else 0


def _report(text: str, stats: Stats, *, show_stats: bool, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"text": text, **stats.to_json()}, ensure_ascii=False))
    elif show_stats:
        click.echo(stats_line(stats), err=True)


def write(
    pieces: Iterable[Piece], *, quiet: bool = False, end_line: bool = True, live: bool = False
) -> tuple[str, Stats]:
    """Stream pieces to stdout, end the line, and give the whole text and its statistics.

    Args:
        live: show the speed in the last line of a terminal meanwhile.
    """
    shown, stats = [], None
    with LiveLine(enabled=live and not quiet) as line:
        start = time.monotonic()
        for count, piece in enumerate(pieces):
            shown.append(piece.text)
            stats = piece.stats
            if piece.text and not quiet:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            if count == 0:
                start = time.monotonic()  # the first token came with the prompt
            else:
                line.show(f"{count + 1} tokens, {count / (time.monotonic() - start):.1f} tokens/s")
    text = "".join(shown)
    if not quiet and end_line and not text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    assert stats is not None
    return text, stats


def stats_line(stats: Stats) -> str:
    """One line of timings."""
    where = ", ".join(f"{n} on {name}" for name, n in stats.prefill.items())
    dropped = f" | forgotten: {stats.dropped_tokens} tokens" if stats.dropped_tokens else ""
    return (
        f"[ prompt: {stats.prompt_tokens} tokens ({stats.cached_tokens} cached, {where} "
        f"{stats.prefill_flavour}), {stats.prompt_tokens_per_second:.1f} t/s | "
        f"first token: {stats.ttft_s * 1000:.0f} ms | "
        f"generation: {stats.generation_tokens} tokens, "
        f"{stats.generation_tokens_per_second:.1f} t/s{dropped} | "
        f"peak memory: {stats.peak_memory_bytes / 1e6:.0f} MB | seed: {stats.seed} ]"
    )


def _json_filter(llm: LLM, schema: str | None) -> LogitFilter | None:
    if schema is None:
        return None
    from edgellm.json_schema import JsonFilter

    return JsonFilter(llm.engine.tokenizer, schema)
