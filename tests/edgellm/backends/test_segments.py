from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.backends.segments import runner


class CopyingBinding:
    """As of a provider with memory of its own, which takes a value when it is bound."""

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}

    def bind_ortvalue_input(self, name: str, value: np.ndarray) -> None:
        self.values[name] = value.copy()


class Session:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def run_with_iobinding(self, binding: Any) -> None:
        self.seen.append(float(binding.values["x"].sum()))


def test_each_run_reads_what_the_buffers_hold_then() -> None:
    session, x = Session(), np.zeros(3)
    run = runner(session, CopyingBinding(), {"x": x})
    for value in (1, 2):
        x[:] = value
        run()
    assert session.seen == [3, 6]
