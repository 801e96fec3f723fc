"""`edgellm doctor`: checks of a model's prefill and decode against float32."""

from __future__ import annotations

import click

from edgellm import LoadArguments, load
from edgellm.cli.options import load_options, model_argument
from edgellm.cli.progress import progress_bar
from edgellm.measure.doctor import Check, Examined, examine


@click.command()
@model_argument
@load_options
def doctor(*, name: str, load_arguments: LoadArguments) -> int:
    """Check that what runs computes what it should: every segment, and prompts of every edge.

    The judge is what the model gave in float32 when it was exported or, where there are no graphs
    to be exported, gives now; for that the model file is needed. MODEL is loaded as with
    `edgellm run`, e.g. `edgellm doctor --prefill qnn`: what prefill and decode run on is checked,
    the native and Triton kernels among it. (ONNX Runtime is, as far as prefill runs there.)
    """
    checks: list[Check] = []
    with progress_bar() as progress:
        llm = load(name, **load_arguments, progress=progress)
        for news in examine(llm.engine, progress=progress):
            if isinstance(news, Examined):
                click.echo(news.subject)
            else:
                _show(news)
                checks.append(news)
    failed = [check.name for check in checks if not check.passed]
    click.echo(
        f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}"
        if failed
        else f"all {len(checks)} checks passed"
    )
    return 1 if failed else 0


def _show(check: Check) -> None:
    mark = "ok   " if check.passed else "WRONG"
    click.echo(f"{mark} {check.name}: error {check.error:.2g}, allowed {check.limit:.2g}")
