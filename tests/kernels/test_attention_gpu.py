from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

from edgellm.kernels import hadamard  # noqa: E402
from edgellm.kernels.attention import gpu, reference  # noqa: E402
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks  # noqa: E402
from edgellm.kernels.kv_append import append  # noqa: E402
from edgellm.kernels.kv_append.reference import round_trip  # noqa: E402
from edgellm.kernels.kv_blocks import KV_FORMATS, SCALED, KVFormat, allocate  # noqa: E402

TABLE = [3, 0, 5, 1, 4]
# Relative to the largest output: halves for queries, weights and sums of codes.
ALLOWED = {"int8": 2e-3, "int4": 2e-3, "f16": 2e-3, "f32": 2e-6}


def run(
    device: str,
    format: KVFormat,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    length: int,
    tokens: int,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    size: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """The last `tokens` of `length` tokens attend; ours, and the reference on what the cache holds.

    Memory that was never written holds NaN, or the largest code.
    """
    rng = np.random.default_rng(head_dim + length)
    host = allocate(format=format, blocks=6, layers=2, kv_heads=kv_heads, head_dim=head_dim)
    for array in (host.k, host.v, host.k_scale, host.v_scale):
        if array is not None:
            array.fill(np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max)
    k, v = (
        size * rng.standard_normal((length, kv_heads, head_dim)).astype(np.float32)
        for _ in range(2)
    )
    append(host, TABLE, 1, 0, k, v)
    q = size * rng.standard_normal((tokens, heads, head_dim)).astype(np.float32)
    held = round_trip(k, format, key=True), round_trip(v, format, key=False)
    options = {"window": window, "scale": scale, "softcap": softcap}
    expected = reference.attend(q, *held, length - tokens, **options)
    blocks = DeviceBlocks.like(host, device)
    blocks.fetch(range(6))
    ours = torch.tensor(hadamard.transform(q) if format in SCALED else q, device=device)
    out = torch.full(q.shape, float("nan"), device=device)
    partials = gpu.Partials.empty(
        tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, device=device
    )
    for part in (partials.sums, partials.largest, partials.weight):
        part.fill_(float("nan"))
    start = torch.tensor([length - tokens], dtype=torch.int32, device=device)
    ids = torch.tensor(TABLE, device=device)
    gpu.attend(blocks, ids, 1, ours, start, out, partials, **options)
    return out.cpu().numpy(), expected


def check(found: np.ndarray, expected: np.ndarray, format: str) -> None:
    size = np.abs(expected).max()
    np.testing.assert_allclose(found / size, expected / size, atol=ALLOWED[format])


@pytest.mark.parametrize("format", KV_FORMATS)
@pytest.mark.parametrize(
    ("length", "tokens"), [(1, 1), (63, 1), (65, 1), (127, 1), (300, 1), (130, 16), (260, 40)]
)
def test_matches_reference(triton_device: str, format: KVFormat, length: int, tokens: int) -> None:
    shape = {"heads": 9, "kv_heads": 3, "head_dim": 64}
    check(*run(triton_device, format, length=length, tokens=tokens, **shape), format)


@pytest.mark.parametrize("format", KV_FORMATS)
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


@pytest.mark.parametrize("format", KV_FORMATS)
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
    for format in KV_FORMATS:
        result = run(triton_device, format, length=70, tokens=2, size=size, softcap=50.0, **shape)
        assert np.isfinite(result[0]).all()


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e4])
def test_tiny_and_huge_values_stay_finite(triton_device: str, size: float) -> None:
    shape = {"heads": 3, "kv_heads": 1, "head_dim": 64}
    found, _ = run(triton_device, "int8", length=70, tokens=2, size=size, **shape)
    assert np.isfinite(found).all()
