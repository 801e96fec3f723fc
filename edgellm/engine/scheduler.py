"""Choice of the rows that the next step computes. Pure Python; knows no model and no cache."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, KeysView, Sequence
from typing import Generic

from edgellm.engine.admission import Admission, Entry, RequestT, Schedulable, SchedulerCounts
from edgellm.engine.policies import SchedulingPolicy, StepBudget
from edgellm.engine.prompt_rows import LayerGroups, PromptRows, Share
from edgellm.engine.step_costs import StepCosts, StepLoad

__all__ = ["Schedulable", "Scheduler", "SchedulerCounts", "Share"]

_NO_BOUNDS = StepBudget(math.inf, 1, sys.maxsize)


class Scheduler(Generic[RequestT]):
    """Scheduler of each step's rows: decodes first, then prompts in the order of the policy.

    Of several owners of requests, the one that was served the least goes first, whatever the
    policy, which orders the requests of one owner.

    A request waits until there is room for its whole prompt, and then runs until it is removed. It
    goes back to waiting when it is preempted or makes way for another one. No choice changes an
    answer.

    Args:
        policy: order of prompts, and bounds of a step.
        costs: predictor of a step's time.
        block_size: tokens of a KV block; prefixes are shared in whole blocks.
    """

    def __init__(
        self, *, policy: SchedulingPolicy, costs: StepCosts, block_size: int = 128
    ) -> None:
        self.policy, self.costs = policy, costs
        self._block_size = block_size
        self._admission: Admission[RequestT] = Admission(max_running=policy.max_running)

    @property
    def counts(self) -> SchedulerCounts:
        """Counts of rows, steps and requests so far."""
        return self._admission.counts

    @property
    def running(self) -> KeysView[RequestT]:
        """Running requests, in the order of their admission."""
        return self._admission.running.keys()

    @property
    def waiting(self) -> KeysView[RequestT]:
        """Waiting requests; the policy chooses which goes first."""
        return self._admission.waiting.keys()

    @property
    def wants_room(self) -> bool:
        """Whether a request waits for the place or the blocks of another one."""
        admission = self._admission
        if admission.refused is not None:
            return True
        return admission.full and any(not request.paused for request in admission.waiting)

    def add(self, request: RequestT) -> None:
        """Add a request, which waits for its admission."""
        self._admission.add(request)

    def remove(self, request: RequestT) -> None:
        """Forget a request that is finished or cancelled; one that has gone already is no error."""
        self._admission.remove(request)

    def start_again(self) -> None:
        """Forget all requests, but not the counts."""
        before = self._admission
        self._admission = Admission(max_running=self.policy.max_running, before=before)

    def next(self, admit: Callable[[RequestT], bool]) -> list[Share[RequestT]]:
        """Return the shares to compute now; empty if there are none, or the first finds no room.

        Args:
            admit: reserves blocks for all tokens of a request, after a match of its prefix, which
                may move `computed`; returns False, and leaves all as it was, if there are too few.
        """
        admission = self._admission
        self.counts.steps += 1
        shares = self._decodes()
        prompts = self._prompts()
        if prompts:
            running = sum(not request.paused for request in admission.running)
            requests = running + len(admission.waiting)
            budget = self.policy.budget(decodes=len(shares), requests=requests)
            self._prompt_rows(budget, shares, admit).add(prompts)
        return shares

    def next_prompt(self, admit: Callable[[RequestT], bool]) -> Share[RequestT] | None:
        """Return all that is left of the prompt first in line, for a device of its own; None: none.

        Args:
            admit: see `next`.
        """
        shares: list[Share[RequestT]] = []
        self._prompt_rows(_NO_BOUNDS, shares, admit).add(self._prompts(), most=1)
        return shares[0] if shares else None

    def preempt(self, *, but: RequestT | None = None) -> RequestT | None:
        """Send the newest running request of the lowest priority back to the front of the line.

        Of several owners, the one that was served the most loses a request. A request whose reader
        is slow goes before all others, and one that waits and has blocks before all that run. The
        caller frees its blocks. None if there is only one left.

        Args:
            but: request that keeps its blocks.
        """
        return self._admission.preempt(but=but)

    def make_way(self) -> RequestT | None:
        """Send a running request back to waiting for one that waits; None if there is no need.

        The owner with the most places loses one to the least served of all, if that has at least
        two fewer. Where all places are taken, one is also taken for a prompt that has waited a
        quantum, from a request that has run as long. The caller frees its blocks.
        """
        admission = self._admission
        if not admission.full and admission.refused is None:
            return None
        waiting = [e for e in admission.waiting.values() if not e.request.paused]
        line = self._prompt_rows(_NO_BOUNDS, [], lambda _: False).in_line(waiting)
        return admission.make_way(line, quantum=self.policy.quantum) if line else None

    def done(self, shares: Sequence[Share[RequestT]], seconds: float) -> None:
        """Learn the seconds of a step that has run `shares`; dropped shares are left out."""
        self.costs.learn(self.count(shares), seconds)

    def passed(self, share: Share[RequestT], seconds: float) -> None:
        """Learn the seconds of rows in a group of layers, in proportion for all layers."""
        layers = share.layers
        assert layers is not None
        self.count([share])
        self.costs.learn(share.load, seconds * layers.all / (layers.end - layers.first))

    def count(self, shares: Sequence[Share[RequestT]]) -> StepLoad:
        """Count computed rows, a part of them for a group of layers; returns the load of all."""
        load, served = StepLoad(), Counter[str]()
        for share in shares:
            load = load.plus(share.rows, share.start)
            rows = share.rows if share.layers is None else share.layers.part(share.rows)
            served[share.request.owner] += rows
            if share.decode:
                self.counts.decode_rows += rows
            else:
                self.counts.prefill_rows += rows
        self._admission.owners.serve(served)
        return load

    def _prompts(self) -> list[Entry[RequestT]]:
        """Return the entries that may have rows of prompts now."""
        admission = self._admission
        entries = [e for e in admission.running.values() if not e.request.decoding]
        if not admission.full:
            entries.extend(admission.waiting.values())
        return [entry for entry in entries if not entry.request.paused]

    def _prompt_rows(
        self,
        budget: StepBudget,
        shares: list[Share[RequestT]],
        admit: Callable[[RequestT], bool],
    ) -> PromptRows[RequestT]:
        kind = PromptRows if self.policy.layers == 1 else LayerGroups
        return kind(
            self._admission,
            self.policy,
            self.costs,
            budget,
            shares,
            reserve=admit,
            block_size=self._block_size,
        )

    def _decodes(self) -> list[Share[RequestT]]:
        """Return shares of the requests that decode; of too many, those that waited longest."""
        running = self._admission.running.values()
        ready = [e for e in running if e.request.decoding and not e.request.paused and e.left > 0]
        if len(ready) > self.policy.max_decodes:
            ready = sorted(ready, key=lambda e: e.last_decode)[: self.policy.max_decodes]
        for entry in ready:
            entry.last_decode = self.counts.steps
        return [Share(e.request, e.request.computed, e.left, decode=True) for e in ready]
