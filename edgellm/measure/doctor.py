"""Checks that back ends compute what they should: every segment, prompts of every edge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.packed_weights import open_packed_weights
from edgellm.backends.self_test import Check, check_prompts, check_segments
from edgellm.backends.step_backend import StepBackend, StepModel
from edgellm.engine.engine import Engine
from edgellm.measure.step_test import check_layers, check_step
from edgellm.progress import ProgressCallback
from edgellm.store.import_summary import imported
from edgellm.store.manifest import PACKED

__all__ = ["Check", "Examined", "examine"]


@dataclass(frozen=True)
class Examined:
    """Subject of the checks that follow, in words, such as `w8a8 on cpu`."""

    subject: str


def examine(
    engine: Engine, *, progress: ProgressCallback | None = None
) -> Iterator[Examined | Check]:
    """Check prefill and decode of a loaded model (`LLM.engine`).

    Results are compared with those of float32, stored when the model was exported. Where there are
    no graphs to be exported, float32 is computed now.

    Yields:
        Each subject, and then its checks.

    Raises:
        SourceError: the model file is needed, and missing or changed.
    """
    if isinstance(engine.prefill, ChunkedBackend):
        model = engine.prefill.model
        yield Examined(f"{model.segments.precision} on {engine.prefill.placement}")
        yield from check_segments(engine.bundle, model.segments)
        prompts = check_prompts(engine.bundle, model, engine.cache, engine.prefill.host)
        yield from engine.thread.each(prompts)
    steps = _steps(engine)
    if not steps:
        return
    from edgellm.export.float_reference import float_reference  # 0.4 s

    weights, summary = open_packed_weights(engine.bundle), imported(engine.bundle.manifest, PACKED)
    with float_reference(engine.bundle, progress=progress) as reference:
        for name, step in steps.items():
            yield Examined(f"{PACKED} on {name}")
            yield from check_layers(reference, step, weights, summary)
            yield from engine.thread.each(check_step(reference, step, engine.cache, summary))


def _steps(engine: Engine) -> dict[str, StepModel]:
    """Map back ends' names to the models of packed weights that prefill or decode run on."""
    steps, prefill = {}, engine.prefill
    host = prefill.host if isinstance(prefill, ChunkedBackend) else None
    for backend in (prefill, engine.decoder, host):
        if isinstance(backend, StepBackend):
            steps[backend.name] = backend.model
    return steps
