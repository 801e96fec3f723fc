"""Checks that back ends compute what they should: every segment, prompts of every edge.

A step on packed weights goes through all layers in one call. So the matrices of each layer are
tested one by one first, through the same kernels, on the inputs that float32 had there. Then the
step itself is tested, on prompts of every edge and one token at a time. (`self_test.py` tests
graphs.)
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Span, StepBackend
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.packed_weights import open_packed_weights
from edgellm.backends.self_test import HEAD_LIMIT, WRONG, Check, check_prompts, check_segments
from edgellm.cache.kv_cache import KVCache
from edgellm.engine.engine import Engine
from edgellm.errors import OptionError, UnsupportedModelError
from edgellm.export.equalized import EqualizedCheckpoint
from edgellm.export.float_segments import ExpertSegment
from edgellm.export.reference_writer import reference_tokens, store_reference
from edgellm.export.source_checkpoint import open_source
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.linear import PackedWeights
from edgellm.kernels.step import Weights
from edgellm.progress import Progress, ProgressCallback
from edgellm.quantize.error import median_row_error, worst_line_error, worst_row_error
from edgellm.store.bundle import Bundle
from edgellm.store.key_basis import open_key_basis
from edgellm.store.manifest import PACKED, ImportSummary, imported
from edgellm.store.reference import Reference, open_reference, segment_error
from edgellm.text.tokenizer import Tokenizer

Floats = NDArray[np.float32]
# Number of tokens that are run one at a time.
_SINGLE = 20
# Allowed errors of int8 activations and KV cache: measured 0.034 in the worst segment and 0.051 in
# the worst hidden state of 257 tokens (SmolLM2-135M in Q4_1, all weights as in the file).
_SEGMENT, _PROMPT = 0.05, 0.1
# Allowed errors for weights that were rounded again, per mean error of the weights. With a mean
# error of 0.082 (Qwen2.5-Coder-0.5B in Q4_K_M as int4) a segment was 0.36 off and a prompt 0.27;
# with 0.069 (random, two layers, a sliding window) 0.33 and 0.50.
_ROUNDED_SEGMENT, _ROUNDED_PROMPT = 5.0, 7.5
# Allowed error, beside the others, for the median row of a model with experts: the router sends
# some tokens to others than float32 does, and those behind them see it.
_EXPERTS = 0.25
# Allowed difference of a row alone and in a longer prompt, which are the same bits.
_SAME = 1e-6
# Largest limit for a prompt, which goes through all layers; garbage has an error of 1.4.
_WRONG_PROMPT = 0.75
__all__ = ["Check", "Examined", "examine"]


def check_layers(bundle: Bundle, reference: Reference, model: StepBackend) -> Iterator[Check]:
    """Check the linear layers and norms of every segment, between two attentions.

    Behind a layer with experts the median row is judged: where two experts are nearly as good for a
    token, rounding chooses, and its row is far from float32 without a fault.
    """
    weights, limit = open_packed_weights(bundle), segment_limit(imported(bundle.manifest, PACKED))
    for index, rows in enumerate(reference.segments):
        routed = index > 0 and weights.layers[index - 1].routing is not None
        segment = _PackedSegment(bundle.config, index, model, weights)

        def run(
            inputs: Mapping[str, Floats], segment: _PackedSegment = segment
        ) -> Sequence[Floats]:
            return tuple(segment(inputs).values())

        error = median_row_error if routed else worst_line_error
        measured = segment_error(rows, run, None, error=error)
        yield Check(f"segment {index} in packed weights", measured, limit)


def check_step(
    reference: Reference,
    model: StepBackend,
    cache: KVCache,
    imported: ImportSummary,
    *,
    experts: bool = False,
) -> Generator[Check, None, None]:
    """Check fused steps: prompts around a tile of 16 rows and a cache block, single tokens, head.

    No prompt is longer than the context or than the reference.

    Args:
        experts: whether the model has experts. Then the longest prompt's median row is compared
            with float32, and all others with the longest prompt's rows.
    """
    longest = min(len(reference.tokens), cache.ctx_size)
    limit = prompt_limit(imported)
    edges = {1, 2, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, longest}
    judge = reference.hidden
    if experts:
        judge = _hidden(model, cache, [reference.tokens[:longest]])
        error = median_row_error(reference.hidden[:longest], judge)
        yield Check(f"prompt of {longest}", error, min(_WRONG_PROMPT, limit + _EXPERTS))
        edges, limit = edges - {longest}, _SAME
    for count in sorted(edge for edge in edges if edge <= longest):
        hidden = _hidden(model, cache, [reference.tokens[:count]])
        error = worst_row_error(judge[:count], hidden)
        yield Check(f"prompt of {count}", error, limit)
    singles = [[token] for token in reference.tokens[: min(_SINGLE, longest)]]
    error = worst_row_error(judge[: len(singles)], _hidden(model, cache, singles))
    yield Check(f"{len(singles)} tokens one at a time", error, limit)
    logits = model.logits(reference.hidden[-1:])
    yield Check("head", worst_row_error(reference.logits, logits), HEAD_LIMIT)


def segment_limit(imported: ImportSummary) -> float:
    """Return the error that the worst row or column of a segment may have."""
    return min(WRONG, _SEGMENT + _ROUNDED_SEGMENT * imported.mean_relative_error)


def prompt_limit(imported: ImportSummary) -> float:
    """Return the error that the worst hidden state of a prompt may have."""
    return min(_WRONG_PROMPT, _PROMPT + _ROUNDED_PROMPT * imported.mean_relative_error)


def _hidden(model: StepBackend, cache: KVCache, parts: Sequence[list[int]]) -> Floats:
    """Return the hidden states `[n, E]` of tokens, run in consecutive parts of one sequence."""
    sequence = cache.sequence()
    try:
        spans = (Span(sequence, part) for part in parts)
        return np.concatenate([model.run([span])[0].hidden for span in spans])
    finally:
        sequence.truncate(0)


class _PackedSegment(ExpertSegment):
    """A segment on packed weights, whose products are those of the step."""

    def __init__(
        self, config: ModelConfig, index: int, model: StepBackend, weights: Weights
    ) -> None:
        super().__init__(config, index, partial(_packed, weights))
        self._model = model

    def __call__(self, inputs: Mapping[str, Floats]) -> dict[str, Floats]:
        with np.errstate(over="ignore", invalid="ignore"):  # damaged weights may overflow
            return super().__call__(inputs)

    def _product(self, name: str, x: Floats, stacked: int = 0, stacks: int = 1) -> Floats:
        weight = self._tensor(name)
        if not isinstance(weight, PackedWeights):  # of a router
            return super()._product(name, x, stacked, stacks)
        panels = np.split(weight.data, stacks)[stacked]
        weight = replace(weight, data=panels, outputs=weight.outputs // stacks)
        product = self._model.linear(x, weight, fine=name.endswith(".v"))
        bias = f"{name}_bias"
        if bias in self._specs:
            product = product + np.split(self._tensor(bias), stacks)[stacked]
        return product


def _packed(weights: Weights, name: str) -> Any:
    """Return packed weights, or a vector, by the name of the tensor."""
    *layer, part = name.split(".")
    return getattr(weights.layers[int(layer[1])] if layer else weights, part)


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
        OptionError: the model was loaded with `rope_scale`, and float32 was computed without.
    """
    if engine.options.rope_scale is not None:
        raise OptionError(
            "`rope_scale`: results are compared with those of the model as it is; leave it out"
        )
    if isinstance(engine.prefill, ChunkedBackend):
        model = engine.prefill.model
        yield Examined(f"{model.segments.precision} on {engine.prefill.placement}")
        yield from check_segments(engine.bundle, model.segments)
        prompts = check_prompts(engine.bundle, model, engine.cache, engine.prefill.host)
        yield from engine.thread.each(prompts)
    steps = _steps(engine)
    if not steps:
        return

    summary = imported(engine.bundle.manifest, PACKED)
    with float_reference(engine.bundle, progress=progress) as reference:
        for name, step in steps.items():
            yield Examined(f"{PACKED} on {name}")
            yield from check_layers(engine.bundle, reference, step)
            prompts = check_step(
                reference, step, engine.cache, summary, experts=engine.config.has_experts
            )
            yield from engine.thread.each(prompts)


def _steps(engine: Engine) -> dict[str, StepBackend]:
    """Map names to the back ends of packed weights that prefill or decode run on."""
    steps, prefill = {}, engine.prefill
    host = prefill.host if isinstance(prefill, ChunkedBackend) else None
    for backend in (prefill, engine.decoder, host):
        if isinstance(backend, StepBackend):
            steps[backend.name] = backend
    return steps


# Chunk size in tokens for the reference text of a bundle whose graphs have no chunk sizes.
_CHUNK = 128


def _untested(config: ModelConfig) -> str:
    """Name a part of the model that `step_test` does not compute; empty: there is none."""
    attentions = config.attentions.values()
    parts = {
        "layers with states": config.has_states,
        "latents in place of K and V": any(each.latent for each in attentions),
        "layers that share K and V": any(each.kv_from is not None for each in attentions),
        "V made of K": any(each.k_as_v for each in attentions),
        "embeddings for each layer": config.layer_embedding is not None,
        "several residual streams": config.streams is not None,
        "products beside attention": any(layer.laurel is not None for layer in config.layers),
        "gates above a cutoff": any(layer.mlp.cutoff is not None for layer in config.layers),
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
