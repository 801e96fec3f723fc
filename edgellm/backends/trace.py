"""Records of the tasks that ran and when, for people and for trace viewers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.backends.schedule import Processor
from edgellm.errors import OptionError
from edgellm.store.home import replacing_file

_THREADS: dict[Processor, int] = {"accelerator": 1, "host": 2}


@dataclass(frozen=True)
class TaskRecord:
    """A task that has run; `start_s` and `end_s` are seconds of `time.perf_counter`."""

    name: str
    chunk: int
    processor: Processor
    start_s: float
    end_s: float


def bubble_rate(records: Iterable[TaskRecord]) -> float:
    """Return the share of time in which the accelerator is idle between its first and last task.

    0 if it has no task.
    """
    busy = [(r.start_s, r.end_s) for r in records if r.processor == "accelerator"]
    if not busy:
        return 0.0
    span = max(end for _, end in busy) - min(start for start, _ in busy)
    return 1 - sum(end - start for start, end in busy) / span if span > 0 else 0.0


def chrome_trace(records: Sequence[TaskRecord]) -> dict[str, Any]:
    """Return the tasks in the Trace Event Format of chrome://tracing and ui.perfetto.dev."""
    begin = min((record.start_s for record in records), default=0.0)
    names: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": processor}}
        for processor, thread in _THREADS.items()
    ]
    tasks = [
        {
            "ph": "X",
            "name": record.name,
            "cat": record.processor,
            "pid": 1,
            "tid": _THREADS[record.processor],
            "ts": (record.start_s - begin) * 1e6,
            "dur": (record.end_s - record.start_s) * 1e6,
            "args": {"chunk": record.chunk},
        }
        for record in records
    ]
    return {
        "traceEvents": names + tasks,
        "displayTimeUnit": "ms",
        "otherData": {"accelerator_bubble_rate": bubble_rate(records)},
    }


def write_trace(path: Path, records: Sequence[TaskRecord]) -> None:
    """Write the `chrome_trace` of tasks to a file, whole or not at all.

    Raises:
        OptionError: the file cannot be written.
    """
    try:
        with replacing_file(path, lasting=False) as partial:
            partial.write_text(json.dumps(chrome_trace(records)), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"trace {path}: {error.strerror}; name another file") from None
