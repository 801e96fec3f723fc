"""Attention over latents in Triton: what the op computes, alone and in the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

from gpu_steps import poison, step_on  # noqa: E402
from model_shapes import LATENTS  # noqa: E402
from random_model import Model, span_of  # noqa: E402
from random_weights import random_weight  # noqa: E402

from edgellm.kernels import hadamard, rope  # noqa: E402
from edgellm.kernels.attention import gpu, reference  # noqa: E402
from edgellm.kernels.attention.gpu_tiles import Tiling  # noqa: E402
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks  # noqa: E402
from edgellm.kernels.kv_append.reference import round_trip  # noqa: E402
from edgellm.kernels.kv_blocks import (  # noqa: E402
    BLOCK,
    ROW_FORMATS,
    SCALED,
    KVFormat,
    allocate,
)
from edgellm.kernels.latent import LatentWeights  # noqa: E402
from edgellm.kernels.latent.gpu import DeviceLatent, HeadRows  # noqa: E402
from edgellm.kernels.linear import pack_weight  # noqa: E402
from edgellm.kernels.linear.gpu import FEW_ROWS, DevicePackedWeights  # noqa: E402
from edgellm.kernels.linear.reference import linear as int8_linear  # noqa: E402
from edgellm.kernels.quantized import dequantize  # noqa: E402
from edgellm.kernels.rope import reference as turned  # noqa: E402
from edgellm.kernels.step import StepSpan  # noqa: E402
from edgellm.kernels.step.gpu_inputs import SpanInputs  # noqa: E402

Floats = np.ndarray
MOST, LAYER, SCALE, EPSILON = 40, 1, 0.002, 1e-4
TABLES = [[3, 0], [1, 2]]
# Tokens of the sequences that the cache holds before.
BEGINS = [125, 0]
# Of halves; float32 comes to that too where rows are many.
ALLOWED = 2e-3


@dataclass(frozen=True)
class Sizes:
    """Of heads: what RoPE turns, the rest of a key, the latent, and values."""

    heads: int
    head_dim: int
    key: int
    rank: int
    value: int


class Op:
    """One layer's attention over latents, and all that went through it."""

    def __init__(self, sizes: Sizes, format: KVFormat, device: str) -> None:
        self.sizes, self.format, self._device = sizes, format, device
        self._rng = np.random.default_rng(sizes.rank)
        self.key_up, key_up = self._linear(sizes.heads * sizes.rank, sizes.key)
        self.value_up, value_up = self._linear(sizes.heads * sizes.value, sizes.rank)
        self.norm = self._rng.standard_normal(sizes.rank).astype("f4")
        packed = LatentWeights(key_up=key_up, value_up=value_up, norm=self.norm, epsilon=EPSILON)
        self._op = DeviceLatent.of(packed, DevicePackedWeights.of(key_up, device), device)
        self._host = allocate(
            format=format,
            blocks=4,
            layers=2,
            kv_heads=1,
            head_dim=sizes.head_dim,
            latent=sizes.rank,
        )
        poison(self._host)
        for array in self._host.arrays:
            shape = array[TABLES[0][0]].shape
            numbers = self._rng.standard_normal(shape)
            codes = self._rng.integers(0, 256, shape).astype(np.uint8).view(np.int8)
            is_scale = array is self._host.k_scale or array is self._host.v_scale
            numbers = 0.01 * np.abs(numbers) if is_scale else numbers
            array[TABLES[0][0]] = numbers if array.dtype.kind == "f" else codes.view(array.dtype)
        self._blocks = DeviceBlocks.like(self._host, device)
        self._blocks.fetch(range(4))
        self._room = HeadRows.empty(
            heads=sizes.heads, rows=MOST, inputs=max(sizes.key, sizes.rank), device=device
        )
        inv_freq = 10000.0 ** (-np.arange(sizes.head_dim // 2) / sizes.head_dim)
        self.inv_freq = inv_freq.tolist()
        table = rope.table(self.inv_freq, 2 * BLOCK)
        self._rope = tuple(torch.tensor(part, device=device) for part in table)
        self._tiling = Tiling.of(self._blocks, sizes.heads)
        self._inputs = SpanInputs(
            [self._blocks],
            tilings=[self._tiling],
            rows=MOST,
            positions=2 * BLOCK,
            vocabulary=1,
            device=device,
        )
        self._partials = gpu.Partials.empty(
            tokens=MOST, kinds=[(sizes.heads, 1, sizes.rank)], device=device
        )

    def _linear(self, outputs: int, inputs: int) -> tuple[Floats, object]:
        weight = random_weight("int8_symmetric", outputs, inputs, self._rng)
        return dequantize(weight).astype(np.float64), pack_weight(weight)

    def rows(self, count: int) -> tuple[Floats, Floats]:
        """Keys and latents side by side, and queries whose products no code rounds."""
        at = self.sizes
        inputs = self._rng.standard_normal((count, at.head_dim + at.rank)).astype("f4")
        q = self._rng.integers(-127, 128, (count, at.heads, at.head_dim + at.key)).astype("f4")
        q[:, :, at.head_dim :: 32] = 127
        return inputs, q

    def run(self, spans: dict[int, tuple[int, Floats, Floats]]) -> dict[int, tuple[Floats, Floats]]:
        """What heads attend to and their values, of sequences that go on from a position."""
        at, device, counts = self.sizes, self._device, [len(x) for _, x, _ in spans.values()]
        self._inputs.set(
            [
                StepSpan(tables=[TABLES[n]], tokens=[0] * len(x), start=start, logit_rows=0)
                for n, (start, x, _) in spans.items()
            ]
        )
        inputs, q = (
            torch.tensor(np.concatenate([each[part] for each in spans.values()]), device=device)
            for part in (1, 2)
        )
        rows = len(inputs)
        turned_q = torch.full((rows, at.heads, at.head_dim + at.rank), torch.nan, device=device)
        seen = torch.full((rows, at.heads, at.rank), torch.nan, device=device)
        values = torch.full((rows, at.heads * at.value), torch.nan, device=device)
        work = self._inputs.work(counts)[self._tiling]
        tables = self._inputs.places[0].tables
        self._op.append(
            self._blocks,
            tables,
            LAYER,
            work.rows,
            inputs,
            q.view(rows, -1),
            self._rope,
            turned_q,
            self._room,
        )
        for part in (self._partials.sums, self._partials.largest, self._partials.weight):
            part.fill_(torch.nan)
        gpu.attend(self._blocks, tables, LAYER, turned_q, work, seen, self._partials, scale=SCALE)
        self._op.values(seen, values, self._room)
        found = zip(
            *(np.split(x.cpu().numpy(), np.cumsum(counts)[:-1]) for x in (seen, values)),
            strict=True,
        )
        return dict(zip(spans, found, strict=True))

    def held(self, number: int, length: int) -> tuple[Floats, Floats]:
        """Keys and latents in the cache."""
        self._blocks.give(range(4))
        places = [(TABLES[number][at // BLOCK], LAYER, at % BLOCK) for at in range(length)]
        k = np.stack([self._host.key_rows(*place) for place in places]).astype(np.float64)
        v = np.stack([self._host.value_rows(*place) for place in places]).astype(np.float64)
        if self._host.k_scale is not None and self._host.v_scale is not None:
            blocks, rows = ([place[i] for place in places] for i in (0, 2))
            k *= self._host.k_scale[blocks, LAYER, :, rows][..., None]
            v *= self._host.v_scale[blocks, LAYER, :, rows][..., None]
        return hadamard.transform(k) if self.format in SCALED else k, v

    def expected(self, number: int, start: int, x: Floats, q: Floats) -> Floats:
        """What heads attend to, on what the cache holds."""
        at = self.sizes
        rotated, rest = np.split(q.astype(np.float64), [at.head_dim], axis=2)
        up = self.key_up.reshape(at.heads, at.rank, at.key)
        latent = np.einsum("chk,hrk->chr", rest, up)
        k, v = self.held(number, start + len(x))
        both = np.concatenate((turned.apply(rotated, self.inv_freq, start, 1.0), latent), axis=2)
        return reference.attend(both, np.concatenate((k, v), axis=2), v, start, scale=SCALE)


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize(
    "sizes",
    [Sizes(3, 32, 32, 64, 32), Sizes(6, 16, 64, 96, 48), Sizes(2, 64, 96, 512, 64)],
    ids=str,
)
def test_what_the_op_computes(triton_device: str, sizes: Sizes, format: KVFormat) -> None:
    """Of two sequences: many rows, rows on both sides of a block's end, and one of each."""
    op = Op(sizes, format, triton_device)
    every: dict[int, list[Floats]] = {0: [], 1: []}
    for counts in ({0: 34}, {1: 2, 0: 3}, {0: 1, 1: 1}):
        spans = {}
        for number, count in counts.items():
            start = BEGINS[number] + sum(map(len, every[number]))
            spans[number] = (start, *op.rows(count))
            every[number].append(spans[number][1])
        found = op.run(spans)
        for number, (start, x, q) in spans.items():
            seen, values = found[number]
            expected = op.expected(number, start, x, q)
            few = sum(counts.values()) <= FEW_ROWS
            allowed = 1e-5 if few and format == "f32" else ALLOWED
            size = np.abs(expected).max()
            np.testing.assert_allclose(seen / size, expected / size, rtol=0, atol=allowed)
            up = np.split(op.value_up, sizes.heads)
            made = np.concatenate(
                [
                    int8_linear(seen[:, head], up[head]) if few else seen[:, head] @ up[head].T
                    for head in range(sizes.heads)
                ],
                axis=1,
            )
            size = np.abs(made).max()  # codes of a single key may be between two others
            np.testing.assert_allclose(values / size, made / size, rtol=0, atol=allowed)

    for number, parts in every.items():
        rows = np.concatenate(parts).astype(np.float64)
        k, latent = np.split(rows[:, None], [sizes.head_dim], axis=2)
        latent = latent / np.sqrt((latent**2).mean(axis=-1, keepdims=True) + EPSILON) * op.norm
        begin = BEGINS[number]
        needed = turned.apply(k, op.inv_freq, begin, 1.0), latent
        held = [each[begin:] for each in op.held(number, begin + len(rows))]
        for ours, theirs, key in zip(held, needed, (True, False), strict=True):
            kept = round_trip(theirs, format, key=key)
            # where a number is between two codes, the last bit of a float32 chooses
            close = np.isclose(ours, kept, rtol=0, atol=1e-3 * np.abs(kept).max())
            assert close.all(axis=-1).mean() > 0.98
            assert np.abs(ours - kept).max() < 0.2 * np.abs(kept).max()


@pytest.mark.parametrize("name", ["one latent", "latents"])
@pytest.mark.usefixtures("poisoned_tensors")
def test_latents_match_reference(triton_device: str, name: str) -> None:
    """One token, some, and more than take codes; then one again."""
    model = Model(LATENTS[name])
    views = model.views("f32")
    step, _ = step_on(model, views, triton_device)
    found = []
    for start, end in ((0, 1), (1, 10), (10, 43), (43, 44)):
        rows = end - start
        found.append(step.run([span_of(views, model.tokens[start:end], start, logit_rows=rows)]))
    for ours, theirs in zip(zip(*found, strict=True), model.reference(44, "f32"), strict=True):
        assert np.abs(np.concatenate(ours) - theirs).mean() / np.abs(theirs).mean() < 0.04
