from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from edgellm.kernels.mamba2 import Mamba2Vectors, reference
from edgellm.kernels.mamba2.native import mamba2
from edgellm.kernels.state_blocks import StateRows

# Heads, channels of each, numbers of a channel's state, groups, taps; with 5 there is no norm.
SIZES = [(3, 16, 16, 1, 4), (12, 32, 48, 2, 4), (20, 16, 128, 4, 2), (2, 64, 32, 2, 5)]


def vectors_of(sizes: tuple[int, ...], seed: int = 0) -> Mamba2Vectors:
    heads, head_dim, state_dim, groups, taps = sizes
    rng = np.random.default_rng(seed)
    inner = heads * head_dim
    channels = inner + 2 * groups * state_dim
    return Mamba2Vectors(
        conv=rng.standard_normal((taps, channels), np.float32) / 2,
        conv_bias=rng.standard_normal(channels, np.float32) / 2,
        dt_bias=rng.standard_normal(heads, np.float32),
        decay=-np.exp(rng.standard_normal(heads, np.float32)),
        skip=rng.standard_normal(heads, np.float32),
        norm=None if taps == 5 else 1 + rng.standard_normal(inner, np.float32) / 4,
        head_dim=head_dim,
        groups=groups,
        epsilon=1e-3,
    )


def rows_of(vectors: Mamba2Vectors, count: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, vectors.inputs), np.float32)
    rows[:, -vectors.heads :] *= 3
    return rows


def state_of(vectors: Mamba2Vectors) -> np.ndarray:
    return np.full(vectors.state_size, np.nan, np.float32)


def alone(
    library: ctypes.CDLL, rows: np.ndarray, vectors: Mamba2Vectors, threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """What all rows in one call give, and the state after them."""
    state = state_of(vectors)
    span = StateRows(None, [(len(rows), state)])
    return mamba2(library, rows, vectors, [span], threads=threads), state


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_what_it_computes(compiled: ctypes.CDLL, sizes: tuple[int, ...]) -> None:
    vectors = vectors_of(sizes)
    for changed in (vectors, replace(vectors, conv_bias=None)):
        rows = rows_of(changed, 40)
        expected, state = reference.mix(rows, changed, reference.State.zero(changed))
        out, found = alone(compiled, rows, changed)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(found, state.flat(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.usefixtures("poisoned", "eight_cores")
def test_cuts_company_and_threads_change_no_bit(
    compiled: ctypes.CDLL, sizes: tuple[int, ...]
) -> None:
    vectors = vectors_of(sizes)
    texts = [rows_of(vectors, count, seed) for seed, count in enumerate((41, 1, 17, 2))]
    expected = [alone(compiled, rows, vectors) for rows in texts]
    states: list[np.ndarray | None] = [None] * len(texts)
    found: list[list[np.ndarray]] = [[] for _ in texts]
    done = [0] * len(texts)
    for size in (1, 2, 3, 1, 11, 40):  # of the pieces of each text
        now = [i for i, rows in enumerate(texts) if done[i] < len(rows)]
        parts = [texts[i][done[i] : done[i] + size] for i in now]
        targets = [state_of(vectors) for _ in now]
        spans = [
            StateRows(states[i], [(len(part), target)])
            for i, part, target in zip(now, parts, targets, strict=True)
        ]
        out = mamba2(compiled, np.concatenate(parts), vectors, spans, threads=3)
        for i, part, target in zip(now, parts, targets, strict=True):
            found[i].append(out[: len(part)])
            out, states[i], done[i] = out[len(part) :], target, done[i] + len(part)
    for (out, state), pieces, last in zip(expected, found, states, strict=True):
        np.testing.assert_array_equal(np.concatenate(pieces), out)
        np.testing.assert_array_equal(last, state)


@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
@pytest.mark.usefixtures("poisoned")
def test_states_after_some_rows(compiled: ctypes.CDLL, sizes: tuple[int, ...]) -> None:
    """Also after so few that convolutions still see the rows before, and in place of the source."""
    vectors = vectors_of(sizes)
    rows = rows_of(vectors, 30)
    ends = [5, 6, 8, 20, 30]
    expected = [alone(compiled, rows[:end], vectors) for end in ends]
    targets = [(end - 5, state_of(vectors)) for end in ends[1:]]
    source = expected[0][1].copy()
    first = (targets[0][0], source)
    out = mamba2(compiled, rows[5:], vectors, [StateRows(source, [first, *targets[1:]])])
    np.testing.assert_array_equal(out, expected[-1][0][5:])
    for (_, state), (_, found) in zip(expected[1:], [first, *targets[1:]], strict=True):
        np.testing.assert_array_equal(found, state)


def test_softplus_of_small_and_large_steps(compiled: ctypes.CDLL) -> None:
    vectors = replace(vectors_of(SIZES[0]), skip=np.zeros(3, np.float32))
    dt = np.array([-60, -20, -3, -0.1, 0, 0.1, 3, 20, 90], np.float32)
    for step in dt:
        rows = rows_of(vectors, 1)
        rows[:, -3:] = step - vectors.dt_bias
        expected, state = reference.mix(rows, vectors, reference.State.zero(vectors))
        out, found = alone(compiled, rows, vectors)
        np.testing.assert_allclose(found, state.flat(), rtol=1e-5)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6)


def test_broken_rows_show(compiled: ctypes.CDLL) -> None:
    vectors = vectors_of(SIZES[1])
    rows = rows_of(vectors, 8)
    rows[3, -1] = np.nan
    out, state = alone(compiled, rows, vectors)
    assert np.isfinite(out[:3]).all()
    assert np.isnan(out[3:]).any(axis=1).all()
    assert np.isnan(state).any()


def test_what_does_not_fit_is_refused() -> None:
    vectors, none = vectors_of(SIZES[1]), np.empty(0, np.float32)
    for wrong, words in (
        (replace(vectors, skip=none), "skip is float32"),
        (replace(vectors, dt_bias=vectors.dt_bias.astype(np.float64)), "dt_bias is float32"),
        (replace(vectors, groups=5), "in 5 groups"),
        (vectors_of((2, 8, 16, 1, 4)), "multiples of 16"),
        (vectors_of((2, 16, 24, 1, 4)), "multiples of 16"),
        (vectors_of((2, 16, 16, 1, 1)), "1 taps"),
        (replace(vectors, conv=np.zeros((4, 400), np.float32), conv_bias=None), "multiples|taps"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong.check()
    rows, library = rows_of(vectors, 2), ctypes.CDLL(None)
    for span, words in (
        (StateRows(None, [(2, np.zeros(5, np.float32))]), "needed is float32"),
        (StateRows(None, [(3, state_of(vectors))]), "rows is float32"),
        (StateRows(None, [(2, np.zeros((vectors.state_size, 2), np.float32)[:, 0])]), "with gaps"),
    ):
        with pytest.raises(ValueError, match=words):
            mamba2(library, rows, vectors, [span])


@pytest.mark.parametrize("groups", [1, 2])
def test_the_reference_is_what_transformers_computes(groups: int) -> None:
    torch = pytest.importorskip("torch")
    from transformers import GraniteMoeHybridConfig
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as model

    config = GraniteMoeHybridConfig(
        hidden_size=64,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=groups,
        mamba_chunk_size=8,
        num_hidden_layers=1,
        layer_types=["mamba"],
        rms_norm_eps=1e-3,
    )
    layer = model.GraniteMoeHybridMambaLayer(config, 0).double().eval()
    vectors = vectors_of((4, 32, 16, groups, 4))
    rows = rows_of(vectors, 21)
    found: SimpleNamespace = SimpleNamespace()
    with torch.no_grad():
        layer.conv1d.weight.copy_(torch.tensor(vectors.conv.T[:, None]))
        for ours, theirs in (
            ("conv_bias", layer.conv1d.bias),
            ("dt_bias", layer.dt_bias),
            ("skip", layer.D),
            ("norm", layer.norm.weight),
        ):
            theirs.copy_(torch.tensor(getattr(vectors, ours)))
        layer.A_log.copy_(torch.log(torch.tensor(-vectors.decay)))
        layer.in_proj = torch.nn.Identity()
        layer.out_proj = torch.nn.Identity()
        found.out = layer(torch.tensor(rows[None], dtype=torch.float64))[0].numpy()
    expected, _ = reference.mix(rows, vectors, reference.State.zero(vectors))
    np.testing.assert_allclose(expected, found.out, rtol=1e-4, atol=1e-5)
