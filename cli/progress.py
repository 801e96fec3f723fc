"""Progress bars on stderr, silent where it is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def export_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A callback for `edgellm.load(export_progress=...)`; the bar appears with the first call."""
    bars: list[tqdm] = []

    def show(label: str, done: int, total: int) -> None:
        if not bars:
            bars.append(_bar("exporting", total))
        bars[0].set_postfix_str(label, refresh=False)
        bars[0].update(done - bars[0].n)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()


@contextmanager
def count_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A callback that takes steps done and in all."""
    bars: list[tqdm] = []

    def show(done: int, total: int) -> None:
        if not bars:
            bars.append(_bar(label, total))
        bars[0].update(done - bars[0].n)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()


def _bar(label: str, total: int) -> tqdm:
    return tqdm(total=total, desc=label, leave=False, disable=not sys.stderr.isatty())
