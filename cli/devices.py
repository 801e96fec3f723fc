"""`edgellm devices`"""

from __future__ import annotations

import click

from edgellm.providers import statuses


@click.command()
def devices() -> None:
    """List every execution provider: usable, or why not."""
    for status in statuses():
        if status.usable:
            click.echo(f"{status.name:10} usable      {status.device}".rstrip())
        else:
            click.echo(f"{status.name:10} not usable  {status.reason}")
