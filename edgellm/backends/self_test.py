"""Self-test of an accelerator on the user's machine, before its faults show in a chat.

Silent garbage at the edges of a chunk is the commonest fault of such runtimes, and a driver can be
broken on one machine only. All results are compared with float32 results of the model from its
export (`reference.py`), so damage to files or graphs since then shows as well.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Backend, Span
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
# Factor and summand for a provider's own rounding, on the error that the exporter measured on the
# CPU: Qualcomm's HTP added at most a seventh, half precision alone 0.003 (SmolLM2-135M).
_TIMES = 1.25
_SLACK = 0.02
# An error from which on a result is wrong, even if the exporter measured as much.
WRONG = 0.5
# Summand for whole prompts, where a quantized KV cache and embedding come on top.
_PROMPT_SLACK = 0.1
HEAD_LIMIT = 0.05
# File that marks a folder of compiled graphs as checked.
_CHECKED = "checked"


@dataclass(frozen=True)
class Check:
    """A comparison with float32 results.

    Attributes:
        name: `segment i in chunks of C`, `prompt of N in chunks of C` or `head`.
        error: error of the worst row or column, over its size.
        limit: largest error that is allowed.
    """

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


def check_segments(bundle: Bundle, segments: Segments) -> Iterator[Check]:
    """Check every segment in every chunk size, with the host's part of a segment that is cut."""
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
) -> Generator[Check, None, None]:
    """Check prompts of 1, C-1, C, C+1 and 2C tokens for each chunk size C, and the LM head.

    Prompts are no longer than the context or the text of the reference. Where the precision leaves
    first tokens to the host, `host` computes these besides; otherwise it is not needed.
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
        ProviderError: see `require_segments`.
    """
    if segments.compiled is None or (segments.compiled / _CHECKED).exists():
        return
    require_segments(bundle, segments, progress)
    (segments.compiled / _CHECKED).touch()


def require_segments(bundle: Bundle, segments: Segments, progress: ProgressCallback | None) -> None:
    """Check every segment, up to the first that is wrong.

    Raises:
        ProviderError: a check failed; the message has its name and error.
    """
    total = len(segments.chunk_sizes) * (segments.config.layer_count + 1)
    for done, check in enumerate(check_segments(bundle, segments), 1):
        if progress is not None:
            progress(Progress("self-test", done, total))
        if not check.passed:
            raise ProviderError(
                f"self-test: {check.name} is wrong by {check.error:.2g} (at most {check.limit:.2g} "
                "is allowed): the provider, its driver, what it compiled or the bundle "
                "is broken; `edgellm doctor` shows all of it, `prefill` cpu does without"
            )


def _reference(bundle: Bundle) -> Reference:
    return open_reference(bundle.path, bundle.config, bundle.manifest.reference)


def _limit(expected: float, slack: float) -> float:
    """Return the largest error allowed where the exporter's CPU had the error `expected`."""
    return min(WRONG, _TIMES * expected + slack)


def _repeated(rows: Mapping[str, Floats], chunk: int) -> dict[str, Floats]:
    """Repeat rows to the number that a static graph takes: each row is computed by itself."""
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
    """Return hidden states `[n, E]` of `tokens`, without those first ones that are the host's."""
    sequence, start = cache.sequence(), model.segments.host_tokens
    try:
        if start:
            assert host is not None
            host.run([Span(sequence, tokens[:start])])
        parts = [tokens[i : i + chunk] for i in range(start, len(tokens), chunk)]
        return np.concatenate([model.forward(p, sequence, chunk=chunk).copy() for p in parts])
    finally:
        sequence.truncate(0)
