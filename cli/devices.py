"""`edgellm devices`: execution providers and kernels of this machine."""

from __future__ import annotations

import click

from edgellm.devices import devices as usable_devices


@click.command()
def devices() -> None:
    """List every execution provider: usable, or why not."""
    machine = usable_devices()
    for status in machine.providers:
        if status.usable:
            click.echo(f"{status.name:12} usable      {status.device}".rstrip())
        else:
            click.echo(f"{status.name:12} not usable  {status.reason}")
    click.echo(f"triton kernels: {machine.gpu_reason or machine.gpu}")
    native = machine.native or "not built (no compiler at installation); numpy serves"
    click.echo(f"native kernels: {native}")
    click.echo(
        "int8 graphs on the CPU: exact"
        if machine.exact_int8
        else "int8 graphs on the CPU: their products saturate here, so --prefill cpu is float32"
    )
