"""Rows of prompts through the C++ kernels, where some leave early."""

from __future__ import annotations

from typing import Any

import numpy as np
from model_shapes import CONV, Shape
from random_model import Model, span_of
from requirements import unavailable

from edgellm.backends.batch import Span
from edgellm.backends.native import NativeModel
from edgellm.cache.sequence import Sequence
from edgellm.kernels.native import library
from edgellm.kernels.step import StepSpan


class Empty(Sequence):
    """A sequence without tokens, with the blocks of a span."""

    def __init__(self, span: StepSpan) -> None:
        self.tokens, self.tables = [], []
        self._span = span

    @property
    def block_tables(self) -> Any:
        return self._span.tables

    def states(self, start: int, end: int) -> Any:
        return self._span.states


def test_rows_that_leave_early_take_no_states_along() -> None:
    """Where the last layers read K and V of others, and the first one has a state."""
    model = Model(Shape(4, 2, 32, layers=4, shared=1, parts=CONV, odd=Shape(4, 2, 32)))
    assert [layer.kv_from for layer in model.weights.layers] == [None, None, None, 1]
    compiled = library() or unavailable("native", "installed without a compiler")
    found = []
    for all_states in (True, False):
        views = model.views("f32")
        native = NativeModel(
            compiled, model.weights, model.ropes, [v.blocks for v in views], threads=2
        )
        span = span_of(views, model.tokens[:40], 0, logit_rows=0)
        asked = Span(Empty(span), model.tokens[:40], logit_rows=1, all_states=all_states)
        result = native._through([asked], None, None)
        assert result is not None
        found.append(result)
    (whole, logits), (last, same) = found
    np.testing.assert_array_equal(last[-1], whole[-1])
    np.testing.assert_array_equal(same, logits)
    assert not last[:-1].any()
