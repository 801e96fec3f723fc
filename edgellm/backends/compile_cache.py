"""Graphs compiled for an accelerator, kept in EDGELLM_HOME/compiled.

A vendor's compiler takes seconds to minutes and may crash, so it runs in a process of its own and
its results are kept: one folder for each bundle, precision, provider and everything else that they
depend on. A folder appears when it is complete, and a file that has changed since is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm.backends.onnx_runtime import onnx_runtime
from edgellm.backends.providers import PROVIDERS, add_provider, version
from edgellm.backends.thread_pool import session_options
from edgellm.errors import ProviderError, first_line
from edgellm.graphs.contract import part_file, parts
from edgellm.progress import Progress, ProgressCallback
from edgellm.store.bundle import Bundle
from edgellm.store.home import compiled_dir, file_safe, locked, replacing_folder, sha256_of

_CHECKSUMS = "sha256.json"


@dataclass(frozen=True)
class _Task:
    """One graph to compile."""

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
    """The folder with the compiled segments of a precision, under the names of the segments.

    Args:
        allow_fallback: keep what the compiler does not take as it is, for the CPU.
        progress: called with a label, graphs done and graphs in all, if anything is compiled.

    Raises:
        ProviderError: the compiler fails or crashes, or leaves a part of a graph to others.
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
    """Changes with the graphs and their weights, the versions of all tools, and the device."""
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
    """One process after the other would pay for the compiler's start with every graph."""
    # 12 ms that a load without an accelerator does not spend
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
    """Compilers print, and stdout is for the model's text."""
    os.dup2(2, 1)


def _compile(task: _Task) -> str:
    """In the other process: gives what went wrong, or an empty string."""
    import onnx_ir as ir

    ort = onnx_runtime()
    options = session_options()
    try:
        add_provider(options, task.provider, task.provider_options)
        compiler = ort.ModelCompiler(
            options,
            str(task.source),
            embed_compiled_data_into_model=False,  # a file beside it, which is mapped
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
