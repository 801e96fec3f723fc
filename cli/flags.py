"""Messages of the library in the words of the command line."""

from __future__ import annotations

import re

import click

_PARAMETER = re.compile(r"`([a-z_]+)`")


def in_flags(message: str, command: click.Command) -> str:
    """Replace each parameter in a message, in backquotes, by the command's flag for it."""
    flags = _flags(command)
    return _PARAMETER.sub(lambda match: flags.get(match[1], match[0]), message)


def _flags(command: click.Command) -> dict[str, str]:
    """Map each parameter of a command to its flag; of a group, the parameters of its commands."""
    commands = command.commands.values() if isinstance(command, click.Group) else (command,)
    return {
        parameter.name: next((o for o in parameter.opts if o.startswith("--")), parameter.opts[0])
        for one in commands
        for parameter in one.params
        if isinstance(parameter, click.Option) and parameter.name is not None
    }
