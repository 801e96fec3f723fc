from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

from edgellm.kernels import hadamard, rope  # noqa: E402
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks  # noqa: E402
from edgellm.kernels.kv_append import HeadNorms, gpu, portable  # noqa: E402
from edgellm.kernels.kv_blocks import (  # noqa: E402
    ROW_FORMATS,
    SCALED,
    KVBlocks,
    KVFormat,
    allocate,
)

TABLE = [4, 1, 3]
LAYERS, LAYER = 2, 1


def pool(
    format: KVFormat, kv_heads: int, head_dim: int, key_offset: np.ndarray | None = None
) -> KVBlocks:
    return allocate(
        format=format,
        blocks=5,
        layers=LAYERS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        key_offset=key_offset,
    )


def rows_at(start: int, count: int, device: str) -> torch.Tensor:
    """Tokens of the only sequence."""
    rows = [(position, 0) for position in range(start, start + count)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half", "shifted"),
    [
        (9, 3, 64, 32, False),
        (1, 1, 80, 40, True),
        (4, 2, 96, 24, True),
        (2, 1, 256, 128, False),
    ],
)
def test_matches_portable(
    triton_device: str,
    format: KVFormat,
    heads: int,
    kv_heads: int,
    head_dim: int,
    half: int,
    shifted: bool,
) -> None:
    """Codes may differ by one where RoPE's float32 sums do in their last bit."""
    rng = np.random.default_rng(head_dim)
    table = rope.table((10000.0 ** (-np.arange(half) / half)).tolist(), 300)
    cos, sin = (torch.tensor(part, device=triton_device) for part in table)
    ids = torch.tensor([TABLE], device=triton_device)
    offset = rng.standard_normal((LAYERS, kv_heads, head_dim)).astype("f4") if shifted else None
    host, twin = (pool(format, kv_heads, head_dim, offset) for _ in range(2))
    for array in (host.k, host.v, host.k_scale, host.v_scale):
        if array is not None:
            array.fill(0)
    device = DeviceBlocks.like(twin, triton_device)
    device.fetch(range(5))
    for block in (device.k, device.v, device.k_scale, device.v_scale):
        block.zero_()
    for start, count in ((0, 1), (1, 5), (126, 4), (255, 2)):
        qkv = rng.standard_normal((count, heads + 2 * kv_heads, head_dim)).astype(np.float32)
        expected = portable.append_rotated(host, TABLE, LAYER, start, qkv, table)
        if format in SCALED:
            expected = hadamard.transform(expected)
        q = torch.full(expected.shape, float("nan"), device=triton_device)
        at = rows_at(start, count, triton_device)
        ours = torch.tensor(qkv, device=triton_device)
        gpu.append_rotated(device, ids, LAYER, at, ours, cos, sin, q)
        np.testing.assert_allclose(q.cpu().numpy(), expected, atol=2e-6)
    device.give(range(5))
    for head in range(kv_heads):
        for ours, theirs in zip(
            twin.read(TABLE, LAYER, slice(head, head + 1), 257),
            host.read(TABLE, LAYER, slice(head, head + 1), 257),
            strict=True,
        ):
            steps = np.abs(ours.astype(np.float64) - theirs)
            assert steps.max() <= {"int8": 1, "f16": 4e-3, "f32": 2e-6}[format]
            assert (steps > 2e-6).mean() < 1e-3
    if host.k_scale is not None:
        np.testing.assert_allclose(twin.k_scale, host.k_scale, rtol=1e-6)
        np.testing.assert_allclose(twin.v_scale, host.v_scale, rtol=1e-6)


NORMS = ["each", "whole", "after_rope"]


def head_norms(order: str, heads: int, kv_heads: int, head_dim: int) -> HeadNorms:
    """Weights that differ from each other: those of another channel or head would show."""
    rng = np.random.default_rng(heads)
    sizes = (heads * head_dim, kv_heads * head_dim) if order == "whole" else (head_dim, head_dim)
    q, k = (rng.uniform(0.5, 2.0, size).astype("f4") for size in sizes)
    return HeadNorms(q=q, k=k, epsilon=0.05, after_rope=order == "after_rope")


@pytest.mark.parametrize("order", NORMS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half"),
    [(9, 3, 64, 32), (1, 1, 80, 40), (4, 2, 96, 24), (20, 1, 64, 16)],
)
def test_head_norms_match_portable(
    triton_device: str,
    order: str,
    biased: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    half: int,
) -> None:
    """With a RoPE that makes what it turns larger; V is left alone."""
    rng = np.random.default_rng(head_dim)
    norms = head_norms(order, heads, kv_heads, head_dim)
    frequencies = (10000.0 ** (-np.arange(half) / half)).tolist()
    table = rope.table(frequencies, 300, magnitude=1.7)
    cos, sin = (torch.tensor(part, device=triton_device) for part in table)
    ids = torch.tensor([TABLE], device=triton_device)
    ours_norms = gpu.DeviceNorms.of(norms, head_dim, triton_device)
    assert ours_norms.order == ("each" if heads == 1 and order == "whole" else order)
    host, twin = (pool("f32", kv_heads, head_dim) for _ in range(2))
    device = DeviceBlocks.like(twin, triton_device)
    for start, count in ((0, 1), (126, 4)):
        shape = (count, heads + 2 * kv_heads, head_dim)
        # heads of unlike sizes: a mean over others would show
        qkv = rng.uniform(0.1, 3, (*shape[:2], 1)) * rng.standard_normal(shape)
        qkv = qkv.astype(np.float32)
        bias = 0.5 * rng.standard_normal(shape[1:]).astype(np.float32) if biased else None
        before = qkv if bias is None else qkv + bias
        expected = portable.append_rotated(host, TABLE, LAYER, start, before, table, norms=norms)
        q = torch.full(expected.shape, float("nan"), device=triton_device)
        gpu.append_rotated(
            device,
            ids,
            LAYER,
            rows_at(start, count, triton_device),
            torch.tensor(qkv, device=triton_device),
            cos,
            sin,
            q,
            bias=None if bias is None else torch.tensor(bias, device=triton_device),
            norms=ours_norms,
        )
        np.testing.assert_allclose(q.cpu().numpy(), expected, atol=1e-5)
        device.give(range(5))
        for head in range(kv_heads):
            rows = slice(head, head + 1)
            for ours, theirs in zip(
                twin.read(TABLE, LAYER, rows, start + count),
                host.read(TABLE, LAYER, rows, start + count),
                strict=True,
            ):
                np.testing.assert_allclose(ours[start:], theirs[start:], atol=1e-5)


@pytest.mark.parametrize("order", NORMS)
@pytest.mark.parametrize("shared", [False, True])
def test_values_are_normalized_and_may_be_keys(
    triton_device: str, order: str, shared: bool
) -> None:
    """And a layer that reads those of another gets the same queries, and writes nothing."""
    heads, kv_heads, head_dim, half = 4, 2, 96, 24
    rng = np.random.default_rng(5)
    norms = replace(head_norms(order, heads, kv_heads, head_dim), values=True)
    table = rope.table((10000.0 ** (-np.arange(half) / half)).tolist(), 300)
    cos, sin = (torch.tensor(part, device=triton_device) for part in table)
    qkv = rng.standard_normal((4, heads + (1 if shared else 2) * kv_heads, head_dim)).astype("f4")
    bias = rng.standard_normal(qkv.shape[1:]).astype("f4")
    host, twin = (pool("f32", kv_heads, head_dim) for _ in range(2))
    device = DeviceBlocks.like(twin, triton_device)
    before = qkv + bias
    whole = np.concatenate([before, before[:, heads:]], axis=1) if shared else before
    expected = portable.append_rotated(host, TABLE, LAYER, 126, whole, table, norms=norms)

    def append(rows: np.ndarray, of: HeadNorms) -> np.ndarray:
        q = torch.full(expected.shape, float("nan"), device=triton_device)
        gpu.append_rotated(
            device,
            torch.tensor([TABLE], device=triton_device),
            LAYER,
            rows_at(126, 4, triton_device),
            torch.tensor(rows, device=triton_device),
            cos,
            sin,
            q,
            bias=torch.tensor(bias[: rows.shape[1]], device=triton_device),
            norms=gpu.DeviceNorms.of(of, head_dim, triton_device),
        )
        device.give(range(5))
        return q.cpu().numpy().copy()

    np.testing.assert_allclose(append(qkv, norms), expected, atol=1e-5)
    for head in range(kv_heads):
        kept = (each.read(TABLE, LAYER, slice(head, head + 1), 130) for each in (twin, host))
        for ours, theirs in zip(*kept, strict=True):
            np.testing.assert_allclose(ours[126:], theirs[126:], atol=1e-5)
    if order != "whole":
        device.k.fill_(7)
        device.v.fill_(7)
        np.testing.assert_allclose(append(qkv[:, :heads], norms), expected, atol=1e-5)
        assert (twin.k == 7).all()
        assert (twin.v == 7).all()


@pytest.mark.parametrize("order", NORMS)
def test_rounding_comes_after_head_norms(triton_device: str, order: str) -> None:
    """Codes of keys as they are without norms, where these change nothing."""
    rng = np.random.default_rng(1)
    heads, kv_heads, head_dim = 2, 1, 64
    qkv = rng.choice([-1.0, 1.0], (3, heads + 2 * kv_heads, head_dim)).astype(np.float32)
    larger = qkv.copy()
    larger[:, : heads + kv_heads] *= 3
    cos, sin = torch.ones((9, 32), device=triton_device), torch.zeros((9, 32), device=triton_device)
    sizes = (128, 64) if order == "whole" else (64, 64)
    ones, more = (np.ones(size, np.float32) for size in sizes)
    norms = HeadNorms(q=ones, k=more, epsilon=0.0, after_rope=order == "after_rope")
    ours = gpu.DeviceNorms.of(norms, head_dim, triton_device)
    codes = []
    for rows, chosen in ((qkv, None), (larger, ours)):
        device = DeviceBlocks.like(pool("int8", kv_heads, head_dim), triton_device)
        for block in (device.k, device.v):
            block.zero_()
        q = torch.full((3, heads, head_dim), float("nan"), device=triton_device)
        gpu.append_rotated(
            device,
            torch.tensor([TABLE], device=triton_device),
            LAYER,
            rows_at(0, 3, triton_device),
            torch.tensor(rows, device=triton_device),
            cos,
            sin,
            q,
            norms=chosen,
        )
        codes.append((device.k.cpu().numpy(), device.v.cpu().numpy(), q.cpu().numpy()))
    for plain, normed in zip(*codes, strict=True):
        np.testing.assert_allclose(normed, plain, atol=1e-6)


@pytest.mark.smoke
def test_nothing_else_is_written(triton_device: str) -> None:
    host = pool("int8", 2, 64)
    device = DeviceBlocks.like(host, triton_device)
    for block in (device.k, device.v):
        block.fill_(99)
    qkv = torch.randn((3, 6, 64), device=triton_device)
    q = torch.empty((3, 2, 64), device=triton_device)
    ones = torch.ones((200, 32), device=triton_device)
    rows = rows_at(127, 3, triton_device)
    ids = torch.tensor([TABLE], device=triton_device)
    gpu.append_rotated(device, ids, LAYER, rows, qkv, ones, 0 * ones, q)
    device.give(range(5))
    written = np.zeros((5, LAYERS, 2, 128), bool)
    written[4, LAYER, :, 127] = written[1, LAYER, :, :2] = True
    untouched = host.k.transpose(0, 1, 2, 3, 5, 4, 6).reshape(5, LAYERS, 2, 128, -1)[~written]
    assert (untouched == 99).all()
    untouched = host.v.transpose(0, 1, 2, 3, 5, 4).reshape(5, LAYERS, 2, 128, -1)[~written]
    assert (untouched == 99).all()


@pytest.mark.parametrize("format", ROW_FORMATS)
def test_rows_of_several_sequences_go_to_their_own_tables(
    triton_device: str, format: KVFormat
) -> None:
    """Tables lie within wider ones, as those of a pool among several do."""
    rng = np.random.default_rng(5)
    table = rope.table((10000.0 ** (-np.arange(32) / 32)).tolist(), 300)
    cos, sin = (torch.tensor(part, device=triton_device) for part in table)
    spans = [([0], 3, 2), ([4, 1], 127, 3), ([3], 90, 1)]
    wide = torch.full((3, 2, 2), 2, device=triton_device)
    for number, (blocks, _, _) in enumerate(spans):
        wide[number, 1, : len(blocks)] = torch.tensor(blocks)
    rows = [
        (start + token, number)
        for number, (_, start, count) in enumerate(spans)
        for token in range(count)
    ]
    hosts = [pool(format, 2, 64) for _ in range(2)]
    for host in hosts:
        for array in host.arrays:
            array.fill(9)
    expected, ours = hosts
    device = DeviceBlocks.like(ours, triton_device)
    device.fetch(range(5))
    qkv = rng.standard_normal((len(rows), 8, 64)).astype(np.float32)
    first, queries = 0, []
    for blocks, start, count in spans:
        part = qkv[first : first + count]
        queries.append(portable.append_rotated(expected, blocks, LAYER, start, part, table))
        first += count
    q = torch.full((len(rows), 4, 64), float("nan"), device=triton_device)
    gpu.append_rotated(
        device,
        wide[:, 1],
        LAYER,
        torch.tensor(rows, dtype=torch.int32, device=triton_device),
        torch.tensor(qkv, device=triton_device),
        cos,
        sin,
        q,
    )
    rotated = np.concatenate(queries)
    rotated = hadamard.transform(rotated) if format in SCALED else rotated
    np.testing.assert_allclose(q.cpu().numpy(), rotated, atol=2e-6)
    device.give(range(5))
    for found, wanted in zip(ours.arrays, expected.arrays, strict=True):
        steps = np.abs(found.astype(np.float64) - wanted)
        assert steps.max() <= {"int8": 1, "f16": 4e-3, "f32": 2e-6}[format]
        assert (steps > 2e-6).mean() < 1e-3
