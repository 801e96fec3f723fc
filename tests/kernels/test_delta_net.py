from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from instruction_sets import HERE, UseISA
from random_weights import random_weight

from edgellm.kernels.delta_net import DeltaNetWeights, reference
from edgellm.kernels.delta_net.native import delta_net
from edgellm.kernels.linear import PackedWeights, pack_weight
from edgellm.kernels.state_blocks import StateRows

HIDDEN = 32
EPSILON = 1e-6
# key heads, value heads, their widths, taps, tiled
SHAPES = [
    (2, 2, 16, 32, 4, False),
    (2, 4, 32, 64, 4, False),
    (2, 6, 16, 96, 2, True),
    (1, 1, 128, 128, 4, False),
    (3, 3, 48, 32, 8, True),
]


def weights(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, taps: int, tiled: bool
) -> DeltaNetWeights:
    rng = np.random.default_rng(key_heads)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def projection(outputs: int) -> PackedWeights:
        return pack_weight(random_weight("int8_symmetric", outputs, HIDDEN, rng, size=1.0))

    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return DeltaNetWeights(
        qkv=projection(channels),
        z=projection(value_heads * value_dim),
        a=projection(value_heads),
        b=projection(value_heads),
        conv=drawn(taps, channels),
        decay=-np.exp(drawn(value_heads)),
        dt_bias=drawn(value_heads),
        norm=1 + drawn(value_dim) / 4,
        key_heads=key_heads,
        tiled=tiled,
    )


@pytest.fixture(params=SHAPES, ids=str)
def net(request: pytest.FixtureRequest) -> DeltaNetWeights:
    return weights(*request.param)


Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def rows_of(net: DeltaNetWeights, rows: int, seed: int = 0) -> Rows:
    """Projections of rows."""
    rng = np.random.default_rng(seed)
    drawn = [
        (size * rng.standard_normal((rows, width))).astype(np.float32)
        for width, size in (
            (net.channels, 1),
            (net.size, 1),
            (net.value_heads, 3),
            (net.value_heads, 3),
        )
    ]
    return drawn[0], drawn[1], drawn[2], drawn[3]


def cut(rows: Rows, first: int, end: int) -> Rows:
    qkv, z, a, b = rows
    return qkv[first:end], z[first:end], a[first:end], b[first:end]


def state_of(net: DeltaNetWeights, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(net.state_size).astype(np.float32)


def mixed(
    library: ctypes.CDLL,
    net: DeltaNetWeights,
    rows: Rows,
    spans: list[StateRows],
    *,
    threads: int,
) -> np.ndarray:
    inputs = np.concatenate(rows, axis=1)
    return delta_net(library, inputs, net, spans, epsilon=EPSILON, threads=threads)


def run(
    library: ctypes.CDLL,
    net: DeltaNetWeights,
    rows: Rows,
    state: np.ndarray | None,
    ends: tuple[int, ...],
    *,
    threads: int = 1,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Outputs, and the states after each of `ends` rows."""
    targets = [(end, np.empty(net.state_size, np.float32)) for end in ends]
    out = mixed(library, net, rows, [StateRows(state, targets)], threads=threads)
    return out, [to for _, to in targets]


def assert_near(found: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_allclose(found, right, rtol=0, atol=2e-5 * np.abs(right).max())


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("shape", [each for each in SHAPES if not each[-1]], ids=str)
def test_the_reference_computes_what_transformers_does(
    shape: tuple[int, int, int, int, int, bool], form: str
) -> None:
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    net, rows = weights(*shape), 70
    inputs = rows_of(net, rows)
    qkv, z, a, b = map(torch.from_numpy, inputs)
    conv = torch.from_numpy(net.conv.T.copy())
    mixed = qwen.causal_conv1d_fn(qkv.T[None], conv, activation="silu")[0].T
    q, k, v = torch.split(mixed, [net.keys, net.keys, net.size], dim=1)
    decay, dt_bias = torch.from_numpy(net.decay), torch.from_numpy(net.dt_bias)
    g = decay * torch.nn.functional.softplus(a + dt_bias)
    rule = getattr(qwen, f"torch_{form}_gated_delta_rule")
    rule = getattr(rule, "__wrapped__", rule)
    heads = (each.reshape(1, rows, -1, net.key_dim) for each in (q, k))
    o, last = rule(
        *heads,
        v.reshape(1, rows, -1, net.value_dim),
        g=g[None],
        beta=b.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = qwen.Qwen3_5RMSNormGated(net.value_dim, eps=EPSILON)
    norm.weight.data = torch.from_numpy(net.norm)
    right = norm(o.reshape(-1, net.value_dim), z.reshape(-1, net.value_dim)).reshape(rows, -1)
    out, state = reference.delta_net(net, inputs, EPSILON)
    assert_near(out, right.detach().numpy())
    blocks = state[(net.taps - 1) * net.channels :].reshape(net.value_heads, -1, net.key_dim, 32)
    matrices = blocks.transpose(0, 2, 1, 3).reshape(net.value_heads, net.key_dim, -1)
    assert_near(matrices, last[0].numpy())
    np.testing.assert_array_equal(
        state[: (net.taps - 1) * net.channels], inputs[0][1 - net.taps :].ravel()
    )


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.usefixtures("poisoned")
def test_native_computes_what_the_reference_does(
    use_isa: UseISA, net: DeltaNetWeights, rows: int
) -> None:
    for state in (None, state_of(net)):
        inputs = rows_of(net, rows)
        right, last = reference.delta_net(net, inputs, EPSILON, state)
        for isa in HERE:
            out, (after,) = run(use_isa(isa), net, inputs, state, (rows,))
            assert_near(out, right)
            assert_near(after, last)


def test_value_heads_have_the_key_heads_of_their_order() -> None:
    grouped = weights(2, 4, 16, 32, 4, False)
    tiled = replace(grouped, tiled=True)
    assert [grouped.key_head_of(head) for head in range(4)] == [0, 0, 1, 1]
    assert [tiled.key_head_of(head) for head in range(4)] == [0, 1, 0, 1]


@pytest.mark.usefixtures("poisoned", "eight_cores")
def test_bits_do_not_depend_on_cuts_company_or_threads(
    compiled: ctypes.CDLL, net: DeltaNetWeights
) -> None:
    """Rows alone, a few at a time and all at once, with others before and behind them."""
    rows, state = 50, state_of(net)
    inputs, others = rows_of(net, rows), rows_of(net, 3, seed=2)
    whole, (early, middle, last) = run(compiled, net, inputs, state, (2, 24, rows))
    wanted = {2: early, 24: middle, rows: last}
    for threads, cuts in ((1, range(1, 6)), (3, (1, 2, 4, 17, 24, 25, 50)), (8, (49, 50))):
        before, first = state, 0
        for end in cuts:
            after, theirs, beside = (np.empty(net.state_size, np.float32) for _ in range(3))
            spans = [
                StateRows(None, [(1, theirs), (3, beside)]),
                StateRows(before, [(end - first, after)]),
                StateRows(state, [(3, np.empty_like(state))]),
            ]
            parts = zip(others, cut(inputs, first, end), others, strict=True)
            qkv, z, a, b = map(np.concatenate, parts)
            out = mixed(compiled, net, (qkv, z, a, b), spans, threads=threads)
            np.testing.assert_array_equal(out[3:-3], whole[first:end])
            np.testing.assert_array_equal(after, wanted.get(end, after))
            before, first = after, end


@pytest.mark.usefixtures("poisoned")
def test_a_state_may_be_written_where_it_was_read(
    compiled: ctypes.CDLL, net: DeltaNetWeights
) -> None:
    for rows in (1, 2, 5):
        inputs, state = rows_of(net, rows), state_of(net)
        right, (last,) = run(compiled, net, inputs, state, (rows,))
        out = mixed(compiled, net, inputs, [StateRows(state, [(rows, state)])], threads=2)
        np.testing.assert_array_equal(out, right)
        np.testing.assert_array_equal(state, last)


@pytest.mark.usefixtures("poisoned")
def test_any_of_several_states_may_be_written_where_it_was_read(
    compiled: ctypes.CDLL, net: DeltaNetWeights
) -> None:
    """Those behind it take the inputs before their rows from it, and not from what it was."""
    ends, inputs = (1, 2, 3), rows_of(net, 3)
    right, expected = run(compiled, net, inputs, state_of(net), ends)
    for place in range(3):
        found = [np.empty(net.state_size, np.float32) for _ in ends]
        state = found[place] = state_of(net)
        span = StateRows(state, list(zip(ends, found, strict=True)))
        out = mixed(compiled, net, inputs, [span], threads=2)
        np.testing.assert_array_equal(out, right)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key_heads": 3}, "leave no 3 key heads"),
        ({"key_heads": 4}, "no multiple of 4 key heads"),
        ({"norm": np.ones(8, np.float32)}, "heads of 28 and 8 numbers"),
        ({"conv": np.ones((1, 128), np.float32)}, "1 taps"),
        ({"dt_bias": np.ones(3, np.float32)}, "dt_bias is"),
        ({"decay": np.ones(2)}, "decay is float64"),
        ({"a": weights(1, 1, 16, 32, 4, False).a}, "a is"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, object], words: str) -> None:
    net = weights(2, 2, 16, 32, 4, False)
    net.check(HIDDEN)
    with pytest.raises(ValueError, match=words):
        replace(net, **change).check(HIDDEN)  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", [(), (0, 4), (2, 2, 4), (3,), (5,)])
def test_targets_that_are_no_rows_of_the_span_are_refused(
    native_library: ctypes.CDLL, ends: tuple[int, ...]
) -> None:
    net = weights(2, 2, 16, 32, 4, False)
    with pytest.raises(ValueError, match=r"states after|rows is float32 \([35],"):
        run(native_library, net, rows_of(net, 4), None, ends)
