"""Progress bars on stderr, silent where it is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

# A bar appears only where there is something to wait for.
_DELAY_S = 0.5


@contextmanager
def export_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A callback for `edgellm.load(export_progress=...)`."""
    with _Bar("exporting") as bar:
        yield lambda label, done, total: bar.show(done, total, label)


@contextmanager
def count_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A callback that takes steps done and in all."""
    with _Bar(label) as bar:
        yield bar.show


class _Bar:
    """A bar that is made with the first step and gone with the last one."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: tqdm | None = None

    def show(self, done: int, total: int, step: str = "") -> None:
        if self._bar is None:
            hidden = not sys.stderr.isatty()
            self._bar = tqdm(
                total=total, desc=self._label, leave=False, disable=hidden, delay=_DELAY_S
            )
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
