"""How far a download, an export, a prompt or a measurement has come: what callers are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Progress:
    """One piece of news for whoever waits.

    Attributes:
        label: what is being done and, behind a colon, with what: `exporting w8a8: segment 3`.
        done, total: how many units; `done` may stay what it was while the label changes.
        unit: bytes of a download, tokens of a prompt, and steps of everything else.
    """

    label: str
    done: int
    total: int
    unit: Literal["bytes", "steps", "tokens"] = "steps"


# Called in the thread that does the work, between two units of it.
ProgressCallback = Callable[[Progress], None]
