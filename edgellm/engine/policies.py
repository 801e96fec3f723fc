"""In which order prompts are computed, and how many rows a step may have. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from edgellm.checks import check_number
from edgellm.engine.step_costs import nearest_multiple
from edgellm.errors import OptionError

# Seconds of a step of a prompt that has the engine for itself, in time targets: who arrives during
# it waits for its end, and is to begin within two.
_LONE_PROMPT = 1.5
# Of a step: rows of prompts at least, and sequences that decode at most.
_MIN_ROWS, _DECODES = 32, 64


class Prompt(NamedTuple):
    """What the order of a prompt follows from.

    Attributes:
        arrival: its number; who came first has the smallest. Answers to one prompt have the same.
        priority: larger is more urgent.
        promised: it lost its place for want of blocks, or a place was taken for it.
        left: tokens that are not computed, at least 1.
        waited: prompt tokens that the engine computed, of whomever, since this one arrived.
    """

    arrival: int
    priority: int
    promised: bool
    left: int
    waited: int


class StepBudget(NamedTuple):
    """Bounds of one step: `seconds` give way to `min_rows` of prompts, never to `max_rows`.

    Attributes:
        resting_rows: so many of a prompt, at most, may go through some of the layers, and through
            the others later; 0: none.
        chunk_rows: those are a multiple of it, or all that is left of the prompt.
    """

    seconds: float
    min_rows: int
    max_rows: int
    resting_rows: int = 0
    chunk_rows: int = 1


class SchedulingPolicy(Protocol):
    """What the scheduler asks.

    Attributes:
        max_running: requests that are admitted at once.
        max_decodes: requests that decode in one step; with more, they take turns.
        layers: of the model, where rows of prompts may rest between them; else 1.
        quantum: rows that are computed, of whomever, while a prompt waits and another request runs,
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
        """The smallest goes first."""

    def budget(self, *, decodes: int, requests: int) -> StepBudget:
        """Of a step in which so many of all requests (running or waiting) decode."""


@dataclass(frozen=True, kw_only=True)
class Serial:
    """One request after another to its end, first come, first served."""

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

    The order is that of the highest response ratio in tokens (HRRN): short prompts go first, and
    who waits grows more urgent, without a clock. Ageing stays within a priority. See
    arXiv:2403.02310.

    Attributes:
        time_target: seconds that a step may take for which somebody waits: the gap in a stream, and
            half of what a short prompt waits for its first token behind long ones.
        min_rows: of prompts, even where decodes alone take as long: prompts always progress.
        max_rows: of a step.
        lone_rows: of a prompt that has the engine for itself, even where they take longer. 512 rows
            in native steps of 128 take 0.93 to 1.1 times as long as in one (SmolLM2-135M at 0 and
            3,500 tokens, Qwen2.5-0.5B at 0 and 2,000; two cores), in steps of 64 up to 1.3 times.
        row_multiple: of a step's rows; those of prompts are at least as many as come nearest to it.
        quantum: of a place. With 64 answers it is 16 tokens of each.
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
    """As `StallFree`, but a long prompt yields to others between layers (arXiv:2510.08055).

    Of a step in which others decode or wait it has as many layers of up to `resting_rows` rows as
    the time target leaves. So a weight is read once for all these rows, or for each chunk of them,
    and not once for the few that go through all layers in as long.

    Attributes:
        layers: of the model.
        chunk_rows: of the chunks that rows are computed in. Rows that rest are a multiple of it, or
            the end of a prompt: in the same chunks whatever the load.
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
    """What `EngineOptions.scheduling` means for a model of so many layers, and steps of so many
    rows at most.

    Args:
        resting_rows: rows of a prompt that may rest between two layers.
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
