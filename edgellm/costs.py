"""Measure once what chunks cost on this machine, and keep it beside the bundle."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edgellm.bundle import COSTS
from edgellm.decode import DecodeBackend
from edgellm.forward import Model
from edgellm.home import replacing_file
from edgellm.kv_cache import KVCache
from edgellm.planner import Costs
from edgellm.providers import NATIVE, cpu_name, version
from edgellm.timing import best_seconds

# Lengths of the native step that give its line; each is timed as often, and the best counts.
_STEP_TOKENS = (4, 32)


def load_or_measure(
    folder: Path, model: Model, step: DecodeBackend | None, cache: KVCache, *, threads: int
) -> Costs:
    """The costs of a model's chunks, from an earlier start if nothing has changed since.

    Takes a few chunks' time the first time. A folder that cannot be written is measured each time.
    """
    segments = model.segments
    placement, host = segments.placement, None if step is None else step.name
    key = _key(placement.provider, placement.place, segments.flavour, host, threads)
    known = _read(folder / COSTS)
    costs = _from_json(known.get(key), segments.chunk_sizes)
    if costs is None:
        costs = measure(model, step, cache)
        _write(folder / COSTS, {**known, key: _to_json(costs)})
    return costs


def known_costs(
    folder: Path, provider: str, flavour: str, chunk_sizes: Sequence[int], *, threads: int
) -> Costs | None:
    """What an earlier start measured of a provider that runs segments whole, beside a native step.

    Raises:
        ProviderError: the provider was there then and is not now.
    """
    known = _read(folder / COSTS)
    if not any(_provider_of(key) == provider for key in known):
        return None
    return _from_json(known.get(_key(provider, provider, flavour, NATIVE, threads)), chunk_sizes)


def measure(model: Model, step: DecodeBackend | None, cache: KVCache) -> Costs:
    """Time each chunk size and, if there is one, the decode step on an empty sequence."""
    sequence = cache.sequence()

    def best(run: Callable[[list[int]], object], count: int) -> float:
        tokens = [0] * min(count, cache.ctx_size)  # padding costs as much

        def timed() -> None:
            run(tokens)
            sequence.truncate(0)

        return best_seconds(timed)

    chunks = {
        size: best(partial(model.forward, sequence=sequence, chunk=size), size)
        for size in model.segments.chunk_sizes
    }
    if step is None:
        return Costs(chunks)
    few, many = (best(partial(step.forward, sequence=sequence), count) for count in _STEP_TOKENS)
    token = max(0.0, (many - few) / (_STEP_TOKENS[1] - _STEP_TOKENS[0]))
    return Costs(chunks, max(0.0, few - token * _STEP_TOKENS[0]), token)


def _key(provider: str, place: str, flavour: str, host: str | None, threads: int) -> str:
    """Of everything that costs depend on; `host` is what takes short pieces, if any does."""
    parts = [place, cpu_name(), threads, version(provider), flavour, host]
    return " | ".join(map(str, [*parts, importlib.metadata.version("edgellm")]))


def _provider_of(key: str) -> str:
    return key.partition(" | ")[0]


def _to_json(costs: Costs) -> dict[str, Any]:
    chunks = {str(size): seconds for size, seconds in costs.chunks.items()}
    return {"chunks": chunks, "call": costs.call, "token": costs.token}


def _from_json(values: Any, chunk_sizes: Sequence[int]) -> Costs | None:
    """What `_to_json` wrote; None for anything else."""
    try:
        chunks = {size: float(values["chunks"][str(size)]) for size in chunk_sizes}
        call = None if values["call"] is None else float(values["call"])
        costs = Costs(chunks, call, float(values["token"]))
    except (KeyError, TypeError, ValueError):
        return None
    seconds = (*costs.chunks.values(), costs.call or 0.0, costs.token)
    return costs if all(0 <= s < math.inf for s in seconds) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write(path: Path, values: dict[str, Any]) -> None:
    try:
        with replacing_file(path) as partial:
            partial.write_text(json.dumps(values, indent=1), encoding="utf-8")
    except OSError:
        pass  # a read-only bundle is measured at each start
