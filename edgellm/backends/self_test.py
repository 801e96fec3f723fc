"""Does an accelerator compute what it should? Asked of the user's machine, not of their chat.

Silent garbage at the edges of a chunk is the commonest fault of such runtimes, and a driver can be
broken on one machine only. All is compared with what the model gave in float32 when it was exported
(`reference.py`), so what happened to files or graphs since then shows as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.backend import Backend
from edgellm.backends.batch import Span
from edgellm.backends.forward import Model
from edgellm.backends.segments import Segments
from edgellm.cache.kv_cache import KVCache
from edgellm.errors import ProviderError
from edgellm.progress import Progress, ProgressCallback
from edgellm.quantize.error import worst_row_error
from edgellm.store.bundle import Bundle
from edgellm.store.reference import (
    PROMPT,
    Reference,
    Run,
    SegmentRows,
    error_name,
    joined,
    open_reference,
    read_rotation,
    segment_error,
)

Floats = NDArray[np.float32]
# What a provider's own rounding may add to the error that the exporter measured on the CPU: for
# Qualcomm's HTP it was at most a seventh of it, for half precision alone 0.003 (SmolLM2-135M).
_TIMES = 1.25
_SLACK = 0.02
# So much is wrong even if the exporter measured it.
WRONG = 0.5
# A quantized KV cache and embedding come on top in whole prompts.
_PROMPT_SLACK = 0.1
HEAD_LIMIT = 0.05
# In a folder of compiled graphs: they have been checked.
_CHECKED = "checked"


@dataclass(frozen=True)
class Check:
    """One comparison with float32.

    Attributes:
        name: `segment i in chunks of C`, `prompt of N in chunks of C` or `head`.
        error: of the worst row or column, over its size.
        limit: what it may be.
    """

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


def check_segments(bundle: Bundle, segments: Segments) -> Iterator[Check]:
    """Every segment of every chunk size, with what the host does in the middle of it."""
    reference, entry = _reference(bundle), bundle.precision(segments.precision)
    rotation = read_rotation(bundle.path, entry)
    for chunk in segments.chunk_sizes:
        for index, kept in enumerate(reference.segments):
            rows = SegmentRows(_repeated(kept.inputs, chunk), _repeated(kept.outputs, chunk))
            error = segment_error(rows, _run(segments, index, chunk), rotation)
            limit = _limit(entry.errors[error_name(index)], _SLACK)
            yield Check(f"segment {index} in chunks of {chunk}", error, limit)


def check_prompts(
    bundle: Bundle, model: Model, cache: KVCache, host: Backend | None
) -> Iterator[Check]:
    """Prompts of 1, C-1, C, C+1 and 2C tokens for each chunk size C, and the LM head.

    No longer ones than the context holds, or than the reference is.

    `host` computes the first tokens where the precision leaves them to it; else it is not needed.
    """
    reference, entry = _reference(bundle), bundle.precision(model.segments.precision)
    start = entry.host_tokens
    longest = min(len(reference.tokens), cache.ctx_size) - start
    limit = _limit(entry.errors[PROMPT], _PROMPT_SLACK)
    for chunk in model.segments.chunk_sizes:
        edges = {1, max(1, chunk - 1), chunk, chunk + 1, 2 * chunk}
        for count in sorted({min(count, longest) for count in edges} - {0}):
            tokens = reference.tokens[: start + count]
            hidden = _hidden(model, cache, host, tokens, chunk)
            error = worst_row_error(reference.hidden[start : len(tokens)], hidden)
            yield Check(f"prompt of {count} in chunks of {chunk}", error, limit)
    logits = model.head.logits(reference.hidden[-1:])
    yield Check("head", worst_row_error(reference.logits, logits), HEAD_LIMIT)


def check_once(bundle: Bundle, segments: Segments, progress: ProgressCallback | None) -> None:
    """Check the segments of a provider that compiles, the first time after a compilation.

    Raises:
        ProviderError: see `require`.
    """
    if segments.compiled is None or (segments.compiled / _CHECKED).exists():
        return
    checks = check_segments(bundle, segments)
    require(_counted(checks, segments, progress) if progress else checks)
    (segments.compiled / _CHECKED).touch()


def _counted(
    checks: Iterator[Check], segments: Segments, progress: ProgressCallback
) -> Iterator[Check]:
    total = len(segments.chunk_sizes) * (segments.config.layer_count + 1)
    for done, check in enumerate(checks, 1):
        progress(Progress("self-test", done, total))
        yield check


def require(checks: Iterator[Check]) -> None:
    """Raise at the first check that fails.

    Raises:
        ProviderError: it names the check and the error.
    """
    for check in checks:
        if not check.passed:
            raise ProviderError(
                f"self-test: {check.name} is wrong by {check.error:.2g} (at most {check.limit:.2g} "
                "is allowed): the provider, its driver, what it compiled or the bundle "
                "is broken; `edgellm doctor` shows all of it, `prefill` cpu does without"
            )


def _reference(bundle: Bundle) -> Reference:
    return open_reference(bundle.path, bundle.config, bundle.manifest.reference)


def _limit(expected: float, slack: float) -> float:
    """From the error that the exporter measured with ONNX Runtime on its CPU."""
    return min(WRONG, _TIMES * expected + slack)


def _repeated(rows: Mapping[str, Floats], chunk: int) -> dict[str, Floats]:
    """As many as a static graph takes: each row is computed by itself."""
    return {name: np.resize(values, (chunk, values.shape[1])) for name, values in rows.items()}


def _run(segments: Segments, index: int, chunk: int) -> Run:
    up, *down = [
        partial(segments.run, position, chunk)
        for position, part in enumerate(segments.parts)
        if part.index == index
    ]
    return joined(up, down[0], segments.shadows[index]) if down else up


def _hidden(
    model: Model, cache: KVCache, host: Backend | None, tokens: list[int], chunk: int
) -> Floats:
    """Hidden states of `tokens` but those that are the host's, `[n, E]`."""
    sequence, start = cache.sequence(), model.segments.host_tokens
    try:
        if start:
            assert host is not None
            host.run([Span(sequence, tokens[:start])])
        parts = [tokens[i : i + chunk] for i in range(start, len(tokens), chunk)]
        return np.concatenate([model.forward(p, sequence, chunk=chunk).copy() for p in parts])
    finally:
        sequence.truncate(0)
