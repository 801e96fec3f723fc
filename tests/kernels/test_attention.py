from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
from instruction_sets import HERE

from edgellm.kernels.attention import attend, native, portable, reference
from edgellm.kernels.hadamard import reference as hadamard
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_blocks import BLOCK, ROW_FORMATS, SCALED, KVBlocks, allocate

Attend = Callable[..., np.ndarray]
All = Callable[[], Iterator[tuple[str, Attend]]]

SHAPES = [
    # start, tokens, heads, kv_heads, head_dim
    (0, 1, 1, 1, 64),
    (0, 63, 9, 3, 64),
    (62, 1, 8, 1, 80),
    (64, 1, 6, 6, 96),
    (126, 2, 10, 2, 64),
    (300, 40, 8, 1, 20),
    (1, 126, 4, 2, 32),
    (127, 1, 5, 1, 128),
    (120, 17, 7, 7, 16),
    (255, 130, 6, 2, 256),
]


def read_back(blocks: KVBlocks, table: list[int], name: str, length: int) -> np.ndarray:
    """What layer 1 of the cache holds, `[length, Hkv, D]` float64."""
    scale = getattr(blocks, f"{name}_scale")
    spread = blocks.format == "int8" and name == "k"
    rows = []
    for position in range(length):
        block, row = table[position // BLOCK], position % BLOCK
        values = (blocks.key_rows if name == "k" else blocks.value_rows)(block, 1, row)
        exact = values.astype(np.float64)
        exact = exact if scale is None else exact * scale[block, 1, :, row, None]
        rows.append(hadamard.transform(exact) if spread else exact)
    return np.stack(rows)


@pytest.fixture(params=["portable", *HERE])
def implementation(request: pytest.FixtureRequest) -> Attend:
    """Each implementation that this machine has, in turn."""
    if request.param == "portable":
        return portable.attend
    return functools.partial(native.attend, request.getfixturevalue("use_isa")(request.param))


@pytest.fixture
def all_of_them(request: pytest.FixtureRequest) -> All:
    """Each implementation that this machine has, by name, for what is computed once for all."""

    def each() -> Iterator[tuple[str, Attend]]:
        yield "portable", portable.attend
        for isa in HERE:
            yield isa, functools.partial(native.attend, request.getfixturevalue("use_isa")(isa))

    return each


def compare(
    implementations: Iterable[tuple[str, Attend]],
    shape: tuple[int, ...],
    format: str,
    window: int | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> None:
    start, tokens, heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(sum(shape))
    length = start + tokens
    blocks = allocate(format=format, blocks=6, layers=2, kv_heads=kv_heads, head_dim=head_dim)
    table = [3, 5, 0, 4, 1]
    k, v = rng.standard_normal((2, length, kv_heads, head_dim)).astype(np.float32)
    q = rng.standard_normal((tokens, heads, head_dim)).astype(np.float32)
    append(blocks, table, 1, 0, k, v)
    rules = {"window": window, "scale": scale, "softcap": softcap}
    if sinks:  # far below the scores, beside them, and far above
        rules["sinks"] = (np.linspace(-30, 30, heads) + rng.standard_normal(heads)).astype("f4")
    stored = [read_back(blocks, table, values, length) for values in ("k", "v")]
    expected = reference.attend(q, *stored, start, **rules)
    for name, implementation in implementations:
        found = implementation(blocks, table, 1, q, start, **rules)
        allowed = tolerance(implementation, format)
        np.testing.assert_allclose(found, expected, atol=allowed, rtol=0, err_msg=name)


def tolerance(attend: Attend, format: str) -> float:
    """C++ rounds queries to 16 bits and weights to 14 for integers; all else is float32."""
    return 3e-6 if format not in SCALED or attend is portable.attend else 3e-4


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_matches_reference(all_of_them: All, shape: tuple[int, ...], format: str) -> None:
    compare(all_of_them(), shape, format, None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [1, 5, 64])
@pytest.mark.usefixtures("poisoned")
def test_sliding_window(all_of_them: All, shape: tuple[int, ...], window: int) -> None:
    compare(all_of_them(), shape, "int8", window)


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.usefixtures("poisoned")
def test_sinks(all_of_them: All, format: str, window: int | None) -> None:
    """Past a split of the keys, and for the very first token."""
    for shape in ((500, 40, 8, 2, 64), (0, 1, 4, 4, 32)):
        compare(all_of_them(), shape, format, window, sinks=True)


@pytest.mark.parametrize("format", ["int8", "f32"])
@pytest.mark.parametrize(("scale", "softcap"), [(0.06, None), (None, 2.0), (0.2, 1.5)])
@pytest.mark.usefixtures("poisoned")
def test_scale_and_softcap(
    all_of_them: All, format: str, scale: float | None, softcap: float | None
) -> None:
    shape = (100, 131, 8, 2, 96)
    for window in (None, 40):
        compare(all_of_them(), shape, format, window, scale=scale, softcap=softcap)


@pytest.mark.usefixtures("poisoned")
def test_one_kv_head_at_a_time_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "_SCORE_BYTES", 1)
    compare([("portable", portable.attend)], (255, 130, 6, 2, 64), "int8", None)


def test_huge_scores_stay_finite(implementation: Attend) -> None:
    blocks = allocate(format="f32", blocks=1, layers=1, kv_heads=1, head_dim=8)
    k = np.full((4, 1, 8), 1e4, np.float32)
    append(blocks, [0], 0, 0, k, k)
    found = implementation(blocks, [0], 0, np.full((4, 1, 8), 1e4, np.float32), 0)
    np.testing.assert_allclose(found, 1e4, rtol=1e-6)


def test_far_apart_scores_underflow_to_zero(implementation: Attend) -> None:
    blocks = allocate(format="f32", blocks=1, layers=1, kv_heads=1, head_dim=8)
    k = np.zeros((3, 1, 8), np.float32)
    k[1] = 1000
    append(blocks, [0], 0, 0, k, k)
    found = implementation(blocks, [0], 0, np.ones((3, 1, 8), np.float32), 0)
    np.testing.assert_array_equal(found[:, 0, 0], [0, 1000, 1000])


def random_call(seed: int) -> tuple[tuple, np.ndarray]:
    """Arguments of a call that is cut into many tasks, and its result on one thread."""
    rng = np.random.default_rng(seed)
    blocks = allocate(format="int8", blocks=4, layers=1, kv_heads=3, head_dim=64)
    k, v = rng.standard_normal((2, 400, 3, 64)).astype(np.float32)
    append(blocks, [2, 0, 3, 1], 0, 0, k, v)
    q = rng.standard_normal((200, 9, 64)).astype(np.float32)
    arguments = (blocks, [2, 0, 3, 1], 0, q, 200)
    return arguments, attend(*arguments, threads=1)


@pytest.mark.usefixtures("native_library")
def test_company_makes_no_difference() -> None:
    (blocks, table, layer, q, start), expected = random_call(3)
    for first, count in ((0, 1), (1, 2), (3, 31), (34, 97), (131, 69)):
        part = attend(blocks, table, layer, q[first : first + count], start + first, threads=2)
        np.testing.assert_array_equal(part, expected[first : first + count])


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_make_no_difference(threads: int) -> None:
    arguments, expected = random_call(threads)
    for _ in range(20):
        np.testing.assert_array_equal(attend(*arguments, threads=threads), expected)


def test_calls_from_two_threads_at_once() -> None:
    calls = [random_call(seed) for seed in (1, 2)]
    wrong = []

    def work(arguments: tuple, expected: np.ndarray) -> None:
        for _ in range(30):
            if not np.array_equal(attend(*arguments, threads=2), expected):
                wrong.append(arguments)

    workers = [threading.Thread(target=work, args=call) for call in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_as_well() -> None:
    arguments, expected = random_call(5)
    attend(*arguments, threads=2)
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # a child that hangs is ended, and has not computed as well
        same = np.array_equal(attend(*arguments, threads=2), expected)
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
