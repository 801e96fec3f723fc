"""Scheduling policies: the order of prompts, and the rows that a step may have. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from edgellm.checks import check_number
from edgellm.engine.step_costs import nearest_multiple
from edgellm.errors import OptionError

# Seconds of a step of a prompt that has the engine for itself, in time targets: a request that
# arrives during the step waits for its end, and is to begin within two.
_LONE_PROMPT = 1.5
# Minimum of prompt rows and maximum of decoding sequences in a step.
_MIN_ROWS, _DECODES = 32, 64


class Prompt(NamedTuple):
    """Properties of a prompt that decide its rank.

    Attributes:
        arrival: number of its arrival, smaller is earlier. Answers to one prompt have the same.
        priority: larger is more urgent.
        promised: whether it lost its place for want of blocks, or a place was taken for it.
        left: number of tokens that are not computed, at least 1.
        waited: prompt tokens that the engine computed, for all requests, since it began to wait.
    """

    arrival: int
    priority: int
    promised: bool
    left: int
    waited: int


class StepBudget(NamedTuple):
    """Bounds of one step: `seconds` give way to `min_rows` of prompts, never to `max_rows`.

    Attributes:
        resting_rows: maximum of rows of a prompt that may be parked; 0: none.
        chunk_rows: parked rows are a multiple of it, or all that is left of the prompt.
    """

    seconds: float
    min_rows: int
    max_rows: int
    resting_rows: int = 0
    chunk_rows: int = 1


class SchedulingPolicy(Protocol):
    """Rules that the scheduler follows.

    Attributes:
        max_running: maximum of requests that are admitted at once.
        max_decodes: maximum of requests that decode in one step; with more, they take turns.
        layers: number of layers of the model, where rows may be parked between them; else 1.
        quantum: rows computed, for all requests, while a prompt waits and another request runs,
            before the one may have the place of the other.
    """

    @property
    def quantum(self) -> float: ...

    @property
    def max_running(self) -> int: ...

    @property
    def max_decodes(self) -> int: ...

    @property
    def layers(self) -> int: ...

    def rank(self, prompt: Prompt) -> tuple[float, ...]:
        """Return the sort key of a prompt; the smallest goes first."""

    def budget(self, *, decodes: int, requests: int) -> StepBudget:
        """Return the bounds of a step; `decodes` of all `requests` (running or waiting) decode."""


@dataclass(frozen=True, kw_only=True)
class Serial:
    """Requests one after another, each to its end, first come, first served."""

    max_rows: int = 512
    max_running = max_decodes = layers = 1
    quantum = math.inf

    def __post_init__(self) -> None:
        check_number("max_rows", self.max_rows, 1, whole=True)

    def rank(self, prompt: Prompt) -> tuple[float, ...]:
        return (prompt.arrival,)

    def budget(self, *, decodes: int, requests: int) -> StepBudget:
        return StepBudget(math.inf, 1, self.max_rows)


@dataclass(frozen=True, kw_only=True)
class StallFree:
    """Decodes in each step, and as much of prompts as the time target leaves (Sarathi-Serve).

    Prompts go in the order of the highest response ratio in tokens (HRRN): short ones go first, and
    waiting ones grow more urgent, without a clock. Ageing stays within a priority. See
    arXiv:2403.02310.

    Attributes:
        time_target: seconds of a step that others wait for: the gap in a stream, and half of the
            time to first token of a short prompt behind long ones.
        min_rows: minimum of prompt rows in a step, even where decodes alone take as long: prompts
            always progress.
        max_rows: maximum of rows in a step.
        lone_rows: minimum of rows of a prompt without other requests, even where they take longer.
            512 rows in native steps of 128 take 0.93 to 1.1 times as long as in one (SmolLM2-135M
            at 0 and 3,500 tokens, Qwen2.5-0.5B at 0 and 2,000; two cores), in steps of 64 up to 1.3
            times.
        row_multiple: rows that steps are padded to a multiple of; `min_rows` is rounded to fit.
        quantum: rows after which a place may be taken. With 64 answers it is 16 tokens of each.
    """

    time_target: float = 0.100
    min_rows: int = 32
    max_rows: int = 512
    lone_rows: int = 128
    max_running: int = 64
    max_decodes: int = 64
    row_multiple: int = 1
    quantum: int = 1024
    layers = 1

    def __post_init__(self) -> None:
        check_number("time_target", self.time_target, 0.001)
        for name in (
            "min_rows",
            "max_rows",
            "lone_rows",
            "max_running",
            "max_decodes",
            "row_multiple",
            "quantum",
        ):
            check_number(name, getattr(self, name), 1, whole=True)
        if self.min_rows + self.max_decodes > self.max_rows:
            raise OptionError(
                f"`max_rows` is {self.max_rows}, but `max_decodes` ({self.max_decodes}) and "
                f"`min_rows` ({self.min_rows}) together are more; raise it or lower one of them"
            )

    def rank(self, prompt: Prompt) -> tuple[float, ...]:
        ratio = (prompt.waited + prompt.left) / prompt.left
        return (-prompt.priority, not prompt.promised, -ratio, prompt.left, prompt.arrival)

    def budget(self, *, decodes: int, requests: int) -> StepBudget:
        seconds, rows = self.time_target, self.min_rows
        if not decodes and requests == 1:
            seconds, rows = _LONE_PROMPT * seconds, self.lone_rows
        rows = nearest_multiple(decodes + rows, self.row_multiple) - decodes
        if rows < 1:
            rows += self.row_multiple
        return StepBudget(seconds, min(rows, self.max_rows), self.max_rows)


@dataclass(frozen=True, kw_only=True)
class Layered(StallFree):
    """`StallFree` where a long prompt yields to others between layers (arXiv:2510.08055).

    In a step in which others decode or wait, up to `resting_rows` of its rows go through as many
    layers as the time target leaves. So a weight is read once for all these rows, or for each chunk
    of them, and not once for the few that go through all layers in the same time.

    Attributes:
        layers: number of layers of the model.
        chunk_rows: rows of a chunk. Parked rows are a multiple of it, or the end of a prompt: they
            are in the same chunks whatever the load.
    """

    layers: int
    resting_rows: int = 512
    chunk_rows: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "resting_rows", "chunk_rows"):
            check_number(name, getattr(self, name), 1, whole=True)

    def budget(self, *, decodes: int, requests: int) -> StepBudget:
        budget = super().budget(decodes=decodes, requests=requests)
        resting = self.resting_rows if requests > 1 else 0
        return budget._replace(resting_rows=resting, chunk_rows=self.chunk_rows)


def chosen_policy(
    scheduling: str,
    *,
    time_target: float,
    max_rows: int,
    lone_rows: int,
    row_multiple: int,
    resting_rows: int,
    chunk_rows: int,
    layers: int,
) -> SchedulingPolicy:
    """Return the policy that `EngineOptions.scheduling` names.

    Args:
        resting_rows: maximum of rows of a prompt that may be parked.
    """
    if scheduling == "serial":
        return Serial(max_rows=max_rows)
    resting_rows = max(resting_rows // chunk_rows, 1) * chunk_rows
    layered = partial(Layered, layers=layers, resting_rows=resting_rows, chunk_rows=chunk_rows)
    chosen = layered if scheduling == "layered" else StallFree
    return chosen(
        time_target=time_target,
        max_rows=max_rows,
        lone_rows=lone_rows,
        min_rows=min(_MIN_ROWS, max_rows // 2),
        max_decodes=min(_DECODES, max_rows // 2),
        row_multiple=row_multiple,
    )
