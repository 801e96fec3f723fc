"""Files of many prompts: a JSON object in each line.

    {"id": "a", "prompt": "Name a colour.", "max_tokens": 20}
    {"messages": [{"role": "user", "content": "And a fruit?"}], "temperature": 0}
    {"prefix": "def add(a, b):\n", "suffix": "\n    return c"}

All lines are checked before the first one is answered, so that a typing error is known at once and
not hours later. Only one line at a time is held in memory.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from edgellm import GenerationArguments, GenerationOptions, Message
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
    try:
        source = sys.stdin.buffer if str(path) == "-" else path.open("rb")
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None
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
