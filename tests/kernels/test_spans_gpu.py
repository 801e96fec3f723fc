"""Spans of several sequences in one Triton step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

import model_shapes  # noqa: E402
import random_model  # noqa: E402
from gpu_steps import counted, poison, span  # noqa: E402

from edgellm.kernels.gpu.kv_blocks import DeviceBlocks  # noqa: E402
from edgellm.kernels.kv_append import append  # noqa: E402
from edgellm.kernels.kv_blocks import (  # noqa: E402
    BLOCK,
    KVFormat,
    allocate,
)
from edgellm.kernels.step import (  # noqa: E402
    StepSpan,
)
from edgellm.kernels.step.gpu import MAX_ROWS, DeviceStep  # noqa: E402


class Conversations:
    """Sequences of a model with windows and two pools, some of their K and V there already.

    Attributes:
        step: has the model, and a random past of each sequence in its pools.
    """

    SHAPE = model_shapes.Shape(2, 1, 32, hidden=64, intermediate=64, layers=2, window=6)
    # Of each sequence, a table in each pool.
    TABLES = ([[3], [1]], [[0], [4]], [[4], [0]], [[1, 6], [3, 5]], [[2], [2]])

    def __init__(self, ranges: Sequence[tuple[int, int]], *, format: KVFormat, device: str) -> None:
        """`ranges` are the positions of each one's span, the next it computes."""
        model, rng = random_model.Model(self.SHAPE), np.random.default_rng(3)
        sizes = {"layers": 1, "kv_heads": 1, "head_dim": 32}
        self._hosts = [allocate(format=format, blocks=7, **sizes) for _ in range(2)]
        for pool, host in enumerate(self._hosts):
            poison(host)
            for (start, _), tables in zip(ranges, self.TABLES, strict=False):
                k, v = rng.standard_normal((2, start, 1, 32)).astype("f4")
                append(host, tables[pool], 0, 0, k, v)
        self._pools = [DeviceBlocks.like(host, device) for host in self._hosts]
        self.step = DeviceStep(model.weights, model.ropes, self._pools, device)
        self._tokens = [model.tokens[7 * number :] for number in range(len(ranges))]
        self._ranges = ranges

    def span(self, number: int) -> StepSpan:
        """The next one of a sequence, with logits of all its tokens."""
        return span(self.TABLES[number], self._tokens[number], *self._ranges[number])

    def run(self, spans: Sequence[StepSpan]) -> list[tuple[np.ndarray, np.ndarray]]:
        """States and logits of each, with what the cache held before any of them."""
        for pool in self._pools:
            pool.fetch(range(7))
        result = self.step.run(spans)
        assert result is not None
        counts = ([len(each.tokens) for each in spans], [each.logit_rows for each in spans])
        parts = (np.split(of, np.cumsum(n)) for of, n in zip(result, counts, strict=True))
        *each, (nothing, none) = zip(*parts, strict=True)
        assert nothing.size == none.size == 0
        return each


def near(ours: np.ndarray, theirs: np.ndarray, format: KVFormat) -> bool:
    """As near as a token alone, with activations in float32, is to one with them in halves."""
    assert ours.shape == theirs.shape
    error = np.abs(ours - theirs).mean() / np.abs(theirs).mean()
    return bool(error < (1.5e-2 if format == "int8" else 4e-3))


@pytest.mark.parametrize("format", ["f32", "int8"])
@pytest.mark.usefixtures("poisoned_tensors")
def test_spans_give_what_each_gives_alone(
    triton_device: str, monkeypatch: pytest.MonkeyPatch, format: KVFormat
) -> None:
    """Parts of three sequences, and next tokens of two, one of them in its second block.

    They are near and have not the same bits: products take the rows of a call in tiles of 8, 16 or
    32, which are compiled apart.
    """
    ranges = [(0, 4), (8, 11), (5, 7), (130, 131), (3, 4)]
    conversations = Conversations(ranges, format=format, device=triton_device)
    numbers = (3, 1, 4, 0, 2)
    spans = [conversations.span(number) for number in numbers]
    expected = [conversations.run([each])[0] for each in spans]
    spans[3] = replace(spans[3], logit_rows=2)
    counts = counted(monkeypatch)
    together = conversations.run(spans)
    assert counts == Counter(linear=2 * 4, append_rotated=2, attend=2)
    for each, found, (states, logits) in zip(spans, together, expected, strict=True):
        last = logits[len(logits) - each.logit_rows :]
        for ours, theirs in zip(found, (states, last), strict=True):
            assert near(ours, theirs, format)


def test_next_tokens_of_sequences_step_by_step(triton_device: str) -> None:
    """More of them, then fewer, then others: nothing of the step before is left."""
    ranges = [(1, 2), (70, 71), (6, 7), (140, 141)]
    conversations = Conversations(ranges, format="f32", device=triton_device)
    spans = [conversations.span(number) for number in range(4)]
    alone = [conversations.run([each])[0] for each in spans]
    for numbers in ((1, 3), (0, 1, 2, 3), (2, 0)):
        together = conversations.run([spans[number] for number in numbers])
        for number, found in zip(numbers, together, strict=True):
            for ours, theirs in zip(found, alone[number], strict=True):
                assert near(ours, theirs, "f32")


def test_bad_spans_are_refused(triton_device: str) -> None:
    """And the next call is as if they had not been there."""
    ranges = [(2, 4), (1, 2)]
    conversations = Conversations(ranges, format="f32", device=triton_device)
    step, good = conversations.step, [conversations.span(0), conversations.span(1)]
    expected = conversations.run(good)
    half = MAX_ROWS // 2
    long = replace(good[1], tables=[[0, 1, 2], [0, 1, 2]], tokens=[1] * (half + 1), logit_rows=0)
    for wrong, words in (
        ([], "0 spans"),
        ([good[0], replace(good[1], tokens=[])], "0 tokens"),
        ([good[0], replace(good[1], logit_rows=2)], "rows of logits"),
        ([good[0], replace(good[1], logit_rows=-1)], "rows of logits"),
        ([good[0], replace(good[1], tokens=[random_model.VOCABULARY])], "token id"),
        ([good[0], replace(good[1], tables=[[1], [7]])], "block id"),
        ([good[0], replace(good[1], tables=[[1], []])], "positions 1 to 2"),
        ([good[0], replace(good[1], start=BLOCK)], "positions 128 to 129"),
        ([good[0], replace(good[1], start=512)], "positions 512 to 513"),
        ([good[0], replace(good[1], tables=[[1]])], "1 tables"),
        ([long, long], "514 tokens; there is room for 1 to 512"),
    ):
        with pytest.raises(ValueError, match=words):
            step.run(wrong)
    with pytest.raises(ValueError, match="one token and row"):
        step.best(good[:1])
    for ours, theirs in zip(conversations.run(good), expected, strict=True):
        np.testing.assert_array_equal(np.concatenate(ours, 1), np.concatenate(theirs, 1))
