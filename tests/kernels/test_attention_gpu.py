from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

from edgellm.kernels import hadamard  # noqa: E402
from edgellm.kernels.attention import gpu, gpu_tiles, reference  # noqa: E402
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks  # noqa: E402
from edgellm.kernels.kv_append import append  # noqa: E402
from edgellm.kernels.kv_append.reference import round_trip  # noqa: E402
from edgellm.kernels.kv_blocks import ROW_FORMATS, SCALED, KVFormat, allocate  # noqa: E402
from edgellm.kernels.step import StepSpan  # noqa: E402
from edgellm.kernels.step.gpu_inputs import SpanInputs  # noqa: E402

# Of sequences, one after the other.
TABLES = [[3, 0, 5, 1, 4], [9, 2], [6, 11, 8], [7], [10]]
# Relative to the largest output: halves for queries, weights and sums of codes.
ALLOWED = {"int8": 2e-3, "f16": 2e-3, "f32": 2e-6}


def run(
    device: str, format: KVFormat, *, length: int, tokens: int, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The last `tokens` of `length` tokens attend; ours, and the reference on what the cache holds.

    Memory that was never written holds NaN, or the largest code.
    """
    return Sequences(device, format, [(length, tokens)], **options).attend([0])[0]


class Sequences:
    """Several in one pool, of each its length and how many of its last tokens attend."""

    def __init__(
        self,
        device: str,
        format: KVFormat,
        lengths: Sequence[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        size: float = 1.0,
        **options: Any,
    ) -> None:
        self._lengths = lengths
        self._options = options
        self._device = device
        blocks = 6 if len(lengths) == 1 else 12
        host = allocate(
            format=format, blocks=blocks, layers=2, kv_heads=kv_heads, head_dim=head_dim
        )
        for array in host.arrays:
            array.fill(np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max)
        self._queries, self._expected = [], []
        for (length, tokens), table in zip(lengths, TABLES, strict=False):
            rng = np.random.default_rng(head_dim + length)
            k, v = (
                size * rng.standard_normal((length, kv_heads, head_dim)).astype(np.float32)
                for _ in range(2)
            )
            append(host, table, 1, 0, k, v)
            q = size * rng.standard_normal((tokens, heads, head_dim)).astype(np.float32)
            held = round_trip(k, format, key=True), round_trip(v, format, key=False)
            self._expected.append(reference.attend(q, *held, length - tokens, **options))
            self._queries.append(hadamard.transform(q) if format in SCALED else q)
        self._blocks = DeviceBlocks.like(host, device)
        self._blocks.fetch(range(blocks))
        self._tiling = gpu_tiles.Tiling.of(self._blocks, heads)
        self._inputs = SpanInputs(
            [self._blocks],
            tilings=[self._tiling],
            rows=sum(tokens for _, tokens in lengths),
            positions=640,
            vocabulary=1,
            device=device,
        )

    def attend(self, numbers: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """These of them in one call; see `run`."""
        blocks, device = self._blocks, self._device
        q = torch.tensor(np.concatenate([self._queries[n] for n in numbers]), device=device)
        rows, heads, head_dim = q.shape
        inputs = self._inputs
        counts = [self._lengths[n][1] for n in numbers]
        inputs.set([self._span(n) for n in numbers])
        partials = gpu.Partials.empty(
            tokens=rows, kinds=[(heads, blocks.host.kv_heads, head_dim)], device=device
        )
        for part in (partials.sums, partials.largest, partials.weight):
            part.fill_(float("nan"))
        out = torch.full(q.shape, float("nan"), device=device)
        tables, work = inputs.places[0].tables, inputs.work(counts)[self._tiling]
        options = {
            name: torch.tensor(value, device=device) if name == "sinks" else value
            for name, value in self._options.items()
        }
        gpu.attend(blocks, tables, 1, q, work, out, partials, **options)
        found = np.split(out.cpu().numpy(), np.cumsum(counts)[:-1])
        return list(zip(found, [self._expected[n] for n in numbers], strict=True))

    def _span(self, number: int) -> StepSpan:
        length, tokens = self._lengths[number]
        start, table = length - tokens, TABLES[number]
        return StepSpan(tables=[table], tokens=[0] * tokens, start=start, logit_rows=0)


def check(found: np.ndarray, expected: np.ndarray, format: str) -> None:
    size = np.abs(expected).max()
    np.testing.assert_allclose(found / size, expected / size, atol=ALLOWED[format])


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize(
    ("length", "tokens"), [(1, 1), (63, 1), (65, 1), (127, 1), (300, 1), (130, 16), (260, 40)]
)
def test_matches_reference(triton_device: str, format: KVFormat, length: int, tokens: int) -> None:
    shape = {"heads": 9, "kv_heads": 3, "head_dim": 64}
    check(*run(triton_device, format, length=length, tokens=tokens, **shape), format)


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize(("length", "tokens"), [(1, 1), (300, 1), (130, 16)])
def test_sinks(triton_device: str, format: KVFormat, length: int, tokens: int) -> None:
    """Below all scores, beside them and above them; with a window, splits without a key too."""
    sinks = np.array([-np.inf, -3, 0, 2, 5, 30], "f4")
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 32, "window": 40, "sinks": sinks}
    found, expected = run(triton_device, format, length=length, tokens=tokens, **shape)
    for head in range(6):
        check(found[:, head], expected[:, head], format)


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(1, 1, 80), (8, 1, 96), (4, 4, 128), (14, 2, 32), (2, 1, 256), (8, 1, 256)],
)
def test_shapes(
    triton_device: str, format: KVFormat, heads: int, kv_heads: int, head_dim: int
) -> None:
    for length, tokens in ((131, 1), (131, 7)):
        found = run(
            triton_device,
            format,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            length=length,
            tokens=tokens,
        )
        check(*found, format)


@pytest.mark.parametrize("window", [1, 40, 130])
@pytest.mark.parametrize("tokens", [1, 70])
def test_sliding_window(triton_device: str, window: int, tokens: int) -> None:
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 64}
    found = run(triton_device, "int8", length=290, tokens=tokens, window=window, **shape)
    check(*found, "int8")


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize(("scale", "softcap"), [(0.3, None), (None, 1.5), (0.3, 2.0)])
def test_scale_and_softcap(
    triton_device: str, format: KVFormat, tokens: int, scale: float | None, softcap: float | None
) -> None:
    """Small caps, which most scores are beyond."""
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 64}
    options = {"window": 90, "scale": scale, "softcap": softcap}
    check(*run(triton_device, format, length=150, tokens=tokens, **options, **shape), format)


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e4])
def test_capped_scores_stay_finite(triton_device: str, size: float) -> None:
    shape = {"heads": 3, "kv_heads": 1, "head_dim": 64}
    for format in ROW_FORMATS:
        result = run(triton_device, format, length=70, tokens=2, size=size, softcap=50.0, **shape)
        assert np.isfinite(result[0]).all()


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e4])
def test_tiny_and_huge_values_stay_finite(triton_device: str, size: float) -> None:
    shape = {"heads": 3, "kv_heads": 1, "head_dim": 64}
    found, _ = run(triton_device, "int8", length=70, tokens=2, size=size, **shape)
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("format", "window"), [("int8", 40), ("int8", None), ("f16", 40), ("f32", None)]
)
def test_spans_of_several_sequences(
    triton_device: str, format: KVFormat, window: int | None
) -> None:
    """Next tokens of short and long sequences beside parts of prompts, of several tiles too.

    And then fewer of them: the programs that nothing is left for do nothing.
    """
    lengths = [(200, 1), (130, 5), (70, 23), (1, 1)]
    shape = {"heads": 3, "kv_heads": 1, "head_dim": 64, "window": window}
    sequences = Sequences(triton_device, format, lengths, **shape)
    for numbers in ([3, 0, 2, 1], [2, 1]):
        for found, expected in sequences.attend(numbers):
            check(found, expected, format)


@pytest.mark.smoke
@pytest.mark.parametrize("format", ["int8", "f32"])
def test_a_span_has_the_same_bits_in_company(triton_device: str, format: KVFormat) -> None:
    """With the same tiles, and keys too few to be split."""
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 64}
    sequences = Sequences(triton_device, format, [(14, 5), (1, 1), (16, 3), (9, 4)], **shape)
    together = sequences.attend([2, 0, 3, 1])
    for number, (found, _) in zip([2, 0, 3, 1], together, strict=True):
        np.testing.assert_array_equal(found, sequences.attend([number])[0][0])


@pytest.mark.parametrize(
    ("format", "group", "head_dim"),
    [
        ("int8", 1, 64),
        ("f16", 3, 64),
        ("int8", 4, 256),
        ("f32", 71, 32),
        ("int8", 8, 128),
    ],
)
def test_every_query_has_its_keys_and_a_place_for_its_sums(
    monkeypatch: pytest.MonkeyPatch, format: KVFormat, group: int, head_dim: int
) -> None:
    """As many splits as on a device: none is missing, and no two write to one place."""
    monkeypatch.setattr(gpu_tiles, "interpreted", lambda: False)
    host = allocate(format=format, blocks=1, layers=1, kv_heads=2, head_dim=head_dim)
    tiling = gpu_tiles.Tiling.of(DeviceBlocks.like(host, "cpu"), 2 * group)
    rng = np.random.default_rng(group)
    for spans in (1, 1, 1, 2, 3, 8, 32, 100):
        counts = rng.integers(1, rng.choice([2, 9, 512 // spans + 1]), spans).tolist()
        starts = (10 ** rng.uniform(0, 5, spans)).astype(int).tolist()
        keys = tiling.key_tiles(counts, starts)
        plan, splits = tiling.plan(counts, keys), tiling.splits(counts, keys)
        assert len(plan.jobs) == tiling.jobs(counts) <= tiling.most_jobs(sum(counts))
        tile, places = tiling.tile(counts), []
        for first, count, _, _, query, split, of, before in plan.jobs[plan.jobs[:, 1] > 0].tolist():
            assert 0 <= split < of
            own = np.arange(query, min(query + tile, count * group))
            token = own // group
            part = before + first + token + split * count
            places += zip(part.tolist(), (own % group).tolist(), strict=True)
            rows = plan.rows[first + token]
            np.testing.assert_array_equal(rows[:, 2] + split * rows[:, 4], part)
            assert (rows[:, 3] == of).all()
        parts = sum(count * of for count, of in zip(counts, splits, strict=True))
        assert sorted(places) == [(part, head) for part in range(parts) for head in range(group)]
        room = gpu.Partials.empty(tokens=sum(counts), kinds=[(2 * group, 2, 1)], device="cpu")
        assert 2 * group * parts <= len(room.weight)


def test_one_sequence_alone_has_as_many_splits_as_keep_a_device_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And one among others as many as its keys are of all."""
    monkeypatch.setattr(gpu_tiles, "interpreted", lambda: False)
    tiling = gpu_tiles.Tiling(group=4, most=64, keys=64)
    for count, start, expected in ((1, 9000, 32), (1, 300, 5), (40, 9000, 10), (512, 9000, 1)):
        assert tiling.splits([count], tiling.key_tiles([count], [start])) == [expected]
    assert tiling.splits([1, 1], [79, 79]) == [16, 16]
    assert tiling.splits([1, 512], tiling.key_tiles([1, 512], [32000, 0])) == [21, 1]
    assert tiling.jobs([1]) == 32
