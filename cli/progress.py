"""Progress bars on stderr, silent where it is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

# A bar appears only where there is something to wait for.
_DELAY_S = 0.5


# A step of an export is a layer or a graph; a download counts bytes.
_MOST_STEPS = 10_000


@contextmanager
def export_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A callback for `edgellm.load(export_progress=...)`: what is done, a colon, and with what."""
    with _Bar() as bar:
        yield lambda label, done, total: bar.show(label, done, total, total > _MOST_STEPS)


@contextmanager
def count_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A callback that takes steps done and in all."""
    with _Bar() as bar:
        yield lambda done, total: bar.show(label, done, total, False)


class _Bar:
    """A bar that is made with the first step and gone with the last one."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def show(self, label: str, done: int, total: int, in_bytes: bool) -> None:
        what, _, step = label.partition(": ")
        if self._bar is None:
            self._bar = tqdm(
                total=total,
                desc=what,
                leave=False,
                disable=not sys.stderr.isatty(),
                delay=_DELAY_S,
                unit="B" if in_bytes else "it",
                unit_scale=in_bytes,
            )
        self._bar.set_description_str(what, refresh=False)
        self._bar.set_postfix_str(step, refresh=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
