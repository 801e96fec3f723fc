"""Progress bars on stderr; where it is not a terminal, lines about downloads and long work.

These may take minutes, and a user may look at a log meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
from tqdm import tqdm

from edgellm import LLM, LoadArguments, Progress, load
from edgellm.progress import ProgressCallback

# Delay of a progress bar: none appears where there is nothing to wait for.
_DELAY_S = 0.5
# Seconds between two lines about work that goes on where stderr is no terminal.
_EVERY_S = 10.0
_UNITS = {"bytes": "B", "steps": "it", "tokens": "tok"}


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """Yield a callback for all functions with a `progress` parameter."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    bar = _Bar()
    try:
        yield bar.show
    finally:
        bar.close()


def loaded(name: str, load_arguments: LoadArguments) -> LLM:
    """Load a model behind a progress bar."""
    with progress_bar() as progress:
        return load(name, **load_arguments, progress=progress)


class _Lines:
    """Lines about downloads, one when it begins and one when it is complete, and about other work
    that takes long."""

    def __init__(self) -> None:
        self._label: str | None = None
        self._done = 0
        self._began_at = 0.0
        self._said_at = time.monotonic()

    def show(self, progress: Progress) -> None:
        if progress.unit != "bytes":
            now = time.monotonic()
            if now - self._said_at >= _EVERY_S:
                self._said_at = now
                click.echo(f"{progress.label} ({progress.done} of {progress.total})", err=True)
            return
        if progress.label != self._label or progress.done < self._done:  # or the same one again
            self._label, self._began_at = progress.label, time.monotonic()
            click.echo(f"{progress.label} ({progress.total / 1e6:.1f} MB)", err=True)
        if progress.done >= progress.total:
            seconds = time.monotonic() - self._began_at
            click.echo(f"{progress.label}: done in {seconds:.0f} s", err=True)
            self._label = None
        self._done = progress.done


class _Bar:
    """Progress bar that appears with the first step and vanishes with the last one."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def show(self, progress: Progress) -> None:
        what, _, step = progress.label.partition(": ")
        if self._bar is None:
            self._bar = tqdm(
                total=progress.total,
                desc=what,
                leave=False,
                delay=_DELAY_S,
                unit=_UNITS[progress.unit],
                unit_scale=progress.unit == "bytes",
            )
        self._bar.set_description_str(what, refresh=False)
        self._bar.set_postfix_str(step, refresh=False)
        self._bar.update(progress.done - self._bar.n)
        if progress.done >= progress.total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
