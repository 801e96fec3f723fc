"""Sealed blocks in Triton: appended, sealed and read as the references say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

from gpu_steps import poison  # noqa: E402

from edgellm.kernels import hadamard, rope  # noqa: E402
from edgellm.kernels.attention import gpu as attention  # noqa: E402
from edgellm.kernels.attention import gpu_tiles, reference  # noqa: E402
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks, DeviceSealed  # noqa: E402
from edgellm.kernels.hadamard import reference as hadamard_reference  # noqa: E402
from edgellm.kernels.kv_append import append, portable  # noqa: E402
from edgellm.kernels.kv_append import gpu as append_gpu  # noqa: E402
from edgellm.kernels.kv_append.reference import round_trip  # noqa: E402
from edgellm.kernels.kv_blocks import (  # noqa: E402
    BLOCK,
    SEALED,
    SEALINGS,
    KVBlocks,
    KVFormat,
    allocate,
)
from edgellm.kernels.kv_seal.gpu import seal  # noqa: E402
from edgellm.kernels.kv_seal.reference import (  # noqa: E402
    FIRST_STEP,
    channel,
    fitted,
    sealed_rows,
)
from edgellm.kernels.sealed_blocks import allocate_sealed, sealed_end  # noqa: E402
from edgellm.kernels.step import StepSpan  # noqa: E402
from edgellm.kernels.step.gpu_inputs import SpanInputs  # noqa: E402

# Of two sequences, hot and sealed; id 0 stands for the first block of the sealed ones.
TABLES = [[3, 5, 0, 4, 1, 7], [9, 2, 8, 6]]
SEALED_TABLES = [[0, 2, 5, 1], [0, 3]]
LAYER = 1


def rows(length: int, kv_heads: int, head_dim: int) -> list[np.ndarray]:
    """K with channels of very different middles and ranges, as RoPE leaves them, and V."""
    rng = np.random.default_rng(head_dim + length)
    k, v = rng.standard_normal((2, length, kv_heads, head_dim)).astype("f4")
    middle, size = rng.standard_normal((2, kv_heads, head_dim)).astype("f4")
    k = k * np.exp(size) + 3 * middle
    k[:, :, -1] = 0.25  # a channel without a range
    v[5] = 0
    return [k, v]


@dataclass
class Cache:
    """Pools of two layers, on host and device; all that was never written is NaN or the largest
    code, on the device too."""

    host: KVBlocks
    device: DeviceBlocks
    sealed: DeviceSealed
    inputs: SpanInputs
    tiling: gpu_tiles.Tiling

    @classmethod
    def of(cls, format: KVFormat, heads: int, kv_heads: int, head_dim: int, device: str) -> Cache:
        sizes = {"layers": 2, "kv_heads": kv_heads, "head_dim": head_dim}
        sealed = allocate_sealed(format=format, blocks=6, **sizes)
        host = allocate(format=format, blocks=10, sealed=sealed, **sizes)
        pools = []
        for each, kind in ((host, DeviceBlocks), (sealed, DeviceSealed)):
            poison(each)
            pools.append(kind.like(each, device))
            pools[-1].fetch(range(each.count))
        tiling = gpu_tiles.Tiling.of(pools[0], heads)
        inputs = SpanInputs(
            pools, tilings=[tiling], rows=700, positions=768, vocabulary=1, device=device
        )
        return cls(host, *pools, inputs, tiling)

    def set(self, ranges: Sequence[tuple[int, int]]) -> gpu_tiles.Work:
        """Let the next call have these positions of the sequences; work of attention for them."""
        self.inputs.set(
            [
                StepSpan(
                    tables=[table, sealed], tokens=[0] * (end - start), start=start, logit_rows=0
                )
                for (start, end), table, sealed in zip(ranges, TABLES, SEALED_TABLES, strict=False)
            ]
        )
        return self.inputs.work([end - start for start, end in ranges])[self.tiling]

    def seal(self, ranges: Sequence[tuple[int, int]]) -> None:
        work, place = self.set(ranges), self.inputs.places[0]
        assert place.sealed is not None
        seal(self.device, place.tables, place.sealed, LAYER, work.rows)


def filled(cache: Cache, lengths: Sequence[int]) -> list[list[np.ndarray]]:
    """Rows of K and V of sequences, as they are, in the cache on both sides."""
    every = []
    for length, table in zip(lengths, TABLES, strict=False):
        every.append(rows(length, cache.host.kv_heads, cache.host.head_dim))
        append(cache.host, table, LAYER, 0, *every[-1])
    cache.device.fetch(range(cache.host.count))
    return every


def codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes `[..., D]` of bytes `[..., D * bits / 8]`."""
    return np.concatenate([packed >> at & 2**bits - 1 for at in range(0, 8, bits)], axis=-1)


def hot_rows(host: KVBlocks, block: int) -> list[np.ndarray]:
    """K, as it was before the Hadamard transform, and the codes and scales of V of a block."""
    k, v = host.read([block], LAYER, slice(None), BLOCK)
    k, v = (each.transpose(1, 0, 2).astype("f8") for each in (k, v))
    k *= host.k_scale[block, LAYER].T[..., None]
    return [hadamard_reference.transform(k), v, host.v_scale[block, LAYER].T]


SHAPES = [(4, 2, 64), (3, 1, 72), (2, 2, 40)]


@pytest.mark.parametrize("format", SEALED)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_blocks_are_sealed_as_the_reference_says(
    triton_device: str, format: KVFormat, heads: int, kv_heads: int, head_dim: int
) -> None:
    """The third one of a sequence and the second of another, and nothing else is written.

    Codes differ only where float32 cannot tell which is nearer; lines and scales are those of least
    squares for the codes, but for the last bit of a half.
    """
    cache = Cache.of(format, heads, kv_heads, head_dim, triton_device)
    filled(cache, [530, 390])
    cache.seal([(511, 514), (384, 385)])
    sealed, sealing = cache.sealed.host, SEALINGS[format]
    cache.sealed.give(range(6))
    untouched = allocate_sealed(
        format=format, blocks=1, layers=2, kv_heads=kv_heads, head_dim=head_dim
    )
    poison(untouched)
    for array, empty in zip(sealed.arrays, untouched.arrays, strict=True):
        np.testing.assert_array_equal(array[:, 1 - LAYER], np.repeat(empty[:, 0], 6, 0))
        np.testing.assert_array_equal(array[[0, 1, 2, 4], LAYER], np.repeat(empty[:, 0], 4, 0))
    for block, to in ((TABLES[0][2], 5), (TABLES[1][1], 3)):
        keys, v_codes, v_scale = hot_rows(cache.host, block)
        k, v, k_scale, scales = (array[to, LAYER] for array in sealed.arrays)
        if sealing.channels:
            k = k.transpose(0, 1, 3, 2, 4).reshape(kv_heads, BLOCK, -1).transpose(1, 0, 2)
            check_channels(codes(k, 4), k_scale, keys)
        else:
            np.testing.assert_array_equal(k.view("i1"), cache.host.k[block, LAYER])
            np.testing.assert_array_equal(
                k_scale, cache.host.k_scale[block, LAYER].astype(np.float16)
            )
        v = codes(v.transpose(0, 1, 3, 2).reshape(kv_heads, BLOCK, -1), sealing.value_bits)
        check_values(v.transpose(1, 0, 2), scales.transpose(2, 0, 1), v_codes, v_scale)


def check_channels(found: np.ndarray, lines: np.ndarray, keys: np.ndarray) -> None:
    """Codes `[BLOCK, Hkv, D]` and lines `[Hkv, 2, D]` of keys `[BLOCK, Hkv, D]`."""
    low, high = keys.min(0), keys.max(0)
    up = (keys - low) * 15 / (high - low) + 0.5
    tie = np.abs(up - np.rint(up)) < 1e-4
    assert ((found == np.clip(np.floor(up), 0, 15)) | tie).all()
    assert tie.mean() < 2e-2  # the smallest and the largest number of each channel among them
    expected = np.apply_along_axis(channel, 0, keys)
    half, middle = lines.astype("f8").transpose(1, 0, 2)
    steps = np.rint((expected - middle) / half)
    same = (steps == 2.0 * found - 15).all(0)
    assert same.mean() > 0.9
    last = 15 * np.spacing(np.abs(lines[:, 0])) + np.spacing(np.abs(lines[:, 1]))
    error = np.abs((2.0 * found - 15) * half + middle - expected)
    assert (error <= last.astype("f8"))[:, same].all()


def check_values(
    found: np.ndarray, scales: np.ndarray, numbers: np.ndarray, hot_scale: np.ndarray
) -> None:
    """Codes `[BLOCK, Hkv, D]` and scales `[BLOCK, Hkv, S]` of int8 codes and their scales."""
    count = scales.shape[2]
    bits = 2 if count == 2 else 4
    parts = [np.split(each, count, axis=2) for each in (found, numbers)]
    for i, (ours, own) in enumerate(zip(*parts, strict=True)):
        for place in np.ndindex(own.shape[:2]):
            steps, scale = fitted(own[place], bits)
            differ = steps != 2.0 * ours[place] - (2**bits - 1)
            if bits == 4:
                assert not differ.any()
            else:
                unit = 2 * FIRST_STEP * np.sqrt(np.square(own[place]).mean())
                assert (np.abs(np.abs(own[place][differ]) / unit - 1) < 1e-5).all()
            if not differ.any():
                expected = np.float16(scale * np.float64(hot_scale[place]))
                assert np.abs(scales[place][i] - expected) <= np.spacing(expected)


def expected_rows(
    sequences: Sequence[Sequence[np.ndarray]],
    queries: Sequence[np.ndarray],
    ranges: Sequence[tuple[int, int]],
    format: KVFormat,
    **options: Any,
) -> list[np.ndarray]:
    """What the reference gives for queries at some positions of each sequence."""
    every = []
    for each, q, (start, end) in zip(sequences, queries, ranges, strict=False):
        hot = [round_trip(x, format, key=key) for x, key in zip(each, (True, False), strict=True)]
        cold = [x.copy() for x in hot]
        for at in range(BLOCK, sealed_end(end) * BLOCK, BLOCK):
            part = slice(at, at + BLOCK)
            for x, into, key in zip(each, cold, (True, False), strict=True):
                into[part] = sealed_rows(x[part], format, key=key)
        found = []
        for position in range(start, end):
            part = slice(BLOCK, sealed_end(position + 1) * BLOCK)
            held = [x[: position + 1].copy() for x in hot]
            for x, of in zip(held, cold, strict=True):
                x[part] = of[part]
            row = q[position - start][None]
            found.append(reference.attend(row, *held, position, **options)[0])
        every.append(np.stack(found))
    return every


def lose(cache: Cache, ranges: Sequence[tuple[int, int]]) -> None:
    """Break the blocks that no row reads: sealed ones that are read as rows, and the reverse."""
    for (start, end), table, sealed in zip(ranges, TABLES, SEALED_TABLES, strict=False):
        for block in table[1 : sealed_end(start + 1)]:
            cache.device.k_scale[block] = cache.device.v_scale[block] = float("nan")
        for block in sealed[sealed_end(end) :]:
            cache.sealed.k_scale[block] = cache.sealed.v_scale[block] = float("nan")


# Next tokens on both sides of where blocks are sealed, and rows of prompts across it: within a tile
# and over several, of one sequence and of two.
RANGES = [
    [(1, 2)],
    [(383, 384)],
    [(384, 385)],
    [(641, 642), (384, 385)],
    [(250, 262)],
    [(380, 390), (388, 389)],
    [(500, 522), (370, 390)],
    [(376, 420)],
]


@pytest.mark.parametrize("format", SEALED)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_rows_read_hot_and_sealed_blocks_as_the_reference_does(
    triton_device: str, format: KVFormat, heads: int, kv_heads: int, head_dim: int
) -> None:
    cache = Cache.of(format, heads, kv_heads, head_dim, triton_device)
    sequences = filled(cache, [642, 400])
    for position in (384, 512, 640):
        cache.seal([(position, position + 1), (384, 385)])
    for ranges in RANGES:
        check_attention(cache, sequences, ranges, heads, triton_device, format)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"softcap": 2.0, "scale": 0.3}, id="softcap"),
        pytest.param({"sinks": np.array([-3, 0, 2, 5], "f4")}, id="sinks", marks=pytest.mark.smoke),
    ],
)
def test_parts_of_attention(triton_device: str, options: dict[str, Any]) -> None:
    cache = Cache.of("k4v4", 4, 2, 64, triton_device)
    sequences = filled(cache, [642])
    for position in (384, 512, 640):
        cache.seal([(position, position + 1)])
    for ranges in ([(641, 642)], [(380, 386)]):
        check_attention(cache, sequences, ranges, 4, triton_device, "k4v4", **options)


def check_attention(
    cache: Cache,
    sequences: Sequence[Sequence[np.ndarray]],
    ranges: Sequence[tuple[int, int]],
    heads: int,
    device: str,
    format: KVFormat,
    **options: Any,
) -> None:
    """Rows at some positions of each sequence; blocks that they do not read are broken for it."""
    head_dim, counts = cache.host.head_dim, [end - start for start, end in ranges]
    rng = np.random.default_rng(sum(counts))
    queries = [rng.standard_normal((n, heads, head_dim)).astype("f4") for n in counts]
    size = 4 / np.linalg.norm(sequences[0][0], axis=-1).mean()
    queries = [q * np.float32(size) for q in queries]
    expected = expected_rows(sequences, queries, ranges, format, **options)
    scales = (cache.device.k_scale, cache.device.v_scale)
    scales += (cache.sealed.k_scale, cache.sealed.v_scale)
    whole = [each.clone() for each in scales]
    lose(cache, ranges)
    work, place = cache.set(ranges), cache.inputs.places[0]
    q = torch.tensor(np.concatenate(queries), device=device)
    turned = torch.tensor(hadamard.transform(q.cpu().numpy()), device=device)
    partials = attention.Partials.empty(
        tokens=len(q), kinds=[(heads, cache.host.kv_heads, head_dim)], device=device
    )
    for part in (partials.sums, partials.largest, partials.weight):
        part.fill_(float("nan"))
    settings = {
        name: torch.tensor(value, device=device) if name == "sinks" else value
        for name, value in options.items()
    }
    out = q.clone()
    attention.attend(
        *(cache.device, place.tables, LAYER, turned, work, out, partials),
        sealed=place.sealed,
        **settings,
    )
    for each, before in zip(scales, whole, strict=True):
        each.copy_(before)
    for ours, theirs in zip(
        np.split(out.cpu().numpy(), np.cumsum(counts)[:-1]), expected, strict=True
    ):
        largest = np.abs(theirs).max()
        np.testing.assert_allclose(ours / largest, theirs / largest, atol=2e-3, err_msg=str(ranges))


@pytest.mark.parametrize("format", SEALED)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_rows_are_appended_after_the_transform_of_both(
    triton_device: str, format: KVFormat, heads: int, kv_heads: int, head_dim: int
) -> None:
    """And queries are there before the transform and after it."""
    cache, half = Cache.of(format, heads, kv_heads, head_dim, triton_device), head_dim // 2
    table = rope.table((10000.0 ** (-np.arange(half) / half)).tolist(), 768)
    cos, sin = (torch.tensor(part, device=triton_device) for part in table)
    twin = allocate(format=format, blocks=10, layers=2, kv_heads=kv_heads, head_dim=head_dim)
    rng = np.random.default_rng(head_dim)
    qkv = rng.standard_normal((7, heads + 2 * kv_heads, head_dim)).astype("f4")
    expected = portable.append_rotated(twin, TABLES[0], LAYER, 123, qkv, table)
    q, plain = (torch.full(expected.shape, float("nan"), device=triton_device) for _ in range(2))
    work, place = cache.set([(123, 130)]), cache.inputs.places[0]
    ours = torch.tensor(qkv, device=triton_device)
    append_gpu.append_rotated(
        cache.device, place.tables, LAYER, work.rows, ours, cos, sin, q, plain=plain
    )
    np.testing.assert_allclose(plain.cpu().numpy(), expected, atol=2e-6)
    np.testing.assert_allclose(q.cpu().numpy(), hadamard.transform(expected), atol=2e-6)
    cache.device.give(range(10))
    for block, part in ((TABLES[0][0], slice(123, 128)), (TABLES[0][1], slice(0, 2))):
        for found, needed in zip(
            cache.host.read([block], LAYER, slice(None), BLOCK),
            twin.read([block], LAYER, slice(None), BLOCK),
            strict=True,
        ):
            steps = np.abs(found[:, part].astype("i4") - needed[:, part])
            assert steps.max() <= 1
            assert steps.mean() < 1e-3
        for name in ("k_scale", "v_scale"):
            mine, theirs = (getattr(x, name)[block, LAYER][:, part] for x in (cache.host, twin))
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)
