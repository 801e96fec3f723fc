"""What reaches compiled kernels: nothing out of range, of another type or of another shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from random_weights import random_weight

from edgellm.kernels import attention, kv_append, rope
from edgellm.kernels.checks import block_ids, check_rope, floats, indices
from edgellm.kernels.kv_blocks import BLOCK, allocate
from edgellm.kernels.linear import PackedWeights, native, pack_weight, rows_of
from edgellm.kernels.quantized import KINDS
from edgellm.kernels.sampling.native import candidates, log_sum_exp, top_k

HUGE = [-1, 70, 10**9, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, -(1 << 63), 10**30]


@pytest.mark.parametrize("values", [[], [0], [69], [3, 0, 69], (1, 2), np.array([5], np.int32)])
def test_ids_in_range_are_taken(values: Sequence[int]) -> None:
    found = indices(values, 70, "token id")
    assert found.dtype == np.int64
    assert found.tolist() == list(values)


@pytest.mark.parametrize("wrong", [*HUGE, 1.0, "1", None, [1]])
def test_other_ids_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"token id"):
        indices([wrong], 70, "token id")
    with pytest.raises(ValueError, match=r"token id|inhomogeneous"):
        indices([3, wrong, 4], 70, "token id")


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 2 * BLOCK), (2 * BLOCK - 1, 1)])
def test_tables_that_reach_far_enough(start: int, tokens: int) -> None:
    assert block_ids([4, 0], 5, start=start, tokens=tokens).tolist() == [4, 0]


@pytest.mark.parametrize(("start", "tokens"), [(-1, 1), (2 * BLOCK, 1), (0, 2 * BLOCK + 1)])
def test_positions_beyond_the_table(start: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="positions"):
        block_ids([4, 0], 5, start=start, tokens=tokens)


@pytest.mark.parametrize(
    "array", [np.zeros((2, 3)), np.zeros((3, 2), np.float32), np.zeros(6, np.float32)]
)
def test_arrays_of_another_type_or_shape(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"q is float32 \(2, 3\), not"):
        floats(array, (2, 3), "q")


def test_gaps_are_closed() -> None:
    columns = np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2]
    found = floats(columns, (2, 3), "q")
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, columns)


def test_rope_tables_that_do_not_fit() -> None:
    table = rope.table([1.0] * 8, 10)
    check_rope(table, 16, 10)
    for head_dim, end in ((8, 10), (16, 11)):
        with pytest.raises(ValueError, match="RoPE table has 10 positions"):
            check_rope(table, head_dim, end)
    with pytest.raises(ValueError, match="float32"):
        check_rope(rope.RopeTable(table.cos.astype(np.float64), table.sin), 16, 10)
    with pytest.raises(ValueError, match="one shape"):
        check_rope(rope.RopeTable(table.cos, table.sin[:5]), 16, 10)


def test_wrappers_of_attention_and_append(native_library: Any) -> None:
    blocks = allocate(format="f32", blocks=3, layers=2, kv_heads=2, head_dim=16)
    q, table = np.zeros((2, 4, 16), np.float32), rope.table([1.0] * 8, 300)
    qkv = np.zeros((2, 8, 16), np.float32)

    def attend(table: list[int] = [0], layer: int = 0, q: Any = q, start: int = 0) -> None:  # noqa: B006
        attention.native.attend(native_library, blocks, table, layer, q, start)

    def append(ids: list[int] = [0], layer: int = 0, qkv: Any = qkv, start: int = 0) -> None:  # noqa: B006
        kv_append.native.append_rotated(native_library, blocks, ids, layer, start, qkv, table)

    append()
    attend()
    for call in (attend, append):
        for ids in ([3], [-1], [1 << 40], []):
            with pytest.raises(ValueError, match=r"block"):
                call(ids)
        for start in (-1, BLOCK - 1, 1 << 31):
            with pytest.raises(ValueError, match="positions"):
                call(start=start)
        for layer in (-1, 2):
            with pytest.raises(ValueError, match="2 layers"):
                call(layer=layer)
    for wrong in (q.astype(np.float64), q[..., :8]):
        with pytest.raises(ValueError, match="q is float32"):
            attend(q=wrong)
    with pytest.raises(ValueError, match="3 heads"):
        attend(q=q[:, :3])
    for wrong in (qkv.astype(np.float64), np.zeros((2, 8, 32), np.float32)):
        with pytest.raises(ValueError, match="qkv is float32"):
            append(qkv=wrong)
    with pytest.raises(ValueError, match="3 rows"):
        append(qkv=qkv[:, :3])
    with pytest.raises(ValueError, match="RoPE table"):
        append([0, 1, 2], start=299)


def some_panels() -> PackedWeights:
    return pack_weight(random_weight("int8_symmetric", 70, 64, np.random.default_rng(0)))


def test_panels_of_another_size() -> None:
    panels = some_panels()
    for outputs, inputs, kind in (
        (81, 64, "int8_symmetric"),
        (70, 96, "int8_symmetric"),
        (70, 64, "int4_affine"),
    ):
        with pytest.raises(ValueError, match=f"panels of {outputs} x {inputs}"):
            PackedWeights(panels.data, outputs, inputs, KINDS[kind])
    for data in (panels.data.astype(np.int16), panels.data[..., ::-1]):
        with pytest.raises(ValueError, match="panels of 70 x 64"):
            replace(panels, data=data)


@pytest.mark.parametrize("row", [-1, 70, 79, 10**9])
def test_rows_that_a_weight_does_not_have(row: int) -> None:
    with pytest.raises(ValueError, match="a row is from 0 to 69"):
        rows_of(some_panels(), [row])


def test_rows_of_another_width(native_library: Any) -> None:
    for x in (np.zeros((2, 32), np.float32), np.zeros((2, 64))):
        with pytest.raises(ValueError, match="x is float32"):
            native.linear(native_library, x, some_panels())


def test_scores_of_another_type(native_library: Any) -> None:
    for scores in (np.zeros(9), np.zeros((3, 3), np.float32)):
        with pytest.raises(ValueError, match="scores is float32"):
            top_k(native_library, scores, 3)
        with pytest.raises(ValueError, match="scores is float32"):
            log_sum_exp(native_library, scores)
    with pytest.raises(ValueError, match="k is -1"):
        top_k(native_library, np.zeros(9, np.float32), -1)


def test_rows_of_logits_that_do_not_fit(native_library: Any) -> None:
    rows = np.zeros((2, 9), np.float32)
    for logits in (rows.astype(np.float64), rows[:, ::2], rows[0]):
        with pytest.raises(ValueError, match="float32 rows"):
            candidates(native_library, logits, [1, 1])
    for wanted in ([1], [1, -1], []):
        with pytest.raises(ValueError, match="wanted"):
            candidates(native_library, rows, wanted)
