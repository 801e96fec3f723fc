"""Options for the tools that a model may call, and their file."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from edgellm.cli.text import read_text
from edgellm.errors import OptionError
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
