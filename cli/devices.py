"""`edgellm devices`"""

from __future__ import annotations

import click

from edgellm.backends.int8_support import int8_products_are_exact
from edgellm.backends.providers import statuses
from edgellm.kernels.gpu import device
from edgellm.kernels.native import isa


@click.command()
def devices() -> None:
    """List every execution provider: usable, or why not."""
    for status in statuses():
        if status.usable:
            click.echo(f"{status.name:10} usable      {status.device}".rstrip())
        else:
            click.echo(f"{status.name:10} not usable  {status.reason}")
    reason = device.why_not()
    click.echo(f"triton kernels: {reason or device.device_name()}")
    click.echo(
        f"native kernels: {isa() or 'not built (no compiler at installation); numpy serves'}"
    )
    click.echo(
        "int8 graphs on the CPU: exact"
        if int8_products_are_exact()
        else "int8 graphs on the CPU: their products saturate here, so --prefill cpu is float32"
    )
