"""Costs of chunks on this machine and of the native kernels, measured in turns, once, and kept."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from edgellm.backends.batch import Backend, Span
from edgellm.backends.forward import Model
from edgellm.backends.planner import Costs, MeasuredPrompt, Samples
from edgellm.backends.providers import version
from edgellm.backends.registry import NATIVE
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.errors import CancelledError
from edgellm.machine import cpu_name
from edgellm.store.bundle import COSTS
from edgellm.store.home import replacing_file

Key = TypeVar("Key")
Result = TypeVar("Result")
# A call that takes longer is timed once: an emulated accelerator needs minutes for a chunk.
_LONG_S = 1.0
# Time after which no further round of calls in turns begins.
_ROUNDS_S = 3.0
# Factor by which a provider must be faster, at the least that its times allow. Chunks were measured
# on an empty sequence and the native step at 128 tokens: 512 at once are 9 % faster.
MARGIN = 1.2


def repeated(run: Callable[[], Result], *, times: int = 3) -> list[tuple[float, Result]]:
    """Time some calls, only one if it takes long; return the seconds and result of each."""
    results = []
    for _ in range(times):
        begin = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begin
        results.append((seconds, result))
        if seconds > _LONG_S:
            break
    return results


def best_seconds(run: Callable[[], object], *, times: int = 3) -> float:
    """Return the seconds of the fastest of some calls."""
    return min(seconds for seconds, _ in repeated(run, times=times))


def in_turns(
    runs: Mapping[Key, Callable[[], object]], *, times: int = 5, limit_s: float = _ROUNDS_S
) -> dict[Key, Samples]:
    """Time calls to compare in rounds, so that other work on the machine disturbs all of them.

    The first round warms up and does not count, unless it takes so long that it is the only one.
    """
    rounds: list[dict[Key, float]] = []
    begin = time.perf_counter()
    while len(rounds) <= times and (not rounds or time.perf_counter() - begin < limit_s):
        rounds.append({key: _seconds(run) for key, run in runs.items()})
    counted = rounds[1:] or rounds
    return {key: tuple(seconds[key] for seconds in counted) for key in runs}


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def to_json(measured: Costs) -> dict[str, Any]:
    """Return times as JSON that `from_json` reads."""
    prompt = measured.prompt
    return {
        "chunks": {str(size): list(samples) for size, samples in measured.chunks.items()},
        "step": {str(count): list(samples) for count, samples in measured.step.items()},
        "prompt": prompt and [prompt.tokens, list(prompt.provider), list(prompt.native)],
    }


def from_json(values: Any, chunk_sizes: Sequence[int]) -> Costs | None:
    """Read the JSON of `to_json`, for chunks of these sizes; None for anything else."""
    try:
        chunks = {size: _samples(values["chunks"][str(size)]) for size in chunk_sizes}
        step = {int(count): _samples(times) for count, times in values["step"].items()}
        if any(count < 1 for count in step):
            return None
        if values["prompt"] is None:
            return Costs(chunks, step)
        tokens, provider, native = values["prompt"]
        prompt = MeasuredPrompt(int(tokens), _samples(provider), _samples(native))
        return Costs(chunks, step, prompt)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def _samples(values: Any) -> Samples:
    samples = tuple(map(float, values))
    if not samples or not all(0 < seconds < math.inf for seconds in samples):
        raise ValueError("times are positive numbers")
    return samples


# Format of the kept file; costs in a file of another format are measured again.
_FORMAT = 2
# Tokens of the two decode steps that are timed: a short tail, and at least a large chunk.
_FEW, _MANY = 8, 128


def load_or_measure(
    folder: Path,
    model: Model,
    step: Backend | None,
    cache: KVCache,
    *,
    threads: int,
    stop: threading.Event,
) -> Costs:
    """Return the costs of a model's chunks, from an earlier start if nothing has changed since.

    The first start measures for some chunks' time; so does each if `folder` is read-only.

    Raises:
        CancelledError: `stop` was set while it measured.
    """
    key = _key_of(model, step, threads=threads)
    known = _read(folder)
    measured = from_json(known.get(key), model.segments.chunk_sizes)
    if measured is None:
        measured = measure(model, step, cache, stop=stop)
        _write(folder, {**known, key: to_json(measured)})
    return measured


def keep_prompt(
    folder: Path,
    model: Model,
    step: Backend | None,
    prompt: MeasuredPrompt,
    *,
    threads: int,
) -> None:
    """Keep the times of a whole prompt, beside the costs of its chunks.

    A prompt shorter than the largest chunk is left out, and of two the longer is kept.
    """
    known, sizes = _read(folder), model.segments.chunk_sizes
    key = _key_of(model, step, threads=threads)
    measured = from_json(known.get(key), sizes)
    if measured is None or prompt.tokens < max(sizes):
        return
    if measured.prompt is None or measured.prompt.tokens <= prompt.tokens:
        _write(folder, {**known, key: to_json(replace(measured, prompt=prompt))})


def known_costs(
    folder: Path, provider: str, precision: str, chunk_sizes: Sequence[int], *, threads: int
) -> Costs | None:
    """Return an earlier start's times of a provider that runs whole segments, beside a native step.

    Raises:
        ProviderError: the provider was there then and is not now.
    """
    known = _read(folder)
    if not any(key.partition(" | ")[0] == provider for key in known):
        return None
    measured = from_json(
        known.get(_key(provider, provider, precision, NATIVE, threads)), chunk_sizes
    )
    return measured if measured is not None and measured.step else None


def measure(model: Model, step: Backend | None, cache: KVCache, *, stop: threading.Event) -> Costs:
    """Time each chunk size and, if there is one, the decode step on an empty sequence.

    Raises:
        CancelledError: `stop` was set.
    """
    sequence, sizes = cache.sequence(), model.segments.chunk_sizes
    runs: dict[tuple[bool, int], Callable[..., object]] = {
        (True, size): partial(model.forward, chunk=size) for size in sizes
    }
    if step is not None:
        many = min(max(_MANY, *sizes), cache.ctx_size)
        counts = (max(1, min(_FEW, many // 2)), many)
        runs |= {(False, count): partial(_run, step) for count in counts}

    def timed(count: int, forward: Callable[..., object]) -> None:
        if stop.is_set():
            raise CancelledError("the measurement was stopped")
        sequence.shareable = 0  # no other sequence is to begin with these tokens
        try:
            forward([0] * min(count, cache.ctx_size), sequence=sequence)  # padding costs as much
        finally:
            sequence.truncate(0)

    samples = in_turns({key: partial(timed, key[1], forward) for key, forward in runs.items()})

    def of(chunks: bool) -> dict[int, Samples]:
        return {count: times for (kind, count), times in samples.items() if kind is chunks}

    return Costs(of(True), of(False))


def _run(backend: Backend, tokens: Sequence[int], *, sequence: CachedSequence) -> None:
    backend.run([Span(sequence, tokens)])


def _key_of(model: Model, step: Backend | None, *, threads: int) -> str:
    placement, host = model.segments.placement, None if step is None else step.name
    precision = model.segments.precision
    return _key(placement.provider, placement.place, precision, host, threads)


def _key(provider: str, place: str, precision: str, host: str | None, threads: int) -> str:
    """Return a key of all that costs depend on; `host`: back end of short chunks, or None."""
    import importlib.metadata  # 13 ms that only chunks of graphs need

    parts = [place, cpu_name(), threads, version(provider), precision, host]
    return " | ".join(map(str, [*parts, importlib.metadata.version("edgellm")]))


def _read(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / COSTS).read_text(encoding="utf-8"))
        measured = values["measured"] if values["format"] == _FORMAT else {}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return {}
    return measured if isinstance(measured, dict) else {}


def _write(folder: Path, measured: dict[str, Any]) -> None:
    try:
        with replacing_file(folder / COSTS, lasting=False) as temporary:
            text = json.dumps({"format": _FORMAT, "measured": measured}, indent=1)
            temporary.write_text(text, encoding="utf-8")
    except OSError:
        pass  # a read-only bundle is measured at each start
