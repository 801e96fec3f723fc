"""`edgellm doctor` and `devices`: checks of a model against float32, and what this machine has."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from edgellm import LLM, LoadArguments, load
from edgellm.cli.options import load_options, model_argument
from edgellm.cli.progress import progress_bar
from edgellm.devices import devices as usable_devices
from edgellm.devices import native_isa
from edgellm.measure.benchmark import environment
from edgellm.measure.doctor import Check, Examined, examine

# Width of the line that names the check on its way.
_WIDTH = 60
_WHAT_TO_DO = (
    "What to do: export the model again, in case its files are damaged (edgellm rm, edgellm pull). "
    "If the same checks fail, a provider, its driver or a kernel computes wrong on this machine: "
    "try others with --prefill, --decode or EDGELLM_CPU_ISA=scalar, and report what "
    "`edgellm doctor --verbose` prints."
)


@click.command()
@model_argument
@load_options
@click.option("-v", "--verbose", is_flag=True, help="Print every check with its error.")
def doctor(*, name: str, load_arguments: LoadArguments, verbose: bool) -> int:
    """Check that what runs computes what it should: every segment, and prompts of every edge.

    The judge is what the model gave in float32 when it was exported or, where there are no graphs
    to be exported, gives now; for that the model file is needed. MODEL is loaded as with
    `edgellm run`, e.g. `edgellm doctor --prefill qnn`: what prefill and decode run on is checked,
    the native and Triton kernels among it. (ONNX Runtime is, as far as prefill runs there.)
    """
    report = _Report(verbose=verbose)
    with progress_bar() as progress:
        llm = load(name, **load_arguments, progress=progress)
        _show_setting(llm)
        for news in examine(llm.engine, progress=progress):
            if isinstance(news, Examined):
                report.begin(news.subject)
            else:
                report.add(news)
        report.end()
    failed = [check.name for check in report.checks if not check.passed]
    if failed:
        click.echo(f"{len(failed)} of {len(report.checks)} checks failed: {', '.join(failed)}")
        click.echo(_WHAT_TO_DO)
        return 1
    click.echo(f"all {len(report.checks)} checks passed")
    return 0


def _show_setting(llm: LLM) -> None:
    machine = environment(llm.engine)
    click.echo(f"{llm.name}: prefill {llm.prefill}; decode {llm.decode}")
    click.echo(
        f"{machine['cpu']}, {machine['threads']} threads, native kernels {native_isa() or 'none'}; "
        f"edgellm {machine['version']}, onnxruntime {machine['onnxruntime']}"
    )


class _Report:
    """Lines about checks: each failure at once, and each subject when all its checks are done.

    Args:
        verbose: whether to print every check instead.
    """

    def __init__(self, *, verbose: bool) -> None:
        self.checks: list[Check] = []
        self._verbose = verbose
        self._live = not verbose and sys.stderr.isatty()
        self._subject = ""
        self._begin = 0  # index of the subject's first check

    def begin(self, subject: str) -> None:
        """Begin a subject, and end the one before."""
        self.end()
        self._subject, self._begin = subject, len(self.checks)
        if self._verbose:
            click.echo(subject)

    def add(self, check: Check) -> None:
        """Report a check of the subject."""
        self.checks.append(check)
        if self._verbose or not check.passed:
            mark = "ok   " if check.passed else "WRONG"
            self._show_live("")
            click.echo(f"{mark} {check.name}: error {check.error:.2g}, allowed {check.limit:.2g}")
        self._show_live(f"{len(self.checks)} done: {check.name}")

    def end(self) -> None:
        """Print the subject's summary."""
        self._show_live("")
        checks = self.checks[self._begin :]
        if self._verbose or not checks:
            return
        wrong = sum(not check.passed for check in checks)
        nearest = max(checks, key=lambda check: check.error / check.limit)
        result = (
            f"{wrong} of {len(checks)} wrong"
            if wrong
            else f"passed; nearest to its limit: {nearest.name}, "
            f"{nearest.error:.2g} of {nearest.limit:.2g}"
        )
        click.echo(f"{self._subject}: {_parts(checks)}: {result}")

    def _show_live(self, text: str) -> None:
        """Replace the line on a terminal that names the check on its way."""
        if self._live:
            end = "" if text else "\r"
            click.echo(f"\r{text[:_WIDTH]:{_WIDTH}}{end}", err=True, nl=False)


def _parts(checks: Sequence[Check]) -> str:
    """Return what was checked, in words: `31 segments, 9 prompts, head`."""
    names = [check.name for check in checks]
    counts = {kind: sum(n.startswith(f"{kind} ") for n in names) for kind in ("segment", "prompt")}
    many = [f"{count} {kind}s" for kind, count in counts.items() if count]
    return ", ".join([*many, *(n for n in names if n.split()[0] not in counts)])


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
