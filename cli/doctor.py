"""`edgellm doctor`"""

from __future__ import annotations

import click

from edgellm.cli.options import LoadArguments, load_options, model_argument
from edgellm.cli.progress import export_progress
from edgellm.errors import OptionError
from edgellm.llm import load
from edgellm.prefill import ChunkedPrefill
from edgellm.self_test import Check, check_prompts, check_segments


@click.command()
@model_argument
@load_options
def doctor(*, name: str, load_arguments: LoadArguments) -> int:
    """Check that an accelerator computes what it should: every segment, and prompts of every edge.

    The judge is what the model gave in float32 when it was exported. MODEL is loaded as with
    `edgellm run`, e.g. `edgellm doctor --prefill qnn`.
    """
    with export_progress() as progress:
        engine = load(name, **load_arguments, export_progress=progress).engine
    if not isinstance(engine.prefill, ChunkedPrefill):
        raise OptionError(
            "doctor checks graphs on an execution provider; choose one, e.g. --prefill qnn "
            "(`edgellm devices` lists them)"
        )
    model = engine.prefill.model
    click.echo(f"{model.segments.flavour} on {engine.prefill.placement}")
    checks = [*map(_shown, check_segments(engine.bundle, model.segments))]
    with engine.lock:
        prompts = check_prompts(engine.bundle, model, engine.cache, engine.decoder)
        checks += map(_shown, prompts)
    failed = [check.name for check in checks if not check.passed]
    click.echo(
        f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}"
        if failed
        else f"all {len(checks)} checks passed"
    )
    return 1 if failed else 0


def _shown(check: Check) -> Check:
    mark = "ok   " if check.passed else "WRONG"
    click.echo(f"{mark} {check.name}: error {check.error:.2g}, allowed {check.limit:.2g}")
    return check
