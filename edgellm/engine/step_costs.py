"""Predicted time of a step of many sequences: a law of few parts, learnt while the engine runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Few rows are bound by reading the weights, many by arithmetic: the slope has a knee between them.
_KNEE = 16
# Seconds of each part before anything was learnt: the call, a row up to the knee, a row beyond it,
# a span (its row of logits), 1,000 positions that rows attend to. With the margin, 100 ms hold 37
# rows and a decode.
_FIRST_GUESS = (4e-3, 1.43e-3, 1.43e-3, 0.5e-3, 0.5e-3)
_PARTS = range(len(_FIRST_GUESS))
# Factor on a step's weight with each later step that resembles it: some 30 count.
_FORGETTING = 0.97
# Variance of the first guess, beside a measured step.
_DOUBT = 100.0
# Two standard deviations of a measured step, relative to its time: `rows_within` leaves as many of
# its prediction free. After 32 rows of the first prompt, 512 were predicted to take 67 ms, and took
# 396. Once steps are known, it leaves 1 % of the rows out.
_MARGIN = 0.1
# `_STEPS_OFF` steps in a row, each `_OFF` times slower (or faster) than predicted, are no hiccup:
# something has changed, and little of what is known holds.
_OFF, _STEPS_OFF = 1.5, 4
# A step that was this many times faster than predicted only halves all predictions.
_TOO_FAST = 4.0
# Seconds of the shortest step that counts as measured: for less, the clock was too coarse.
_SHORTEST = 1e-8


class StepLoad(NamedTuple):
    """Load of a step, which its time is predicted from.

    Attributes:
        rows: number of tokens of all spans.
        positions: sum, over all rows, of the tokens before each.
        spans: number of sequences that have rows in the step.
    """

    rows: int = 0
    positions: int = 0
    spans: int = 0

    def plus(self, rows: int, position: int) -> StepLoad:
        """Return the load with a span of `rows` from `position` on."""
        positions = self.positions + rows * position + rows * (rows - 1) // 2
        return StepLoad(self.rows + rows, positions, self.spans + 1)


class StepCosts:
    """Predictor of a step's seconds, which learns from each step that was run.

    Seconds are a sum of five parts, each a slope that is never negative: the call, rows up to a
    knee, rows beyond it, spans, positions. They are fitted by recursive least squares of relative
    errors. As an error is taken relative to what was measured, a step that took ten times as long
    weighs no more than one that was 10 % off, and one that was fast is believed. Only knowledge of
    steps like the new one is forgotten (directional forgetting): thousands of decode steps leave
    untouched what is known of prompts.
    """

    def __init__(self, *, row_multiple: int = 1) -> None:
        """`row_multiple`: steps compute a multiple of this many rows, padding included."""
        self._row_multiple = row_multiple
        self._weights = [1.0] * len(_FIRST_GUESS)  # multiples of the first guess
        self._covariance = _no_knowledge()
        self._steps_off = 0  # in a row; negative: faster than predicted

    def seconds(self, load: StepLoad) -> float:
        """Return the predicted seconds of a step."""
        return _dot(self._weights, _parts(load)) if load.rows else 0.0

    def seconds_at_most(self, load: StepLoad) -> float:
        """Return the predicted seconds and a margin: less, the more steps like it were measured."""
        parts = _parts(load)
        doubt = _dot(parts, [_dot(row, parts) for row in self._covariance])
        return _dot(self._weights, parts) + _MARGIN * math.sqrt(max(0.0, doubt))

    def rows_within(self, seconds: float, position: int, *, beside: StepLoad, limit: int) -> int:
        """Return the rows, at most `limit`, of a span at `position` that keep a step in `seconds`.

        The fewer steps like it were measured, the more is left free. Rows are rounded to the
        nearest number that needs no padding.

        Args:
            beside: load of what the step computes anyway.
        """
        fitting = self._fitting(seconds, position, beside=beside, limit=limit)
        whole = nearest_multiple(beside.rows + fitting, self._row_multiple)
        return max(0, min(whole - beside.rows, limit))

    def _fitting(self, seconds: float, position: int, *, beside: StepLoad, limit: int) -> int:
        if limit < 1 or self.seconds_at_most(beside.plus(limit, position)) <= seconds:
            return max(limit, 0)
        fitting, too_many = 0, limit
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            if self.seconds_at_most(beside.plus(middle, position)) <= seconds:
                fitting = middle
            else:
                too_many = middle
        return fitting

    def learn(self, load: StepLoad, seconds: float) -> None:
        """Learn the seconds of a step; a time that no clock can have measured is left out."""
        if load.rows < 1 or not _SHORTEST < seconds < math.inf:
            return
        parts = [part / seconds for part in _parts(load)]
        predicted = _dot(self._weights, parts)  # 1 would be right
        if self._has_changed(predicted):
            self._start_again(1 / predicted if predicted else 1.0)
            predicted = _dot(self._weights, parts)
        if predicted > _TOO_FAST:
            self._weights = [weight / 2 for weight in self._weights]
            self._covariance = [[value / 4 for value in row] for row in self._covariance]
            return
        spread = [_dot(row, parts) for row in self._covariance]
        doubt = _dot(parts, spread)
        self._move(spread, (1 - predicted) / (1 + doubt), parts)
        self._narrow(spread, doubt)

    def _move(self, spread: Sequence[float], gain: float, parts: Sequence[float]) -> None:
        """Move the weights to fit a step better; what weights at 0 cannot give, all others do."""
        moved = [weight + gain * s for weight, s in zip(self._weights, spread, strict=True)]
        if min(moved) >= 0:
            self._weights = moved
            return
        self._weights = [max(0.0, weight) for weight in moved]
        wanted, predicted = _dot(moved, parts), _dot(self._weights, parts)
        if 0 < wanted < predicted:
            self._weights = [weight * wanted / predicted for weight in self._weights]

    def _has_changed(self, predicted: float) -> bool:
        """Whether several steps in a row were off to the same side."""
        side = 1 if predicted * _OFF < 1 else -1 if predicted > _OFF else 0
        self._steps_off = self._steps_off + side if side * self._steps_off > 0 else side
        return abs(self._steps_off) >= _STEPS_OFF

    def _start_again(self, factor: float) -> None:
        """Scale predictions by `factor`, as the machine has changed; later steps count more."""
        self._weights = [weight * factor for weight in self._weights]
        self._covariance, self._steps_off = _no_knowledge(factor), 0

    def _narrow(self, spread: list[float], doubt: float) -> None:
        """Reduce the doubt in the direction of a step, and forget what was known of it before."""
        factor = (_FORGETTING - (1 - _FORGETTING) / doubt) / (_FORGETTING * (1 + doubt))
        for i in _PARTS:
            row, scaled = self._covariance[i], factor * spread[i]
            for j in _PARTS:
                row[j] -= scaled * spread[j]


def nearest_multiple(rows: int, of: int) -> int:
    """Return the multiple of `of` nearest to `rows`; of two equally near, the larger."""
    return (rows + of // 2) // of * of


def _parts(load: StepLoad) -> tuple[float, float, float, float, float]:
    """Return the seconds of each part by the first guess."""
    call, few, many, span, positions = _FIRST_GUESS
    rows = load.rows
    return (
        call,
        few * min(rows, _KNEE),
        many * max(rows - _KNEE, 0),
        span * load.spans,
        positions * load.positions / 1000,
    )


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    products: Iterable[float] = map(operator.mul, a, b)
    return sum(products)


def _no_knowledge(factor: float = 1.0) -> list[list[float]]:
    """Return the covariance of weights that are the first guess times `factor`."""
    return [[_DOUBT * factor**2 if i == j else 0.0 for j in _PARTS] for i in _PARTS]
