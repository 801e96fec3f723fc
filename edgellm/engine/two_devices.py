"""Scheduling of prompts on one device while another one decodes: order, and share of the time.

Pure Python; the thread is in `two_lanes.py`. DistServe (arXiv:2401.09670) and Splitwise
(arXiv:2311.18677) split prefill and decode over machines; here both work on one KV cache, and only
a block table and a length are handed over. The bound of prefill by decode's time is Nexus' rule
(arXiv:2507.06608).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.checks import check_number
from edgellm.engine.policies import StallFree
from edgellm.engine.prompt_rows import StepBudget
from edgellm.engine.step_costs import StepCosts, StepLoad

# Weight of what was known of prefill's time when a job has ended.
_KEPT = 0.5
# For `Pace`: decode steps without prefill beside them that show what decode takes, at first and
# later; steps beside prefill after which that is measured again, and the factor by which the number
# of rows may change until then.
_FIRST_ALONE, _ALONE = 8, 2
_TRUSTED_STEPS, _TRUSTED_ROWS = 100, 1.25


@dataclass(frozen=True, kw_only=True)
class TwoDevices(StallFree):
    """Steps decode and nothing else; prompts go to the other device, in the order of `StallFree`.

    Every prompt does, whatever its length and the other requests: its bits do not depend on the
    load.
    """

    def budget(self, *, decodes: int, requests: int) -> StepBudget:
        return StepBudget(0.0, 0, 0)


class JobTime:
    """Expected seconds of prefill jobs, so that a job ends within the time target.

    Chunks were measured by themselves. Beside decode, which has the host's cores as well, they take
    longer, by a factor that is learnt.
    """

    def __init__(self) -> None:
        self._stretch = 1.0  # times as long as expected

    def expected_within(self, seconds: float) -> float:
        """Return the seconds that a job should take by itself to take `seconds` beside decode."""
        return seconds / self._stretch

    def learn(self, expected: float, seconds: float) -> None:
        """Learn from a job that took `seconds`, and would have taken `expected` by itself."""
        if expected > 0:
            new = max(1.0, seconds / expected)
            self._stretch = _KEPT * self._stretch + (1 - _KEPT) * new


class Pace:
    """Pace of prefill that makes decode take `slowdown` times as long, and no longer.

    A decode step beside prefill adds to a debt what it took longer than `slowdown` times its time
    alone; a step alone pays back what it might have taken longer. With too much debt prompts wait,
    until all is paid. So decode is that much slower on average and no more, and prompts always go
    on: at the least 1 - 1 / slowdown of the time is theirs. Where prefill costs decode less,
    nothing waits.
    """

    def __init__(self, slowdown: float) -> None:
        check_number("slowdown", slowdown, 1.001)
        self._slowdown = slowdown
        self._costs = StepCosts()  # of decode alone
        self._owed = 0.0
        self._spaced = False
        self._missing = _FIRST_ALONE  # decode steps alone that are needed before more prefill
        self._beside = 0  # steps since the last one alone
        self._rows = 0  # of the last step alone

    @property
    def spaced(self) -> bool:
        """Whether prompts wait for decode."""
        return self._spaced

    def may_prefill(self, *, decodes: bool) -> bool:
        """Whether rows of a prompt may begin now.

        Args:
            decodes: whether anything is decoded meanwhile.
        """
        return not decodes or not (self._spaced or self._missing)

    def alone(self, load: StepLoad, seconds: float) -> None:
        """Learn from a decode step without prefill beside it."""
        self._costs.learn(load, seconds)
        self._missing = max(0, self._missing - 1)
        self._beside, self._rows = 0, load.rows
        self._owe(-(self._slowdown - 1) * seconds, seconds)

    def beside(self, load: StepLoad, seconds: float) -> None:
        """Count a decode step that ran while prefill did, or for a part of it."""
        expected = self._costs.seconds(load)
        self._beside += 1
        few, many = sorted((load.rows, self._rows))
        if self._beside >= _TRUSTED_STEPS or many > _TRUSTED_ROWS * few:
            self._missing = max(self._missing, _ALONE)
        self._owe(seconds - self._slowdown * expected, expected)

    def _owe(self, seconds: float, step: float) -> None:
        # hysteresis between a debt of a step's time and no debt, with room for noise
        self._owed = max(-step, self._owed + seconds)
        if self._owed > step:
            self._spaced = True
        elif self._owed <= 0:
            self._spaced = False
