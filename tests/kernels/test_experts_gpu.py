"""The router, tiles and products of experts in Triton."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

import model_shapes  # noqa: E402
import random_model  # noqa: E402
from gpu_steps import device_step, span, tables  # noqa: E402
from random_weights import random_weight  # noqa: E402

from edgellm.kernels.experts import Routing, gpu, reference  # noqa: E402
from edgellm.kernels.gpu.elementwise import Activation  # noqa: E402
from edgellm.kernels.linear import PackedWeights, pack_weight  # noqa: E402
from edgellm.kernels.linear.gpu import (  # noqa: E402
    FEW_ROWS,
    DevicePackedWeights,
    Next,
    Rows,
    Tiles,
    linear,
)
from edgellm.kernels.linear.reference import linear as rounded  # noqa: E402
from edgellm.kernels.quantized import dequantize  # noqa: E402
from edgellm.kernels.step.reference import gated  # noqa: E402

HIDDEN, WIDTH = 64, 32
EPSILON = 1e-5
ROUTINGS = [
    Routing(experts=3, used=1),
    Routing(experts=8, used=2, normalized=False),
    Routing(experts=20, used=5, scale=2.5),
    Routing(experts=5, used=5),
    Routing(
        experts=12,
        used=3,
        scores="sigmoid",
        selection_bias=True,
        groups=4,
        used_groups=2,
        bias=True,
    ),
    Routing(experts=7, used=2, scores="sigmoid", normalized=False, scaled=True, scale=1.8),
    Routing(experts=15, used=4, groups=3, used_groups=1, selection_bias=True, normalized=False),
    Routing(experts=4, used=2, scores="sigmoid", groups=4, used_groups=2),
]
# Some in one tile, in several, and where a program has not all rows.
COUNTS = [1, 3, 9, 31, 33, 70]
# Experts that rows are sent to by their first number; the others have few rows, or none.
SKEW = 4.0


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors hold NaN, or numbers far beyond all rows, slots and experts."""
    empty = torch.empty

    def poison(*shape: int, **options: object) -> torch.Tensor:
        tensor = empty(*shape, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poison)


@dataclass(frozen=True)
class Experts:
    """Random experts, dequantized ones beside them.

    Those behind biased logits have biases and are clamped. Beside those chosen by sigmoids is a
    shared one that gives its input, by a share unless theirs are normalized.
    """

    sizes: gpu.ExpertSizes
    router: np.ndarray
    bias: np.ndarray | None
    selection: np.ndarray | None
    factors: np.ndarray | None
    share: np.ndarray | None
    biases: tuple[np.ndarray | None, ...]
    packed: tuple[PackedWeights, ...]
    floats: tuple[np.ndarray, ...]
    device: str

    @classmethod
    def random(
        cls,
        routing: Routing,
        device: str,
        *,
        kind: str = "int4_affine",
        hidden: int = HIDDEN,
        width: int = WIDTH,
    ) -> Experts:
        rng, count = np.random.default_rng(routing.experts), routing.experts
        router = (rng.standard_normal((count, hidden)) / np.sqrt(hidden)).astype("f4")
        router[: count // 2, 0] -= SKEW
        shapes = ((count * width, hidden), (count * width, hidden), (count * hidden, width))
        sizes = gpu.ExpertSizes(routing, hidden, width)
        weights = [random_weight(kind, *shape, rng) for shape in shapes]
        floats = tuple(dequantize(weight) for weight in weights)
        flags = routing.bias, routing.selection_bias, routing.scaled
        vectors = [rng.standard_normal(count).astype("f4") if flag else None for flag in flags]
        shared = routing.scores == "sigmoid" and not routing.normalized
        share = rng.standard_normal(hidden).astype("f4") / 4 if shared else None
        biases = tuple(
            5 * rng.standard_normal(rows).astype("f4") if routing.bias else None
            for rows, _ in shapes
        )
        packed = tuple(map(pack_weight, weights))
        return cls(sizes, router, *vectors, share, biases, packed, floats, device)

    @property
    def routing(self) -> Routing:
        return self.sizes.routing

    def route(
        self, x: np.ndarray, norm: np.ndarray | None = None
    ) -> tuple[Tiles, gpu.ExpertBuffers]:
        buffers = gpu.ExpertBuffers.empty([self.sizes], rows=len(x), device=self.device)
        weights = None if norm is None else torch.tensor(norm, device=self.device)
        rows = torch.tensor(x, device=self.device)
        return gpu.route(rows, self.on_device, buffers, norm=weights, epsilon=EPSILON), buffers

    @property
    def on_device(self) -> gpu.DeviceRouter:
        rows = [self.router] if self.share is None else [self.router, self.share[None]]
        vectors = np.concatenate(rows), self.bias, self.selection, self.factors
        weight, *others = map(self._tensor, vectors)
        return gpu.DeviceRouter(weight, self.sizes, *others)

    def _tensor(self, array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else torch.tensor(array, device=self.device)

    def shares(self, x: np.ndarray) -> np.ndarray:
        """By the reference, 0 of experts that are not chosen."""
        logits = x @ self.router.T.astype("f8") + (0 if self.bias is None else self.bias)
        return reference.shares(logits, self.routing, self.selection, self.factors)

    def run(self, x: np.ndarray, *, add: bool = True) -> np.ndarray:
        """What the experts give, on rows of ones if it is added."""
        tiles, buffers = self.route(x)
        gate, up, down = (DevicePackedWeights.of(packed, self.device) for packed in self.packed)
        gate_bias, up_bias, down_bias = map(self._tensor, self.biases)
        rows = Rows.empty(*x.shape, self.device)
        inner, out = buffers.slots(self.sizes, len(x))
        few = len(x) <= FEW_ROWS
        linear(
            torch.tensor(x, device=self.device),
            gate,
            inner,
            rows,
            bias=gate_bias,
            activation=self.activation,
            up=up,
            up_bias=up_bias,
            then=Next(buffers.inner) if few else None,
            tiles=tiles,
        )
        slots = replace(tiles, source=None)
        coded = buffers.inner if few else None
        linear(inner, down, out, buffers.rows, bias=down_bias, coded=coded, tiles=slots)
        y = torch.ones(x.shape, device=self.device)
        shared = self._tensor(x) if self.routing.scores == "sigmoid" else None
        gpu.add_up(buffers, self.on_device, y, shared=shared, add=add, then=None)
        return y.cpu().numpy()

    def expected(self, x: np.ndarray) -> np.ndarray:
        """The same by the references."""
        shares, total = self.shares(x.astype("f8")), np.ones(x.shape)
        for expert in range(self.routing.experts):
            rows = np.flatnonzero(shares[:, expert] != 0)
            if len(rows):
                few = len(x) <= FEW_ROWS
                total[rows] += shares[rows, expert, None] * self._mlp(expert, x[rows], few)
        if self.routing.scores == "sigmoid":
            share = 1 if self.share is None else 1 / (1 + np.exp(-x @ self.share[:, None]))
            total += share * x
        return total

    @property
    def activation(self) -> Activation:
        return "clamped_swiglu" if self.routing.bias else "silu"

    def _mlp(self, expert: int, x: np.ndarray, few: bool) -> np.ndarray:
        """As of an expert alone: few rows are rounded, more are not."""

        def product(x: np.ndarray, number: int) -> np.ndarray:
            parts = self.floats[number], self.biases[number]
            weight, bias = (
                0 if part is None else np.split(part, self.routing.experts)[expert]
                for part in parts
            )
            return bias + (rounded(x, weight) if few else x.astype("f8") @ weight.T)

        return product(gated(product(x, 0), product(x, 1), self.activation).astype("f4"), 2)


def rows_of(count: int, width: int = HIDDEN) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, width)).astype("f4")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_row_has_a_slot_in_each_of_its_experts(
    triton_device: str, routing: Routing, count: int
) -> None:
    x, norm = rows_of(count), 1 + 0.2 * rows_of(1)[0]
    experts = Experts.random(routing, triton_device)
    tiles, buffers = experts.route(x, norm)
    normed = x / np.sqrt((x.astype("f8") ** 2).mean(-1, keepdims=True) + EPSILON) * norm
    expected = experts.shares(normed)
    share = buffers.share.cpu().numpy().reshape(count, routing.used)
    slot = buffers.slot.cpu().numpy().reshape(count, routing.used)
    source = buffers.source.cpu().numpy()
    chosen = np.stack([np.flatnonzero(row) for row in expected])  # ascending
    np.testing.assert_allclose(share, np.take_along_axis(expected, chosen, 1), rtol=2e-5)
    taken: dict[int, list[int]] = {expert: [] for expert in range(routing.experts)}
    for expert, first, held in tiles.table.cpu().numpy():
        assert held <= (8 if count <= FEW_ROWS else 64)
        if held:
            assert count > FEW_ROWS or first % 8 == 0
            taken[expert] += range(first, first + held)
    for row in range(count):
        for expert, place in zip(chosen[row], slot[row], strict=True):
            assert source[place] == row
            assert place in taken[expert]
    assert sum(map(len, taken.values())) == count * routing.used
    for expert, places in taken.items():
        assert source[places].tolist() == np.flatnonzero(expected[:, expert]).tolist()


@pytest.mark.smoke
@pytest.mark.parametrize(("number", "count"), [(20, 2), (20, 40), (512, 20)])
def test_the_first_of_equal_experts_are_taken(triton_device: str, number: int, count: int) -> None:
    experts = Experts.random(Routing(experts=number, used=3), triton_device)
    tiles, buffers = experts.route(np.zeros((count, HIDDEN), "f4"))
    assert sorted({int(e) for e, _, held in tiles.table.cpu() if held}) == [0, 1, 2]
    share = buffers.share.cpu().numpy()[: count * 3]
    np.testing.assert_allclose(share, 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("count", [2, 40])
def test_a_bias_may_choose_experts_far_below_the_others(triton_device: str, count: int) -> None:
    """Their parts of the softmax are 0 as float32."""
    routing, chosen = Routing(experts=20, used=3, selection_bias=True, bias=True), [3, 7, 11]
    selection, bias = np.zeros((2, 20), "f4")
    selection[chosen], bias[chosen] = 2, -200
    experts = replace(Experts.random(routing, triton_device), selection=selection, bias=bias)
    x = rows_of(count)
    buffers = experts.route(x)[1]
    share = buffers.share.cpu().numpy()[: count * 3].reshape(count, 3)
    np.testing.assert_allclose(share, experts.shares(x.astype("f8"))[:, chosen], rtol=1e-4)


@pytest.mark.parametrize(
    ("routing", "count"),
    [
        (routing, count)  # each with few rows and with many
        for i, routing in enumerate(ROUTINGS)
        for count in ((1, 9)[i % 2], (33, 70)[i // 2 % 2])
    ],
    ids=str,
)
@pytest.mark.usefixtures("poisoned_memory")
def test_each_expert_is_a_product_of_its_own(
    triton_device: str, routing: Routing, count: int
) -> None:
    """Also where some have no rows, and others nearly all."""
    x, experts = rows_of(count), Experts.random(routing, triton_device)
    found, expected = experts.run(x), experts.expected(x)
    size = np.abs(expected).max()
    # a sum in another order may be rounded to another code
    np.testing.assert_allclose(found / size, expected / size, atol=5e-3)


@pytest.mark.parametrize("kind", ["int4_k", "iq4_xs", "int6_k"])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_blocked_kinds(triton_device: str, kind: str, count: int) -> None:
    """The weights of an expert begin where those of the one before end."""
    routing = Routing(experts=3, used=2)
    experts = Experts.random(routing, triton_device, kind=kind, hidden=256, width=256)
    x = rows_of(count, 256)
    found, expected = experts.run(x), experts.expected(x)
    size = np.abs(expected).max()
    np.testing.assert_allclose(found / size, expected / size, atol=5e-3)


@pytest.mark.parametrize("routing", [*ROUTINGS[1:3], *ROUTINGS[4:]], ids=str)
def test_a_row_does_not_depend_on_the_others(triton_device: str, routing: Routing) -> None:
    """Not even if they are not numbers."""
    experts, x, good = Experts.random(routing, triton_device), rows_of(8), [1, 2, 4, 7]
    alone = np.concatenate([experts.run(x[row, None]) for row in good])
    np.testing.assert_array_equal(experts.run(x)[good], alone)
    x[[0, 5]] = np.nan
    x[6, 3] = np.inf
    found = experts.run(x)
    np.testing.assert_array_equal(found[good], alone)
    assert np.isnan(found[[0, 5, 6]]).all()


def test_many_rows_beside_one_that_is_no_number(triton_device: str) -> None:
    experts, x = Experts.random(ROUTINGS[2], triton_device), rows_of(40)
    before = experts.run(x)
    x[7] = np.nan
    found = experts.run(x)
    others = np.arange(40) != 7
    # Its experts have it no more, so others of theirs have other places in a tile, and numpy, which
    # multiplies for the interpreter, does not sum all rows in one order on every processor.
    np.testing.assert_allclose(found[others], before[others], rtol=1e-6, atol=1e-6)
    assert np.isnan(found[7]).all()


@pytest.mark.parametrize("name", model_shapes.EXPERTS)
@pytest.mark.usefixtures("poisoned_tensors")
def test_models_match_reference(triton_device: str, name: str) -> None:
    """One token, and some; rounding may choose another expert, so by the median row."""
    compare(model_shapes.EXPERTS[name], (0, 1, 6), triton_device)


@pytest.mark.parametrize(
    "name",
    [
        "biases, sinks and a clamp",
        "a shared expert by its share",
        "an MLP beside experts",
    ],
)
@pytest.mark.usefixtures("poisoned_tensors")
def test_prompts_match_reference(triton_device: str, name: str) -> None:
    """More rows than are coded."""
    compare(replace(model_shapes.EXPERTS[name], layers=1), (0, FEW_ROWS + 1), triton_device)


def compare(shape: model_shapes.Shape, ends: tuple[int, ...], device: str) -> None:
    model = random_model.Model(shape)
    step = device_step(model, "f32", device)
    results = [
        step.run([span(tables(model), model.tokens, *part)]) for part in itertools.pairwise(ends)
    ]
    expected = model.reference(ends[-1], "f32")
    for ours, theirs in zip(zip(*results, strict=True), expected, strict=True):
        of_rows = np.abs(np.concatenate(ours) - theirs).mean(axis=1) / np.abs(theirs).mean()
        assert np.median(of_rows) < 0.1
