"""The `edgellm` command: lazy sub-commands, and one place where errors become an exit code."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import io
import os
import re
import sys
import threading
from difflib import get_close_matches
from typing import Any

import click

from edgellm import __version__
from edgellm.cli.interrupt import INTERRUPTED, note_interrupts
from edgellm.cli.text import say
from edgellm.errors import CancelledError, EdgeLLMError, OptionError

# Command -> module and one line of help; a module is imported when its command runs.
COMMANDS = {
    "run": ("edgellm.cli.run", "Ask a model, or chat with it."),
    "serve": ("edgellm.cli.serve", "Serve models over HTTP."),
    "infill": ("edgellm.cli.infill", "Fill the gap between a prefix and a suffix."),
    "export": ("edgellm.cli.models", "Export a model to a bundle."),
    "pull": ("edgellm.cli.models", "Download a model and export it."),
    "ls": ("edgellm.cli.models", "List exported models."),
    "show": ("edgellm.cli.models", "Show what a model is and what it needs."),
    "rm": ("edgellm.cli.models", "Delete an exported model and its download."),
    "cache": ("edgellm.cli.models", "Keep system prompts and documents, computed."),
    "bench": ("edgellm.cli.measuring", "Measure prefill and decode speed."),
    "perplexity": ("edgellm.cli.measuring", "Measure the perplexity of a text."),
    "quality": ("edgellm.cli.measuring", "Measure what rounding costs, against float32."),
    "plan": ("edgellm.cli.measuring", "Explain how a prompt is prefilled, and what limits it."),
    "doctor": ("edgellm.cli.doctor", "Check that an accelerator computes what it should."),
    "devices": ("edgellm.cli.doctor", "List execution providers: usable, or why not."),
}

# What other programs call a command.
_MEANT = {
    "list": "ls",
    "models": "ls",
    "ps": "ls",
    "chat": "run",
    "generate": "run",
    "complete": "run",
    "download": "pull",
    "server": "serve",
    "remove": "rm",
    "delete": "rm",
    "convert": "export",
    "create": "export",
}


class _Commands(click.Group):
    """Group of commands, whose help imports none of them.

    An error of the library becomes one line on stderr, and an exit code.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            meant = _MEANT.get(args[0]) or next(iter(get_close_matches(args[0], COMMANDS)), None)
            if meant is None:
                raise
            raise click.UsageError(f"{error.message} Did you mean {meant}?", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CancelledError as error:
            say(str(error))
            return INTERRUPTED
        except EdgeLLMError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            message = str(error) if command is None else in_flags(str(error), command)
            say(message)
            return 2 if isinstance(error, OptionError) else 1

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def edgellm() -> None:
    """Run language models on this machine.

    A chat with the default model: edgellm run
    """


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    open_closed_streams()
    encode_everything()
    code = run_command(None, interrupted=note_interrupts())
    # Python collects garbage twice when it ends: 200 ms after an export, 30 ms with objects frozen.
    gc.freeze()
    sys.exit(code)


def run_command(arguments: list[str] | None, *, interrupted: threading.Event) -> int:
    """Run a command line in this process, and return its exit code.

    Args:
        arguments: words of the command line; None: those of the process.
        interrupted: event of `note_interrupts`, set by Ctrl-C.
    """
    try:
        code = _run(arguments)
    except Exception:
        if not interrupted.is_set():
            raise
        say("interrupted")
        return INTERRUPTED
    # a library that is interrupted in C raises an error of its own, which may have been told
    return INTERRUPTED if code and interrupted.is_set() else code


def _run(arguments: list[str] | None) -> int:
    """Run a command line; tell errors of the user, the library and the system on stderr."""
    try:
        result = edgellm.main(arguments, standalone_mode=False, prog_name="edgellm")
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()  # the reader has gone (`| head`)
        return 1
    except OSError as error:
        if error.errno == errno.EBADF:
            say("standard output is closed; there is nowhere to write to")
        else:
            say(str(error))
        discard_output()
        return 1


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


def open_closed_streams() -> None:
    """Open closed standard streams again, so that no other file gets their numbers.

    Standard input is at its end then, and standard error is discarded. Writing to standard output
    is an error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # takes the lowest free number, which is this stream's
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def encode_everything() -> None:
    """Let standard output take any text.

    Files and programs get UTF-8. A terminal gets its own encoding, with escapes for characters that
    it lacks.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding = None if sys.stdout.isatty() else "utf-8"
        sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")


def discard_output() -> None:
    """Discard text still buffered for standard output, whose reader has gone or never was."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
