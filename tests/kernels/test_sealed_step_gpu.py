"""Whole steps in Triton on a cache that seals blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

import random_model  # noqa: E402
from gpu_steps import poison, span  # noqa: E402
from model_shapes import Shape  # noqa: E402

from edgellm.kernels.gpu.kv_blocks import DeviceBlocks, DeviceSealed  # noqa: E402
from edgellm.kernels.kv_blocks import SEALED, KVFormat  # noqa: E402
from edgellm.kernels.step import FusedStep  # noqa: E402
from edgellm.kernels.step.gpu import DeviceStep  # noqa: E402

# Tables of two sequences, of rows and of sealed blocks.
TABLES = [[[3, 0, 7, 5, 1], [0, 4, 2]], [[2, 8, 6, 4, 9], [0, 1, 3]]]
SHAPES = [
    Shape(2, 1, 64, hidden=64, intermediate=64, layers=2),
    Shape(4, 2, 40, hidden=64, intermediate=64, layers=1),
]
# The second layer sees all positions, and seals blocks.
WINDOWED = Shape(2, 1, 64, hidden=64, intermediate=64, layers=2, window=60)


class Sequences:
    """A model with two sequences of the same tokens, the first ones of them computed in C++.

    Blocks that hold nothing yet are NaN and the largest codes.
    """

    def __init__(
        self, shape: Shape, format: KVFormat, library: ctypes.CDLL, first: int, device: str
    ) -> None:
        self.model = random_model.Model(shape)
        self.model.tokens *= 2  # to 1,000
        pools = self.model.pools(format, blocks=10)
        # a pool of int8 rows, of layers with windows, may stand before that of sealed blocks
        self._tables = [[rows] * (len(pools) - 1) + [sealed] for rows, sealed in TABLES]
        for pool in pools:
            poison(pool)
        if first:
            step = FusedStep(library, self.model.weights, self.model.ropes, pools)
            step.run([span(tables, self.model.tokens, 0, first) for tables in self._tables])
        here = [DeviceBlocks.like(pool, device) for pool in pools[:-1]]
        here.append(DeviceSealed.like(pools[-1], device))
        for each in here:
            each.fetch(range(10))
        self._step = DeviceStep(self.model.weights, self.model.ropes, here, device)

    def run(self, parts: Sequence[tuple[int, int, int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """States and logits of positions of sequences, in one step."""
        spans = [span(self._tables[n], self.model.tokens, *part) for n, *part in parts]
        result = self._step.run(spans)
        assert result is not None
        ends = np.cumsum([end - start for _, start, end in parts])[:-1]
        return list(zip(*(np.split(of, ends) for of in result), strict=True))


def check(
    sequences: Sequences, format: KVFormat, steps: Sequence[Sequence[tuple[int, int, int]]]
) -> None:
    """Q and K have activations of 16 bits beside V here, where the reference has 8."""
    most = max(end for step in steps for _, _, end in step)
    expected = sequences.model.reference(most, format)
    pairs: list[list[np.ndarray]] = [[], []]  # of states and logits
    for step in steps:
        for (_, start, end), found in zip(step, sequences.run(step), strict=True):
            for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                pairs[i].append(np.stack((ours, theirs[start:end])))
    for each in pairs:
        ours, theirs = np.concatenate(each, axis=1)
        assert np.abs(ours - theirs).mean() < 0.04 * np.abs(theirs).mean()


@pytest.mark.parametrize(
    ("shape", "format"),
    [*((shape, format) for shape in SHAPES for format in SEALED), (WINDOWED, "k4v4")],
    ids=str,
)
def test_steps_past_the_end_of_blocks_match_reference(
    triton_device: str, native_library: ctypes.CDLL, shape: Shape, format: KVFormat
) -> None:
    """Rows that seal a block beside next tokens that do not, then next tokens of which one does."""
    sequences = Sequences(shape, format, native_library, 380, triton_device)
    steps = [[(0, 380, 390), (1, 380, 381)], [(1, 381, 384)], [(1, 384, 385), (0, 390, 391)]]
    check(sequences, format, [*steps, [(1, 385, 386)]])


@pytest.mark.usefixtures("poisoned_tensors")
def test_a_prompt_of_several_blocks_matches_reference(
    triton_device: str, native_library: ctypes.CDLL
) -> None:
    """All of it in Triton; the second part seals two blocks at once."""
    shape = Shape(1, 1, 64, hidden=64, intermediate=64, layers=1)
    sequences = Sequences(shape, "k4v4", native_library, 0, triton_device)
    check(sequences, "k4v4", [[(0, 0, 300)], [(0, 300, 520)], [(0, 520, 521)]])
