"""`edgellm run --batch`: many prompts from a file, answered together.

The file has a JSON object in each line:

    {"id": "a", "prompt": "Name a colour.", "max_tokens": 20}
    {"messages": [{"role": "user", "content": "And a fruit?"}], "temperature": 0}
    {"prefix": "def add(a, b):\n", "suffix": "\n    return c"}

All lines are checked before the first one is answered, so that a typing error is known at once.
Only one line at a time is held in memory.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import click

from edgellm import (
    LLM,
    BatchAnswer,
    BatchRequest,
    GenerationArguments,
    GenerationOptions,
    Grammar,
    LoadArguments,
    Message,
    Progress,
)
from edgellm.cli.interrupt import INTERRUPTED, cancel_on_interrupt
from edgellm.cli.options import Command
from edgellm.cli.output import shown_stats
from edgellm.cli.progress import loaded, progress_bar
from edgellm.cli.text import file_errors, json_line, say
from edgellm.errors import OptionError
from edgellm.infill import Gap

# Far above any prompt that fits into a context.
_MAX_BYTES = 64 << 20
_ROLES = ("system", "user", "assistant")
# Options that a line may name: all but `logprobs`, which the answers of a batch do not show.
_OPTIONS = tuple(n for n in GenerationArguments.__annotations__ if n != "logprobs")
_FIELDS = ("id", "prompt", "messages", "prefix", "suffix", *_OPTIONS)
_KINDS = 'one of "prompt", "messages", or "prefix" and "suffix"'


@dataclass(frozen=True)
class BatchLine:
    """Prompt and options in one line of a batch file.

    Attributes:
        id: "id" to write with the answer; None: the answer has the line's index instead.
        prompt: text, messages, or text around a gap.
        arguments: generation options that the line names.
    """

    id: str | int | None
    prompt: str | list[Message] | Gap
    arguments: GenerationArguments


@contextmanager
def open_batch(path: Path) -> Iterator[IO[bytes]]:
    """Open a batch file so that it can be read twice; standard input (`-`) and pipes are copied.

    Raises:
        OptionError: the file is not readable.
    """
    with file_errors(path):
        source = sys.stdin.buffer if str(path) == "-" else path.open("rb")
    if source is not sys.stdin.buffer and source.seekable():
        with source:
            yield source
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(source, copy)
        yield copy


def check_batch(file: IO[bytes], defaults: GenerationArguments) -> int:
    """Check all lines of a batch file, and return the number of lines to answer.

    Args:
        defaults: generation options that apply where a line does not name its own.

    Raises:
        OptionError: a line is wrong (the first one is named), or the file has no lines.
    """
    seen: dict[str | int, int] = {}
    count = 0
    for number, line in read_batch(file):
        try:
            arguments: GenerationArguments = {**defaults, **line.arguments}
            GenerationOptions(**arguments)
        except OptionError as error:
            raise _wrong(number, str(error)) from None
        if line.id is not None:
            first = seen.setdefault(line.id, number)
            if first != number:
                raise _wrong(number, f'"id" {line.id!r} is that of line {first}; each has its own')
        count += 1
    if count == 0:
        raise OptionError(f"the batch has no lines; each is a JSON object with {_KINDS}")
    return count


def read_batch(file: IO[bytes]) -> Iterator[tuple[int, BatchLine]]:
    """Yield the lines of a batch file with their numbers, from 1; empty lines are skipped.

    Raises:
        OptionError: a line is wrong.
    """
    file.seek(0)
    number = 0
    while data := file.readline(_MAX_BYTES + 1):
        number += 1
        if len(data) > _MAX_BYTES:
            raise _wrong(number, f"longer than {_MAX_BYTES >> 20} MB; a line is one JSON object")
        if data.strip():
            yield number, _parse(number, data)


def _parse(number: int, data: bytes) -> BatchLine:
    try:
        values = json.loads(data.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise _wrong(number, f"not valid UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _wrong(number, f"not JSON: {error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:
        raise _wrong(number, f"not JSON that can be read: {error}") from None
    if not isinstance(values, dict):
        raise _wrong(number, f"a JSON object with {_KINDS} is expected")
    unknown = next((name for name in values if name not in _FIELDS), None)
    if unknown is not None:
        raise _wrong(number, f"unknown field {unknown!r}; allowed are {', '.join(_FIELDS)}")
    identity = values.get("id")
    if not isinstance(identity, str | int | None) or isinstance(identity, bool):
        raise _wrong(number, '"id" is a text or a whole number')
    arguments = {name: values[name] for name in _OPTIONS if name in values}
    if isinstance(arguments.get("logit_bias"), dict):
        arguments["logit_bias"] = _by_token(number, arguments["logit_bias"])
    return BatchLine(identity, _prompt(number, values), cast(GenerationArguments, arguments))


def _prompt(number: int, values: dict[str, Any]) -> str | list[Message] | Gap:
    gap = "prefix" in values or "suffix" in values
    if ("prompt" in values) + ("messages" in values) + gap != 1:
        raise _wrong(number, f"{_KINDS} is expected")
    if "messages" in values:
        return _messages(number, values["messages"])
    for name in ("prompt", "prefix", "suffix"):
        text = values.get(name, "")
        if not isinstance(text, str) or (name == "prompt" and name in values and not text.strip()):
            raise _wrong(number, f'"{name}" is {json.dumps(text)[:60]}; a text is expected')
    if not gap:
        return str(values["prompt"])
    return Gap(prefix=values.get("prefix", ""), suffix=values.get("suffix", ""))


def _messages(number: int, values: object) -> list[Message]:
    try:
        assert isinstance(values, list)
        messages = [Message(value["role"], value["content"]) for value in values]
        assert messages
        assert all(m.role in _ROLES and isinstance(m.content, str) for m in messages)
    except (AssertionError, KeyError, TypeError):
        raise _wrong(
            number,
            f'"messages" is a list of objects, each with a "role" ({", ".join(_ROLES)}) and a '
            '"content", which is a text',
        ) from None
    return messages


def _by_token(number: int, biases: dict[str, object]) -> dict[int, object]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise _wrong(number, '"logit_bias" has token ids as its names') from None


def _wrong(number: int, why: str) -> OptionError:
    # parameters are fields here, whose names stand in double quotes instead of backquotes
    return OptionError(f"line {number} of the batch: {why.replace('`', chr(34))}")


# Parameters of `run` that a batch has no use for.
_OF_ONE = {
    "prompt": "PROMPT",
    "prompt_option": "-p",
    "file": "-f",
    "cache": "--cache",
    "escape": "-e",
    "prefix": "--prefix",
    "suffix": "--suffix",
    "trace": "--trace",
    "tools_file": "--tools",
    "reasoning_budget": "--reasoning-budget",
}


def batch_options(command: Command) -> Command:
    """Let a command for one prompt also answer a file of prompts (--batch), with its options."""

    @click.option(
        "--batch", type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
        help='Answer the lines of a file: JSON objects with a "prompt" (what -p would be), '
        '"messages", or "prefix" and "suffix", and if wanted an "id" and options by their names in '
        'Python ("max_tokens"), in the place of those given here. Answers and errors come as they '
        "finish; a file with a wrong line is refused before.",
    )  # fmt: skip
    @click.option(
        "-o", "--output", type=click.Path(path_type=Path, dir_okay=False),
        help="Where the answers of --batch go.  [default: standard output]",
    )  # fmt: skip
    @click.option("--force", is_flag=True, help="Replace an output that is there.")
    @functools.wraps(command)
    def wrapped(*, batch: Path | None, output: Path | None, force: bool, **given: Any) -> Any:
        if batch is None:
            if output is not None or force:
                raise OptionError("--output and --force are for --batch; `>` keeps an answer")
            return command(**given)
        unused = [flag for name, flag in _OF_ONE.items() if given[name] not in (None, False)]
        if unused:
            raise OptionError(f"--batch has all prompts in its file; leave out {', '.join(unused)}")
        return run_batch(
            given["name"],
            batch,
            output=output,
            force=force,
            load_arguments=given["load_arguments"],
            sampling=given["sampling"],
            system=given["system"],
            raw=given["raw"],
            grammar=given["grammar"],
            show_stats=shown_stats(given["stats"]) != "none",
        )

    return wrapped


@dataclass
class _Batch:
    """Options for the lines of a batch file, and counts of their answers.

    Attributes:
        ids: "id" of each line in progress, by the line's index in the file.
        done: number of answers and errors written.
        failed: number of lines that ended with an error.
        tokens: number of tokens sampled for all answers.
    """

    llm: LLM
    sampling: GenerationArguments
    system: str | None
    raw: bool
    grammar: Grammar | None
    ids: dict[int, str | int | None] = field(default_factory=dict)
    done: int = 0
    failed: int = 0
    tokens: int = 0

    def request(self, line: BatchLine) -> BatchRequest:
        """Return the request for a line; its own options override those of the command line."""
        arguments: GenerationArguments = {**self.sampling, **line.arguments}
        prompt, grammar = line.prompt, self.grammar
        if isinstance(prompt, Gap):
            arguments.setdefault("temperature", 0.0)  # greedy, as in `edgellm infill`
        elif isinstance(prompt, list) or not self.raw:
            prompt = self._conversation(prompt)
        return BatchRequest(
            prompt=prompt,
            options=self.llm.generation_options(**arguments),
            logit_filter=None if grammar is None else self.llm.grammar_filter(grammar),
        )

    def _conversation(self, prompt: str | list[Message]) -> list[Message]:
        messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        if self.system is None or messages[0].role == "system":
            return messages
        return [Message("system", self.system), *messages]

    def line(self, answer: BatchAnswer) -> dict[str, Any]:
        """Return the JSON object to write for an answer, and count the answer."""
        identity = self.ids.pop(answer.index)
        values = {"index": answer.index} if identity is None else {"id": identity}
        self.done += 1
        if answer.completion is None:
            self.failed += 1
            return {**values, "error": str(answer.error)}
        text, stats = answer.completion.text, answer.completion.stats
        self.tokens += stats.generation_tokens
        reason = answer.completion.finish_reason
        return {**values, "text": text, "finish_reason": reason, **stats.to_json()}


def run_batch(
    name: str,
    path: Path,
    *,
    output: Path | None,
    force: bool,
    load_arguments: LoadArguments,
    sampling: GenerationArguments,
    system: str | None,
    raw: bool,
    grammar: Grammar | None,
    show_stats: bool,
) -> int:
    """Answer the lines of a batch file, and write each answer as a line of JSON when it is done.

    Returns:
        Exit code: 0, 1 if a line failed, or INTERRUPTED after Ctrl-C.
    """
    if raw and system is not None:
        raise OptionError("--raw has no place for a system prompt; put it into the prompts")
    _check_output(path, output, force=force)
    with open_batch(path) as file:
        count = check_batch(file, sampling)
        llm = loaded(name, load_arguments)
        if system is None and not raw:
            system = llm.system
        batch = _Batch(llm, sampling, system, raw, grammar)
        if grammar is not None:
            llm.grammar_filter(grammar)  # a wrong one fails here, not in every line
        with _output(output, force=force) as out:
            return _answer_all(batch, file, out, count=count, show_stats=show_stats)


def _answer_all(
    batch: _Batch, file: IO[bytes], out: IO[bytes], *, count: int, show_stats: bool
) -> int:
    start = time.monotonic()
    with cancel_on_interrupt() as cancel, progress_bar() as progress:

        def requests() -> Iterator[BatchRequest]:
            for index, (_, line) in enumerate(read_batch(file)):
                if cancel.is_set():
                    return
                batch.ids[index] = line.id
                yield batch.request(line)

        for answer in batch.llm.batch(requests(), cancel=cancel):
            if answer.completion is None or answer.completion.finish_reason != "cancelled":
                _write_line(out, batch.line(answer))
                progress(Progress("answers", batch.done, count))
    if batch.failed:
        say(f"{batch.failed} of {count} lines failed, see their errors")
    if show_stats:
        seconds = time.monotonic() - start
        rate = batch.tokens / seconds
        click.echo(
            f"[ {batch.done} answers | generation: {batch.tokens} tokens, {rate:.1f} t/s | "
            f"{seconds:.1f} s ]",
            err=True,
        )
    if cancel.is_set():
        say(f"interrupted; {batch.done} of {count} lines were answered")
        return INTERRUPTED
    return 1 if batch.failed else 0


def _check_output(path: Path, output: Path | None, *, force: bool) -> None:
    """Refuse an output file that is not writable or would be lost, before anything is computed."""
    if output is None:
        return
    if not output.parent.is_dir():
        raise OptionError(f"{output}: there is no folder {output.parent}; make it first")
    if not output.exists():
        return
    if path.exists() and output.samefile(path):
        raise OptionError(f"{output} is the file with the prompts; write the answers to another")
    if not force:
        raise OptionError(f"{output} is there already; --force replaces it")


@contextmanager
def _output(output: Path | None, *, force: bool) -> Iterator[IO[bytes]]:
    """Open the output file for answers, unbuffered; without a path, use standard output."""
    if output is None:
        sys.stdout.flush()
        yield sys.stdout.buffer
        return
    with file_errors(output):
        file = output.open("wb" if force else "xb", buffering=0)
    with file:
        yield file


def _write_line(out: IO[bytes], values: dict[str, Any]) -> None:
    """Write an answer as a line of JSON; if that fails, a file keeps no part of the line."""
    data = f"{json_line(values)}\n".encode()
    start = out.tell() if out.seekable() else None
    try:
        while data:
            data = data[out.write(data) :]
        out.flush()
    except BaseException:
        if start is not None:
            out.truncate(start)
        raise
