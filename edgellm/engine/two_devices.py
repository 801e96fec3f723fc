"""Prompts on one device while another one decodes: in which order, and how much of the time.

Pure Python; the thread is in `prefill_lane.py`. DistServe (arXiv:2401.09670) and Splitwise
(arXiv:2311.18677) split prefill and decode over machines; here both work on one KV cache, and what
is handed over is a block table and a length. That decode's time bounds prefill is Nexus' rule
(arXiv:2507.06608).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.checks import check_number
from edgellm.engine.policies import StallFree, StepBudget
from edgellm.engine.step_costs import StepCosts, StepLoad

# How much of what is known of prefill's time a job leaves.
_KEPT = 0.5
# Of a pace: decode steps without prefill beside them that show what decode takes, at first and
# later; steps beside prefill after which that is asked again, and by what factor the number of rows
# may change until then.
_FIRST_ALONE, _ALONE = 8, 2
_TRUSTED_STEPS, _TRUSTED_ROWS = 100, 1.25


@dataclass(frozen=True, kw_only=True)
class TwoDevices(StallFree):
    """Steps decode and nothing else; prompts go to the other device, in the order of `StallFree`.

    Every prompt does, whatever its length and whoever else is there: its bits do not depend on the
    load.
    """

    def budget(self, *, decodes: int, requests: int) -> StepBudget:
        return StepBudget(0.0, 0, 0)


class JobTime:
    """How long prefill may expect to take, so that a job ends within the time target.

    Chunks were measured by themselves. Beside decode, which has the host's cores as well, they take
    longer, and nobody knows by how much before.
    """

    def __init__(self) -> None:
        self._stretch = 1.0  # times as long as expected

    def expected_within(self, seconds: float) -> float:
        """What a job should take by itself that may take so many seconds beside decode."""
        return seconds / self._stretch

    def learn(self, expected: float, seconds: float) -> None:
        """A job took `seconds` that would have taken `expected` by itself."""
        if expected > 0:
            new = max(1.0, seconds / expected)
            self._stretch = _KEPT * self._stretch + (1 - _KEPT) * new


class Pace:
    """When the next rows of a prompt may begin, so that decode takes `slowdown` times as long.

    Each decode step beside prefill costs what it took longer than `slowdown` times what it takes
    alone, and each one alone earns what it might have taken longer. While too much is owed, prompts
    wait; when all has been paid, they go on. So decode is that much slower on average and no more,
    and prompts always go on: at the least 1 - 1 / slowdown of the time is theirs. Where prefill
    costs decode less, nothing waits.
    """

    def __init__(self, slowdown: float) -> None:
        check_number("slowdown", slowdown, 1.001)
        self._slowdown = slowdown
        self._costs = StepCosts()  # of decode alone
        self._owed = 0.0
        self._spaced = False
        self._missing = _FIRST_ALONE  # steps alone, before anything follows from steps beside
        self._beside = 0  # steps since the last one alone
        self._rows = 0  # of the last one alone

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
        """A decode step ran without prefill beside it."""
        self._costs.learn(load, seconds)
        self._missing = max(0, self._missing - 1)
        self._beside, self._rows = 0, load.rows
        self._owe(-(self._slowdown - 1) * seconds, seconds)

    def beside(self, load: StepLoad, seconds: float) -> None:
        """A decode step ran while prefill did, or for a part of it."""
        expected = self._costs.seconds(load)
        self._beside += 1
        few, many = sorted((load.rows, self._rows))
        if self._beside >= _TRUSTED_STEPS or many > _TRUSTED_ROWS * few:
            self._missing = max(self._missing, _ALONE)
        self._owe(seconds - self._slowdown * expected, expected)

    def _owe(self, seconds: float, step: float) -> None:
        # between a step's time too much and none there is hysteresis, and room for noise
        self._owed = max(-step, self._owed + seconds)
        if self._owed > step:
            self._spaced = True
        elif self._owed <= 0:
            self._spaced = False
