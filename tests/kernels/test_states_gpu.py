"""Layers that keep a state in Triton: what the ops compute, alone and in the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

import test_delta_net  # noqa: E402
import test_mamba2  # noqa: E402
import test_short_conv  # noqa: E402
from gpu_steps import step_on  # noqa: E402
from model_shapes import HYBRIDS  # noqa: E402
from random_model import Model, span_of  # noqa: E402

from edgellm.kernels.delta_net import reference as delta_net  # noqa: E402
from edgellm.kernels.delta_net.gpu import DeviceDeltaNet  # noqa: E402
from edgellm.kernels.gpu.kv_blocks import DeviceStateRows, DeviceStates  # noqa: E402
from edgellm.kernels.mamba2 import reference as mamba2  # noqa: E402
from edgellm.kernels.mamba2.gpu import DeviceMamba2  # noqa: E402
from edgellm.kernels.short_conv import reference as short_conv  # noqa: E402
from edgellm.kernels.short_conv.gpu import Convolution  # noqa: E402
from edgellm.kernels.state_blocks import StateBlocks, StateView, allocate_states  # noqa: E402
from edgellm.kernels.step import StepSpan  # noqa: E402

Floats = np.ndarray
BLOCKS, LAYER = 9, 1
# What a span reads, and where it writes after how many rows.
Way = tuple[int | None, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Op:
    """A mixer between a layer's products.

    Attributes:
        launch: takes rows on the device, their states, and results.
        reference: takes rows in float64.
    """

    inputs: int
    size: int
    state_size: int
    launch: Callable[[torch.Tensor, DeviceStateRows, torch.Tensor], None]
    reference: Callable[[Floats], Floats]

    def pool(self) -> StateBlocks:
        pool = allocate_states(blocks=BLOCKS, layers=2, elements=self.state_size)
        pool.states[:] = np.nan
        return pool

    def rows(self, count: int, seed: int = 0) -> Floats:
        rng = np.random.default_rng(seed)
        return rng.standard_normal((count, self.inputs)).astype("f4")

    def run(
        self, pool: StateBlocks, spans: Sequence[tuple[Floats, Way]], device: str
    ) -> list[Floats]:
        """Results of the rows of each span; their states are in the pool."""
        ours, first = DeviceStates.like(pool, device), 0
        ours.fetch(range(BLOCKS))
        fields, blocks = [], []
        for number, (rows, (source, targets)) in enumerate(spans):
            fields.append((first, len(rows), -1 if source is None else source, 0))
            after = dict(targets)
            blocks += [(number, after.get(row + 1, -1)) for row in range(len(rows))]
            first += len(rows)
        tables = (torch.tensor(x, dtype=torch.int32, device=device) for x in (fields, blocks))
        inputs = torch.tensor(np.concatenate([rows for rows, _ in spans]), device=device)
        out = torch.full((len(inputs), self.size), torch.nan, device=device)
        self.launch(inputs, DeviceStateRows(ours, *tables), out)
        ours.give(range(BLOCKS))
        ends = np.cumsum([len(rows) for rows, _ in spans])[:-1]
        return np.split(out.cpu().numpy(), ends)


def conv_op(sizes: tuple[int, int], device: str) -> Op:
    weights = test_short_conv.weights_of(*sizes)
    op = Convolution(filters=torch.tensor(weights.filters, device=device), products=True)
    return Op(
        3 * weights.size,
        weights.size,
        weights.state_size,
        lambda rows, states, out: op.run(rows, states, LAYER, out),
        lambda rows: short_conv.mix(rows, weights.filters),
    )


def net_op(shape: tuple[int, int, int, int, int, bool], device: str) -> Op:
    weights = test_delta_net.weights(*shape)
    op = DeviceDeltaNet.of(weights, test_delta_net.EPSILON, device)
    ends = np.cumsum([weights.channels, weights.size, weights.value_heads])

    def launch(rows: torch.Tensor, states: DeviceStateRows, out: torch.Tensor) -> None:
        room = torch.full((len(rows), weights.channels), torch.nan, device=device)
        op.run(rows, states, LAYER, room, out)

    def expected(rows: Floats) -> Floats:
        qkv, z, a, b = np.split(rows, ends, axis=1)
        return delta_net.delta_net(weights, (qkv, z, a, b), test_delta_net.EPSILON)[0]

    return Op(weights.inputs, weights.size, weights.state_size, launch, expected)


def mamba_op(sizes: tuple[int, ...], device: str) -> Op:
    vectors = test_mamba2.vectors_of(sizes)
    op = DeviceMamba2.of(vectors, device)

    def launch(rows: torch.Tensor, states: DeviceStateRows, out: torch.Tensor) -> None:
        room = torch.full((len(rows), vectors.channels), torch.nan, device=device)
        op.run(rows, states, LAYER, room, out)

    def expected(rows: Floats) -> Floats:
        return mamba2.mix(rows, vectors, mamba2.State.zero(vectors))[0]

    return Op(vectors.inputs, vectors.inner, vectors.state_size, launch, expected)


OPS = [
    *((conv_op, sizes) for sizes in test_short_conv.SIZES),
    *((net_op, shape) for shape in test_delta_net.SHAPES[2:]),
    *((mamba_op, sizes) for sizes in test_mamba2.SIZES),
]


@pytest.fixture(params=OPS, ids=lambda op: f"{op[0].__name__} {op[1]}")
def op(request: pytest.FixtureRequest, triton_device: str) -> Op:
    make, sizes = request.param
    return make(sizes, triton_device)


def test_cuts_and_company_change_no_bit(op: Op, triton_device: str) -> None:
    """Nor does a block that is written where it was read, as steps of a growth do."""
    rows, others = op.rows(19), op.rows(4, seed=1)
    ends = ((1, 0), (2, 1), (5, 2), (18, 3), (19, 4))
    pool = op.pool()
    (whole,) = op.run(pool, [(rows, (None, ends))], triton_device)
    expected = op.reference(rows.astype(np.float64))
    np.testing.assert_allclose(whole, expected, rtol=0, atol=3e-5 * np.abs(expected).max())
    assert np.isnan(pool.states[:, 0]).all()
    assert np.isnan(pool.states[5:]).all()
    states = pool.states[:5, LAYER].copy()
    assert not np.isnan(states).any()

    again, found = op.pool(), []
    other: Way = (None, ((4, 8),))
    for start, (end, place) in zip((0, 1, 2, 5, 18), ends, strict=True):
        # the first block takes the end of the first step, and of all others in turn
        way: Way = (0 if start else None, ((end - start, 0),))
        spans = [(rows[start:end], way), (others, other)]
        found.append(op.run(again, spans[:: 1 if place % 2 else -1], triton_device)[place % 2 - 1])
        np.testing.assert_array_equal(again.states[0, LAYER], states[place])
    np.testing.assert_array_equal(np.concatenate(found), whole)

    third = op.pool()
    op.run(third, [(rows[:1], (None, ((1, 0),)))], triton_device)
    several: Way = (0, ((1, 0), (4, 1), (18, 2)))
    (rest,) = op.run(third, [(rows[1:], several)], triton_device)
    np.testing.assert_array_equal(rest, whole[1:])
    np.testing.assert_array_equal(third.states[:3, LAYER], states[[1, 2, 4]])


def test_rates_that_forget_nearly_nothing(triton_device: str) -> None:
    """Shares that are nearly 1 add up over a long text: their distance from 1 has to be right."""
    rule = test_delta_net.weights(1, 1, 16, 32, 2, False)
    rule = replace(rule, decay=np.array([-16.0], "f4"), dt_bias=np.array([0.0], "f4"))
    op = DeviceDeltaNet.of(rule, 1e-6, triton_device)
    for step in (-30.0, -17.0, -12.0, -5.0, 3.0, 19.9, 20.1, 90.0):
        pool = allocate_states(blocks=2, layers=1, elements=rule.state_size)
        pool.states[:] = 2.0**20
        ours = DeviceStates.like(pool, triton_device)
        ours.fetch([0, 1])
        rows = torch.zeros((1, rule.inputs), device=triton_device)
        rows[:, -2] = step
        tables = (
            torch.tensor(each, dtype=torch.int32, device=triton_device)
            for each in ([[0, 1, 0, 0]], [[0, 1]])
        )
        out, room = (torch.empty((1, n), device=triton_device) for n in (32, rule.channels))
        op.run(rows, DeviceStateRows(ours, *tables), 0, room, out)
        ours.give([1])
        kept = pool.states[1, 0, -1] / 2.0**20
        power = 16 * np.logaddexp(0, step)
        np.testing.assert_allclose(kept, np.exp(-power), rtol=2e-7 * max(1, power), atol=1e-37)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.usefixtures("poisoned_tensors")
def test_hybrids_match_reference(triton_device: str, name: str) -> None:
    """One token, some, and more than take codes; then one again."""
    model = Model(HYBRIDS[name])
    views = model.views("f32")
    step, _ = step_on(model, views, triton_device)
    found = []
    for start, end in ((0, 1), (1, 9), (9, 42), (42, 43)):
        rows = end - start
        found.append(step.run([span_of(views, model.tokens[start:end], start, logit_rows=rows)]))
    for ours, theirs in zip(zip(*found, strict=True), model.reference(43, "f32"), strict=True):
        assert np.abs(np.concatenate(ours) - theirs).mean() / np.abs(theirs).mean() < 0.04


@pytest.mark.parametrize("name", ["short_conv", "delta_net", "mamba2"])
def test_sequences_side_by_side(triton_device: str, name: str) -> None:
    """Next tokens of two sequences, then one of the one beside several of the other.

    The state after some of these is kept as well, and goes on to the same one.
    """
    model = Model(HYBRIDS[name])

    def states_of(order: Sequence[int]) -> Floats:
        views = model.views("f32")
        step, pools = step_on(model, views, triton_device)
        number = next(n for n, view in enumerate(views) if isinstance(view.blocks, StateBlocks))

        def part(which: int, start: int, end: int, way: Way) -> StepSpan:
            span = span_of(views, model.tokens[which * 9 :][start:end], start, logit_rows=1)
            view = StateView(views[number].blocks, *way)
            states = [view if n == number else None for n in range(len(views))]
            return replace(span, tables=[[which]] * len(views), states=states)

        # source and targets: a block for each sequence, and one more for the end of the longer
        firsts = [(which, 0, 1, (None, ((1, which),))) for which in order]
        seconds = [(which, 1, 2, (which, ((1, which),))) for which in order]
        ends: list[tuple[int, int, int, Way]] = [
            (0, 2, 3, (0, ((1, 0),))),
            (1, 2, 8, (1, ((2, 1), (6, 2)))),
        ]
        for spans in (firsts, seconds, [ends[which] for which in order]):
            result = step.run([part(*each) for each in spans])
            assert result is not None
            assert np.isfinite(result[1]).all()
        if 1 in order:
            step.run([part(1, 4, 8, (1, ((4, 3),)))])
        pools[number].give(range(4))
        states: Floats = views[number].blocks.states
        return states

    both = states_of((0, 1))
    for which, block in ((0, 0), (1, 2)):
        alone = states_of((which,))[block]
        # a product of one row is compiled apart from those of several
        assert np.abs(both[block] - alone).mean() / np.abs(alone).mean() < 4e-3
    # what attention of other rows rounds elsewhere comes behind the first layer
    np.testing.assert_array_equal(both[3, 0], both[2, 0])
    assert np.abs(both[3] - both[2]).mean() / np.abs(both[2]).mean() < 0.05


def test_states_that_are_not_there_are_refused(triton_device: str) -> None:
    model = Model(HYBRIDS["short_conv"])
    views = model.views("f32")
    step, _ = step_on(model, views, triton_device)
    span = span_of(views, [1, 2], 0, logit_rows=0)
    for states, words in (
        ((), "states of 0 pools"),
        ([view and replace(view, targets=((2, 5),)) for view in span.states], "state blocks"),
    ):
        with pytest.raises(ValueError, match=words):
            step.run([replace(span, states=states)])
