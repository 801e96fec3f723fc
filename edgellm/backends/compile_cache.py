"""Graphs compiled for an accelerator, kept in EDGELLM_HOME/compiled.

A vendor's compiler takes seconds to minutes and may crash, so it runs in a process of its own and
its results are kept: one folder for each bundle, precision, provider and all other inputs of the
compiler. A folder appears when it is complete, and a file that has changed since is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm.backends.providers import PROVIDERS, add_provider, version
from edgellm.backends.thread_pool import onnx_runtime, session_options
from edgellm.errors import ProviderError, first_line
from edgellm.graphs.contract import part_file, parts
from edgellm.progress import Progress, ProgressCallback
from edgellm.store.bundle import Bundle
from edgellm.store.home import compiled_dir, file_safe, locked, replacing_folder, sha256_of

_CHECKSUMS = "sha256.json"


@dataclass(frozen=True)
class _Task:
    """A graph to compile for a provider."""

    source: Path
    target: Path
    provider: str
    provider_options: Mapping[str, str]
    allow_fallback: bool


def compiled(
    bundle: Bundle,
    precision: str,
    *,
    provider: str,
    provider_options: Mapping[str, str],
    allow_fallback: bool = False,
    progress: ProgressCallback | None = None,
) -> Path:
    """Return the folder of a precision's compiled segments, compiled now if they are not there.

    The files have the names of the segments.

    Args:
        allow_fallback: keep nodes that the compiler does not take as they are, for the CPU.
        progress: told how many of the graphs are compiled, if any is.

    Raises:
        ProviderError: the compiler fails or crashes, or leaves nodes of a graph to the CPU without
            `allow_fallback`.
    """
    key = _key(bundle, precision, provider, provider_options, allow_fallback)
    folder = compiled_dir() / f"{file_safe(bundle.manifest.name)}-{precision}-{provider}-{key}"
    if _intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if not _intact(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with replacing_folder(folder) as partial:
                tasks = [
                    _Task(
                        bundle.path / precision / name,
                        partial / name,
                        provider,
                        provider_options,
                        allow_fallback,
                    )
                    for name in _names(bundle, precision)
                ]
                _compile_all(tasks, progress)
                sums = {path.name: sha256_of(path) for path in sorted(partial.iterdir())}
                (partial / _CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")
    return folder


def _names(bundle: Bundle, precision: str) -> list[str]:
    entry = bundle.precision(precision)
    graphs = parts(bundle.config, entry.cut_segments)
    return [part_file(part, size) for size in entry.chunk_sizes for part in graphs]


def _key(
    bundle: Bundle,
    precision: str,
    provider: str,
    provider_options: Mapping[str, str],
    allow_fallback: bool,
) -> str:
    """Return a hash of the graphs and their weights, the versions of all tools, and the device."""
    onnxruntime = onnx_runtime()

    prefix = f"{precision}/"
    files = {n: f.sha256 for n, f in bundle.manifest.files.items() if n.startswith(prefix)}
    versions = [onnxruntime.__version__, version(provider)]
    inputs = [files, *versions, dict(provider_options), allow_fallback]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _intact(folder: Path) -> bool:
    try:
        sums = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        return all(sha256_of(folder / name) == digest for name, digest in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _compile_all(tasks: Sequence[_Task], progress: ProgressCallback | None) -> None:
    """Compile all graphs in one other process.

    A process for each graph would pay for the compiler's start every time.

    Raises:
        ProviderError: the compiler fails or crashes.
    """
    # imported here: a load without an accelerator does not spend the 12 ms
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_print_to_stderr) as pool:
        for done, task in enumerate(tasks):
            if progress is not None:
                progress(Progress(f"compiling {task.source.name}", done, len(tasks)))
            try:
                problem = pool.submit(_compile, task).result()
            except BrokenProcessPool:
                problem = "its compiler crashed"
            if problem:
                raise ProviderError(f"{task.provider}: {task.source}: {problem}")
    if progress is not None:
        progress(Progress("compiled", len(tasks), len(tasks)))


def _print_to_stderr() -> None:
    """Send stdout to stderr: compilers print, and stdout is for the model's text."""
    os.dup2(2, 1)


def _compile(task: _Task) -> str:
    """Compile a graph, in the other process; return the problem in words, or an empty string."""
    import onnx_ir as ir

    ort = onnx_runtime()
    options = session_options()
    try:
        add_provider(options, task.provider, task.provider_options)
        compiler = ort.ModelCompiler(
            options,
            str(task.source),
            embed_compiled_data_into_model=False,  # in a file beside the graph, which is mapped
            graph_optimization_level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
        )
        compiler.compile_to_file(str(task.target))
        nodes = list(ir.load(task.target).graph)
    except Exception as error:  # onnxruntime's exceptions share no base class
        return first_line(error)
    left = [f"{node.name} ({node.op_type})" for node in nodes if node.op_type != "EPContext"]
    if left and not task.allow_fallback:
        name = PROVIDERS[task.provider].ort_name
        some = ", ".join(left[:8])
        return f"{name} does not take {len(left)} nodes: {some}; `allow_fallback` leaves them"
    return ""
