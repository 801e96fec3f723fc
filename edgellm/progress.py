"""Progress of a download, an export, a prompt or a measurement, as callers are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Progress:
    """A report on the progress of work that the caller waits for.

    Attributes:
        label: name of the work and, behind a colon, its current part: `exporting w8a8: segment 3`.
        done, total: number of units; `done` may stay the same while the label changes.
        unit: bytes of a download, tokens of a prompt, and steps of everything else.
    """

    label: str
    done: int
    total: int
    unit: Literal["bytes", "steps", "tokens"] = "steps"


# Function called in the thread that does the work, between two units of work.
ProgressCallback = Callable[[Progress], None]
