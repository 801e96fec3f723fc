"""Checkpoints in float32, segment by segment, against the same model in float64."""

from __future__ import annotations

import numpy as np
import pytest
from random_checkpoint import CONFIGS, RandomCheckpoint, exact

from edgellm.export.equalized import EqualizedCheckpoint, choose_basis
from edgellm.export.float_segments import float_hidden

TEXTS = [np.random.default_rng(n).integers(0, 320, n).tolist() for n in (40, 1, 17)]


def allowed(name: str) -> float:
    """Of the largest number: decays and gates of states make more of float32's rounding."""
    return 2e-5 if CONFIGS[name].has_states else 3e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_every_part_matches_float64(name: str) -> None:
    checkpoint = RandomCheckpoint(CONFIGS[name])
    for tokens, computed in zip(TEXTS, float_hidden(checkpoint, TEXTS, threads=1), strict=True):
        hidden, _ = exact(checkpoint, tokens)
        np.testing.assert_allclose(
            computed, hidden, atol=allowed(name) * np.abs(hidden).max(), rtol=0
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_another_key_basis_is_the_same_model(name: str) -> None:
    checkpoint = RandomCheckpoint(CONFIGS[name])
    basis = choose_basis(checkpoint)
    assert any(exponents.any() for exponents in basis.exponents)
    (computed,) = float_hidden(EqualizedCheckpoint(checkpoint, basis), TEXTS[:1], threads=1)
    hidden, _ = exact(checkpoint, TEXTS[0])
    np.testing.assert_allclose(computed, hidden, atol=allowed(name) * np.abs(hidden).max(), rtol=0)
