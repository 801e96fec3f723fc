"""Does an accelerator compute what it should? Asked of the user's machine, not of their chat.

Silent garbage at the edges of a chunk is the commonest fault of such runtimes, and a driver can be
broken on one machine only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.bundle import Bundle, ExportProgress
from edgellm.decode import DecodeBackend
from edgellm.errors import ProviderError
from edgellm.forward import Model
from edgellm.graphs import contract
from edgellm.graphs.config import ModelConfig
from edgellm.kv_cache import KVCache
from edgellm.placement import open_session
from edgellm.providers import CPU
from edgellm.segments import Segments

Floats = NDArray[np.float32]
# Relative error of a segment's outputs. Half precision and another order of sums make 0.001; one
# wrong tile of a hundred makes 0.1.
LIMIT = 0.02
# Of hidden states after all layers, where the errors of segments add up.
PROMPT_LIMIT = 0.1
# In a folder of compiled graphs: they have been checked.
_CHECKED = "checked"
# Sizes of a fixed input; those of a residual stream and of attention in the middle of a model.
_SIZES = {
    contract.X: 0.1,
    contract.RESIDUAL: 3.0,
    contract.ATTENTION: 0.5,
    contract.ACTIVATED: 0.5,
}


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: a segment's file, or `prompt of N`.
        error: root-mean-square difference over the root-mean-square value expected.
        limit: what it may be.
    """

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


def check_segments(bundle: Bundle, segments: Segments) -> Iterator[Check]:
    """Every segment on its provider against the same graph on the CPU, on a fixed input."""
    for chunk in segments.chunk_sizes:
        for index, part in enumerate(segments.parts):
            inputs = _fixed_inputs(bundle.config, part, chunk)
            name = contract.part_file(part, chunk)
            path = bundle.path / segments.flavour / name
            session, _ = open_session(path, provider=CPU)
            expected = session.run(None, inputs)
            found = segments.run(index, chunk, inputs)
            error = max(map(relative_error, found, expected))
            yield Check(name, error, LIMIT)


def check_prompts(
    model: Model, reference: Model, cache: KVCache, host: DecodeBackend
) -> Iterator[Check]:
    """Prompts of 1, C-1, C, C+1 and 2C tokens for each chunk size C, against `reference`.

    `host` computes the first tokens for both, where the flavour leaves them to it.
    """
    rng = np.random.default_rng(0)
    for chunk in model.segments.chunk_sizes:
        for count in sorted({1, max(1, chunk - 1), chunk, chunk + 1, 2 * chunk}):
            tokens = rng.integers(0, model.config.vocab_size, count).tolist()
            found, expected = (_hidden(m, cache, host, tokens, chunk) for m in (model, reference))
            error = relative_error(found, expected)
            yield Check(f"prompt of {count} in chunks of {chunk}", error, PROMPT_LIMIT)


def check_once(bundle: Bundle, segments: Segments, progress: ExportProgress | None) -> None:
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
    checks: Iterator[Check], segments: Segments, progress: ExportProgress
) -> Iterator[Check]:
    total = len(segments.chunk_sizes) * len(segments.parts)
    for done, check in enumerate(checks, 1):
        progress("self-test", done, total)
        yield check


def require(checks: Iterator[Check]) -> None:
    """Raise at the first check that fails.

    Raises:
        ProviderError: it names the check and the error.
    """
    for check in checks:
        if not check.passed:
            raise ProviderError(
                f"self-test: {check.name} is wrong by {check.error:.3g} (at most {check.limit} is "
                "allowed): the provider or its driver is broken, or what it compiled; "
                "`edgellm doctor` shows all of it, --prefill cpu does without"
            )


def relative_error(found: Floats, expected: Floats) -> float:
    """Infinite where anything is not a number."""
    size = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(found.astype(np.float64) - expected)) / (size or 1.0)
    return error if np.isfinite(error) else float("inf")


def _fixed_inputs(config: ModelConfig, part: contract.Part, chunk: int) -> dict[str, Floats]:
    rng = np.random.default_rng(part.index)
    return {
        name: (_SIZES[name] * rng.standard_normal((chunk, width))).astype(np.float32)
        for name, width in contract.part_inputs(config, part).items()
    }


def _hidden(
    model: Model, cache: KVCache, host: DecodeBackend, tokens: list[int], chunk: int
) -> Floats:
    """Hidden states of `tokens` `[n, E]`, after those that are the host's."""
    sequence = cache.sequence()
    try:
        if model.segments.host_tokens:
            host.forward([0] * model.segments.host_tokens, sequence)
        parts = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        return np.concatenate([model.forward(p, sequence, chunk=chunk).copy() for p in parts])
    finally:
        sequence.truncate(0)
