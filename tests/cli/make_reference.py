"""Writes docs/cli.md from the commands themselves.

python -P tests/cli/make_reference.py
"""

from __future__ import annotations

from pathlib import Path

import click

from edgellm.cli.main import COMMANDS, edgellm

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "cli.md"
# A line of help would break where the reader's terminal does.
_WIDTH = 100


def reference() -> str:
    """What `--help` says of each command."""
    parts = [
        "# The command line",
        "Written by `python -P tests/cli/make_reference.py` from what `--help` says.",
    ]
    with click.Context(edgellm, info_name="edgellm", **edgellm.context_settings) as parent:
        for name in COMMANDS:
            command = edgellm.get_command(parent, name)
            assert command is not None
            parts += [f"## edgellm {name}", _help(command, parent, name)]
            for sub, inner in getattr(command, "commands", {}).items():
                with _context(command, parent, name) as context:
                    parts += [f"### edgellm {name} {sub}", _help(inner, context, sub)]
    return "\n\n".join(parts) + "\n"


def _context(command: click.Command, parent: click.Context, name: str) -> click.Context:
    return click.Context(
        command, info_name=name, parent=parent, terminal_width=_WIDTH, max_content_width=_WIDTH
    )


def _help(command: click.Command, parent: click.Context, name: str) -> str:
    with _context(command, parent, name) as context:
        lines = command.get_help(context).splitlines()
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```"


if __name__ == "__main__":
    REFERENCE.write_text(reference(), encoding="utf-8")
