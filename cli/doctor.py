"""`edgellm doctor`"""

from __future__ import annotations

from collections.abc import Iterator

import click

from edgellm.backends.decode import StepDecoder
from edgellm.backends.packed_weights import open_packed_weights
from edgellm.backends.self_test import Check, check_prompts, check_segments
from edgellm.backends.step_model import StepModel
from edgellm.cli.options import load_options, model_argument
from edgellm.cli.progress import progress_bar
from edgellm.engine.engine import Engine
from edgellm.engine.prefill import ChunkedPrefill, StepPrefill
from edgellm.llm import load
from edgellm.measure.step_test import check_layers, check_step
from edgellm.options import EngineArguments
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import PACKED
from edgellm.store.import_summary import imported


@click.command()
@model_argument
@load_options
def doctor(*, name: str, load_arguments: EngineArguments) -> int:
    """Check that what runs computes what it should: every segment, and prompts of every edge.

    The judge is what the model gave in float32 when it was exported or, where there are no graphs
    to be exported, gives now; for that the model file is needed. MODEL is loaded as with
    `edgellm run`, e.g. `edgellm doctor --prefill qnn`: what prefill and decode run on is checked,
    the native and Triton kernels among it. (ONNX Runtime is, as far as prefill runs there.)
    """
    checks: list[Check] = []
    with progress_bar() as progress:
        engine = load(name, **load_arguments, progress=progress).engine
        for check in _checks(engine, progress):
            _show(check)
            checks.append(check)
    failed = [check.name for check in checks if not check.passed]
    click.echo(
        f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}"
        if failed
        else f"all {len(checks)} checks passed"
    )
    return 1 if failed else 0


def _checks(engine: Engine, progress: ProgressCallback) -> Iterator[Check]:
    if isinstance(engine.prefill, ChunkedPrefill):
        model = engine.prefill.model
        click.echo(f"{model.segments.precision} on {engine.prefill.placement}")
        yield from check_segments(engine.bundle, model.segments)
        with engine.lock:
            yield from check_prompts(engine.bundle, model, engine.cache, engine.decoder)
    steps = _steps(engine)
    if not steps:
        return
    from edgellm.export.float_reference import float_reference  # 0.4 s

    weights, summary = open_packed_weights(engine.bundle), imported(engine.bundle, PACKED)
    with float_reference(engine.bundle, progress=progress) as reference:
        for name, step in steps.items():
            click.echo(f"{PACKED} on {name}")
            yield from check_layers(reference, step, weights, summary)
            with engine.lock:
                yield from check_step(reference, step, engine.cache, summary)


def _steps(engine: Engine) -> dict[str, StepModel]:
    """The models of packed weights that prefill or decode runs on, by their back ends' names."""
    steps = {}
    if isinstance(engine.prefill, StepPrefill):
        steps[engine.prefill.placement.provider] = engine.prefill.model
    if isinstance(engine.decoder, StepDecoder):
        steps[engine.decoder.name] = engine.decoder.model
    return steps


def _show(check: Check) -> None:
    mark = "ok   " if check.passed else "WRONG"
    click.echo(f"{mark} {check.name}: error {check.error:.2g}, allowed {check.limit:.2g}")
