"""Checks that back ends compute what they should: every segment, prompts of every edge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.packed_weights import open_packed_weights
from edgellm.backends.self_test import Check, check_prompts, check_segments
from edgellm.backends.step_backend import StepBackend, StepModel
from edgellm.engine.engine import Engine
from edgellm.errors import UnsupportedModelError
from edgellm.export.equalized import EqualizedCheckpoint
from edgellm.export.reference_writer import reference_tokens, store_reference
from edgellm.export.source_checkpoint import open_source
from edgellm.graphs.config import ModelConfig
from edgellm.measure.step_test import check_layers, check_step
from edgellm.progress import Progress, ProgressCallback
from edgellm.store.bundle import Bundle
from edgellm.store.import_summary import imported
from edgellm.store.key_basis import open_key_basis
from edgellm.store.manifest import PACKED
from edgellm.store.reference import Reference, open_reference
from edgellm.text.tokenizer import Tokenizer

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

    weights, summary = open_packed_weights(engine.bundle), imported(engine.bundle.manifest, PACKED)
    with float_reference(engine.bundle, progress=progress) as reference:
        for name, step in steps.items():
            yield Examined(f"{PACKED} on {name}")
            yield from check_layers(reference, step, weights, summary)
            prompts = check_step(
                reference, step, engine.cache, summary, experts=engine.config.has_experts
            )
            yield from engine.thread.each(prompts)


def _steps(engine: Engine) -> dict[str, StepModel]:
    """Map back ends' names to the models of packed weights that prefill or decode run on."""
    steps, prefill = {}, engine.prefill
    host = prefill.host if isinstance(prefill, ChunkedBackend) else None
    for backend in (prefill, engine.decoder, host):
        if isinstance(backend, StepBackend):
            steps[backend.name] = backend.model
    return steps


# Chunk size in tokens for the reference text of a bundle whose graphs have no chunk sizes.
_CHUNK = 128


def _untested(config: ModelConfig) -> str:
    """Name a part of the model that `step_test` does not compute; empty: there is none."""
    attentions = config.attentions.values()
    parts = {
        "layers with states": config.has_states,
        "layers that share K and V": any(each.kv_from is not None for each in attentions),
        "V made of K": any(each.k_as_v for each in attentions),
        "embeddings for each layer": config.layer_embedding is not None,
        "scaled layers": any(layer.scaled for layer in config.layers),
        "an MLP beside experts": any(x.shared and x.shared.beside for x in config.layers),
    }
    return next((part for part, there in parts.items() if there), "")


@contextmanager
def float_reference(
    bundle: Bundle, *, progress: ProgressCallback | None = None
) -> Iterator[Reference]:
    """Yield the float32 reference of a bundle; computed from the checkpoint if it stores none.

    Bundles without graphs of chunks store none.

    Args:
        progress: see `Progress`.

    Raises:
        SourceError: the bundle stores none, and its checkpoint is gone or changed.
        UnsupportedModelError: the model has states, or parts of Gemma 4.
    """
    if untested := _untested(bundle.config):
        raise UnsupportedModelError(
            f"{bundle.path}: there is no self-test of models with {untested} "
            f"({bundle.config.model_type}) yet; `edgellm quality` compares with float32, and "
            "`edgellm doctor` without a model tests the kernels"
        )
    config, manifest = bundle.config, bundle.manifest
    if manifest.reference:
        yield open_reference(bundle.path, config, manifest.reference)
        return
    basis = open_key_basis(bundle.path, manifest.keys, bundle.config)
    checkpoint = EqualizedCheckpoint(open_source(bundle, progress=progress), basis)
    tokenizer = Tokenizer(bundle.path, manifest.tokenizer, rows=config.vocab_size)
    tokens = reference_tokens(tokenizer, config, chunk=_CHUNK)

    def done(index: int) -> None:
        if progress is not None:
            label = f"computing in float32: segment {index}"
            progress(Progress(label, index + 1, config.layer_count + 1))

    with TemporaryDirectory() as folder:
        arrays = store_reference(checkpoint, tokens, Path(folder), on_segment=done)
        yield open_reference(Path(folder), config, arrays)
