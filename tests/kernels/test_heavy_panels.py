from __future__ import annotations

import ctypes

import numpy as np
import pytest
from breadth import one_in
from instruction_sets import HERE, UseISA

from edgellm.kernels.attention import native, reference
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_append.reference import round_trip
from edgellm.kernels.kv_blocks import (
    BLOCK,
    DENSE_POSITIONS,
    PANEL,
    KVBlocks,
    KVFormat,
    allocate,
    first_dense,
)

# Positions whose blocks 32 and 33 are whole, and those before and behind them.
PANELS = BLOCK // PANEL
START, END = DENSE_POSITIONS - 40, DENSE_POSITIONS + 2 * BLOCK + 30
TABLE = [(7 * i + 3) % 37 for i in range(35)]


def inputs(heads: int, kv_heads: int, head_dim: int) -> list[np.ndarray]:
    """Q, K and V; some keys have most of the attention, others for each KV head."""
    rng = np.random.default_rng(heads + head_dim)
    q = rng.standard_normal((END - START, heads, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, END, kv_heads, head_dim)).astype(np.float32)
    towards = rng.standard_normal((kv_heads, head_dim)).astype(np.float32)
    q += np.repeat(towards, heads // kv_heads, axis=0)
    for kv_head in range(kv_heads):
        for n, panel in enumerate(rng.permutation(32 * PANELS)[:50]):
            at = slice(panel * PANEL, (panel + 1) * PANEL)
            k[at, kv_head] += (0.9 - 0.008 * n) * towards[kv_head]
    return [q, k, v]


def filled(k: np.ndarray, v: np.ndarray) -> KVBlocks:
    sizes = {"layers": 2, "kv_heads": k.shape[1], "head_dim": k.shape[2]}
    blocks = allocate(format="int8", blocks=37, **sizes)
    append(blocks, TABLE, 1, 0, k, v)
    return blocks


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), one_in(4, [(2, 2, 8), (3, 1, 64), (4, 2, 24), (5, 1, 80)])
)
@pytest.mark.usefixtures("poisoned")
def test_whole_blocks_read_the_panels_that_the_reference_chooses(
    use_isa: UseISA, heads: int, kv_heads: int, head_dim: int
) -> None:
    q, k, v = inputs(heads, kv_heads, head_dim)
    blocks, group = filled(k, v), heads // kv_heads
    held = [round_trip(k, "int8", key=True), round_trip(v, "int8", key=False)]
    expected = reference.attend(q, *held, START)
    sizes = []
    for first in (DENSE_POSITIONS, DENSE_POSITIONS + BLOCK):
        rows = slice(first - START, first - START + BLOCK)
        for h in range(heads):
            keys = held[0][: first + BLOCK, h // group]
            chosen = reference.heavy_panels(q[rows, h], keys, 0.8)
            at = (chosen[:, None] * PANEL + np.arange(PANEL)).ravel()
            read = [each[at, h // group, None] for each in held]
            one = slice(h, h + 1)
            expected[rows, one] = reference.attend(q[rows, one], *read, len(at) - BLOCK)
            sizes.append(len(chosen))
    assert 4 * PANELS <= min(sizes) <= max(sizes) < 30 * PANELS
    for isa in HERE:
        found = native.attend(use_isa(isa), blocks, TABLE, 1, q, START, prefill_mass=0.8)
        np.testing.assert_allclose(found, expected, atol=5e-4, rtol=0, err_msg=isa)


@pytest.mark.usefixtures("poisoned")
def test_a_row_has_its_bits_however_whole_blocks_are_cut(compiled: ctypes.CDLL) -> None:
    """Blocks that are not whole read all, and so does a block that may read all of the mass."""
    q, k, v = inputs(4, 2, 8)
    blocks = filled(k, v)

    def attend(start: int, end: int, **rules: float) -> np.ndarray:
        return native.attend(
            compiled, blocks, TABLE, 1, q[start - START : end - START], start, **rules
        )

    dense, whole = attend(START, END), attend(START, END, prefill_mass=0.8, threads=2)
    np.testing.assert_array_equal(attend(START, END, prefill_mass=1), dense)
    at, middle = DENSE_POSITIONS - START, DENSE_POSITIONS + BLOCK
    assert (whole[at : at + 2 * BLOCK] != dense[at : at + 2 * BLOCK]).any(axis=(1, 2)).all()
    for rows in (slice(at), slice(at + 2 * BLOCK, None)):
        np.testing.assert_array_equal(whole[rows], dense[rows])
    for cut in (DENSE_POSITIONS - 1, DENSE_POSITIONS, middle, middle + BLOCK):
        parts = [attend(START, cut, prefill_mass=0.8), attend(cut, END, prefill_mass=0.8)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    rows = slice(middle - 1 - START, middle + BLOCK - 1 - START)
    found = attend(middle - 1, middle + BLOCK - 1, prefill_mass=0.8)
    np.testing.assert_array_equal(found, dense[rows])


@pytest.mark.parametrize(
    ("start", "end", "first"),
    [
        (0, 300, 300),
        (0, 4096, 4096),
        (0, 4300, 4224),
        (4000, 4224, 4224),
        (4096, 4100, 4096),
        (4097, 4300, 4097),
        (4224, 4480, 4480),
        (4224, 4481, 4480),
    ],
)
def test_the_first_position_that_reads_all(start: int, end: int, first: int) -> None:
    assert first_dense(start, end) == first


@pytest.mark.parametrize("broken", ["q", "k"])
def test_a_nan_shows(compiled: ctypes.CDLL, broken: str) -> None:
    q, k, v = inputs(4, 2, 16)
    blocks = filled(k, v)
    if broken == "q":
        q[DENSE_POSITIONS - START + 3, 1] = np.nan
    else:
        blocks.k_scale[TABLE[7], 1, 0, 4] = np.nan
    found = native.attend(compiled, blocks, TABLE, 1, q, START, prefill_mass=0.8)
    hit = np.isnan(found).any(axis=2)
    if broken == "q":
        assert hit.sum() == hit[DENSE_POSITIONS - START + 3, 1] == 1
    else:
        assert hit[:, :2].all()
        assert not hit[:, 2:].any()


@pytest.mark.parametrize(
    ("rules", "format"),
    [({"prefill_mass": 1.5}, "int8"), ({"prefill_mass": 0.5}, "f16"), ({"window": 9}, "int8")],
)
def test_what_cannot_choose_is_refused(
    native_library: ctypes.CDLL, rules: dict[str, float], format: KVFormat
) -> None:
    blocks = allocate(format=format, blocks=3, layers=2, kv_heads=1, head_dim=16)
    q = np.zeros((1, 1, 16), np.float32)
    with pytest.raises(ValueError, match=r"of the attention on|a window of 9"):
        native.attend(native_library, blocks, [0], 1, q, 0, **{"prefill_mass": 0.9, **rules})
