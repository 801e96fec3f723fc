"""Costs of chunks on this machine, measured once and kept beside the bundle."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edgellm.backends.batch import Backend, Span
from edgellm.backends.forward import Model
from edgellm.backends.planner import Costs
from edgellm.backends.providers import version
from edgellm.backends.registry import NATIVE
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.engine.measured import Measured, MeasuredPrompt, Samples, from_json, in_turns, to_json
from edgellm.errors import CancelledError
from edgellm.machine import cpu_name
from edgellm.store.bundle import COSTS
from edgellm.store.home import replacing_file

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
    return measured.costs()


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
        kept = Measured(measured.chunks, measured.step, prompt)
        _write(folder, {**known, key: to_json(kept)})


def known_costs(
    folder: Path, provider: str, precision: str, chunk_sizes: Sequence[int], *, threads: int
) -> Measured | None:
    """Return an earlier start's times of a provider that runs whole segments, beside a native step.

    Raises:
        ProviderError: the provider was there then and is not now.
    """
    known = _read(folder)
    if not any(_provider_of(key) == provider for key in known):
        return None
    measured = from_json(
        known.get(_key(provider, provider, precision, NATIVE, threads)), chunk_sizes
    )
    return measured if measured is not None and measured.step else None


def measure(
    model: Model, step: Backend | None, cache: KVCache, *, stop: threading.Event
) -> Measured:
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

    return Measured(of(True), of(False))


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


def _provider_of(key: str) -> str:
    return key.partition(" | ")[0]


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
