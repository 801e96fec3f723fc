"""Scheduling policies: the order of prompts, and the rows that a step may have. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgellm.checks import check_number
from edgellm.engine.prompt_rows import Prompt, PromptRows, StepBudget
from edgellm.engine.step_costs import nearest_multiple
from edgellm.errors import OptionError

# Seconds of a step of a prompt that has the engine for itself, in time targets: a request that
# arrives during the step waits for its end, and is to begin within two.
_LONE_PROMPT = 1.5


@dataclass(frozen=True, kw_only=True)
class Serial:
    """Requests one after another, each to its end, first come, first served."""

    max_rows: int = 512
    max_running = max_decodes = 1
    prompt_rows = PromptRows
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
    prompt_rows = PromptRows

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
