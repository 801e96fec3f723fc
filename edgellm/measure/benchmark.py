"""Speed of prefill and decode, in llama-bench's terms: pp512, tg128, `@ d` for depth."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from edgellm.backends.registry import NATIVE
from edgellm.engine.adapters import LoadedAdapter
from edgellm.engine.engine import Engine
from edgellm.engine.one_sequence import Hooks, best_next, compute_prompt
from edgellm.errors import OptionError
from edgellm.graphs.tensors import parameters
from edgellm.machine import cpu_name, peak_memory_bytes
from edgellm.measure.explain import limits
from edgellm.measure.roofline import work_of
from edgellm.progress import Progress, ProgressCallback

# Options with which rows read a part of the KV cache.
_PARTS = ("kv_read", "kv_budget", "prefill_mass")


@dataclass(frozen=True)
class BenchResult:
    """Result of one speed test.

    Attributes:
        test: name of the test, e.g. `pp512`, `tg128 @ d2048`.
        n_prompt, n_gen, n_depth: tokens of the prompt, generated tokens, cached tokens before.
        tokens_per_second, stddev: mean and standard deviation over the samples.
        samples_s: seconds of each repetition.
    """

    test: str
    n_prompt: int
    n_gen: int
    n_depth: int
    tokens_per_second: float
    stddev: float
    samples_s: tuple[float, ...]


def bench(
    engine: Engine,
    *,
    prompts: SequenceOf[int] = (512,),
    generations: SequenceOf[int] = (128,),
    depths: SequenceOf[int] = (0,),
    repetitions: int = 5,
    adapter: str | None = None,
    progress: ProgressCallback | None = None,
) -> list[BenchResult]:
    """Time prefill of each prompt size and decode of each generation size at each depth.

    Each test runs once to warm up; tokenization and sampling are left out, as llama-bench does.

    Args:
        adapter: loaded adapter; None: the model as it is.

    Raises:
        OptionError: a size is negative or does not fit into the context, or there is no test.
    """
    _check_sizes(prompts=prompts, generations=generations, depths=depths)
    if repetitions < 1:
        raise OptionError(f"`repetitions` is {repetitions}; allowed is 1 or more")
    kinds = [*((p, 0) for p in prompts if p), *((0, g) for g in generations if g)]
    tests = [(prompt, generation, d) for d in depths for prompt, generation in kinds]
    if not tests:
        raise OptionError("nothing to measure: give `prompts` or `generations` a size above 0")
    for prompt, generation, depth in tests:
        if prompt + generation + depth > engine.ctx_size:
            whole = engine.ctx_size == engine.config.context_length
            raise OptionError(
                f"{_name(prompt, generation, depth)} needs {prompt + generation + depth} tokens, "
                f"which do not fit into a context of {engine.ctx_size}; "
                + (
                    "the model takes no more without a larger `rope_scale`"
                    if whole
                    else "raise `ctx_size`"
                )
            )
    loaded = engine.adapters.get(adapter)
    results = []
    for prompt, generation, depth in tests:
        samples = []
        for repetition in range(repetitions + 1):
            seconds = _run(engine, prompt, generation, depth, loaded)
            if repetition:
                samples.append(seconds)
            if progress is not None:
                label = _name(prompt, generation, depth)
                progress(Progress(label, repetition + 1, repetitions + 1))
        rates = [(prompt + generation) / seconds for seconds in samples]
        results.append(
            BenchResult(
                _name(prompt, generation, depth),
                prompt,
                generation,
                depth,
                statistics.mean(rates),
                statistics.stdev(rates) if len(rates) > 1 else 0.0,
                tuple(samples),
            )
        )
    return results


def environment(engine: Engine) -> dict[str, Any]:
    """Describe the version, machine, model and settings that the numbers were measured with."""
    manifest = engine.bundle.manifest
    return {
        "version": importlib.metadata.version("edgellm"),
        "commit": _commit(),
        "onnxruntime": importlib.metadata.version("onnxruntime"),
        "cpu": cpu_name(),
        "threads": engine.threads,
        "model": manifest.name,
        "model_size": manifest.source_bytes,
        "model_n_params": parameters(manifest.config),
        "prefill": engine.prefill.placement.provider,
        "prefill_precision": engine.prefill.precision,
        "decode": engine.decoder.name,
        "decode_precision": engine.decoder.precision,
        "kv_format": engine.options.kv_text,
        **{part: getattr(engine.options, part) for part in _PARTS},
        "ctx_size": engine.ctx_size,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def shares(results: SequenceOf[BenchResult], engine: Engine) -> list[str]:
    """Compare results with the processor's arithmetic and memory, a line each.

    There is none on a GPU, nor where a part of the cache is seen or read.

    A prompt is bound by the peak of 8-bit products, and decode by how fast memory is read.
    """
    if NATIVE not in (engine.prefill.placement.provider, engine.decoder.name):
        return []
    if any(getattr(engine.options, part) is not None for part in _PARTS):
        return []
    limit = limits(engine, 1)
    lines = []
    for result in results:
        work = work_of(
            engine.bundle,
            result.n_depth + max(result.n_prompt, result.n_gen // 2),
            precision=engine.decoder.precision,
            kv_format=engine.options.kv_format,
        )
        if result.n_prompt and limit.prefill.peak is not None and not result.n_depth:
            flops = result.tokens_per_second * work.prefill_flops
            lines.append(
                f"{result.test}: {flops / 1e9:.0f} GOP/s, {flops / limit.prefill.peak:.0%} of the "
                f"arithmetic peak ({limit.prefill.peak / 1e9:.0f} GOP/s)"
            )
        elif result.n_gen and limit.decode.peak is not None:
            read = result.tokens_per_second * work.decode_bytes
            lines.append(
                f"{result.test}: {read / 1e9:.1f} GB/s, {read / limit.decode.read_bytes:.0%} of a "
                f"plain read ({limit.decode.read_bytes / 1e9:.1f} GB/s)"
            )
    return lines


def to_json(results: SequenceOf[BenchResult], engine: Engine) -> str:
    return json.dumps([{**environment(engine), **asdict(result)} for result in results], indent=1)


def to_markdown(results: SequenceOf[BenchResult], engine: Engine) -> str:
    setting = environment(engine)
    head = "| model | params | backend | kv | threads | test | t/s |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    backend = (
        f"{setting['prefill']} {setting['prefill_precision']} + {setting['decode']} "
        f"{setting['decode_precision']}"
    )
    parts = (f" {part} {setting[part]}" for part in _PARTS if setting[part])
    kv = setting["kv_format"] + "".join(parts)
    for result in results:
        lines.append(
            f"| {setting['model']} | {setting['model_n_params'] / 1e6:.1f} M | {backend} | "
            f"{kv} | {setting['threads']} | {result.test} | "
            f"{result.tokens_per_second:.1f} ± {result.stddev:.1f} |"
        )
    lines.append(
        f"\n{setting['cpu']}, edgellm {setting['version']} ({setting['commit'] or 'no commit'})"
    )
    lines.extend(shares(results, engine))
    if engine.expert_memory is not None:
        use = engine.expert_memory.use
        hits = f"{100 * use.hit_rate:.1f} % of their uses"
        lines.append(f"experts in memory: {hits}; {use.bytes_read / 1e9:.3g} GB read")
    return "\n".join(lines)


def _check_sizes(**sizes: SequenceOf[int]) -> None:
    for name, values in sizes.items():
        for size in values:
            if size < 0:
                raise OptionError(f"`{name}`: {size} tokens; allowed is 0 or more")


def _name(prompt: int, generation: int, depth: int) -> str:
    test = f"pp{prompt}" if prompt else f"tg{generation}"
    return f"{test} @ d{depth}" if depth else test


def _run(
    engine: Engine, prompt: int, generation: int, depth: int, adapter: LoadedAdapter | None
) -> float:
    """Return the seconds of one repetition on a fresh sequence; filling the depth is not timed."""
    vocabulary = engine.config.vocab_size
    tokens = [(31 * i + 7) % vocabulary for i in range(depth + max(prompt, 1))]
    stop = threading.Event()
    hooks = Hooks(cancel=stop, adapter=None if adapter is None else adapter.weights)

    def run() -> float:
        sequence = engine.cache.sequence()
        try:
            if depth:
                compute_prompt(engine.prefill, tokens[:depth], sequence, hooks)
            start = time.perf_counter()
            if prompt:
                compute_prompt(engine.prefill, tokens[depth:], sequence, hooks)
            token = tokens[-1]
            for _ in range(generation):
                token = best_next(engine.decoder, token, sequence, hooks)
            return time.perf_counter() - start
        finally:
            sequence.truncate(0)

    return engine.thread.call(run, stop=stop)


def _commit() -> str | None:
    """Return the git commit of an installation from a clone or repository; None for a release."""
    text = importlib.metadata.distribution("edgellm").read_text("direct_url.json")
    if text is None:
        return None
    origin = json.loads(text)
    if "vcs_info" in origin:
        return str(origin["vcs_info"].get("commit_id"))
    folder = Path(unquote(urlparse(origin.get("url", "")).path))
    try:
        completed = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return completed.stdout.strip() or None
