"""Models of all families through float32 segments, beside what transformers computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_families import FAMILIES, logits, make

from edgellm.export.float_segments import float_hidden
from edgellm.graphs.checkpoint import open_checkpoint

# The first is longer than any window.
TEXTS = [np.random.default_rng(n).integers(3, 128, n).tolist() for n in (40, 1, 9)]


@pytest.mark.parametrize("name", FAMILIES)
def test_segments_compute_what_transformers_computes(tmp_path: Path, name: str) -> None:
    model = make(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    head = checkpoint.tensor("embedding" if config.tied_embedding else "head").float32()
    for tokens, hidden in zip(TEXTS, float_hidden(checkpoint, TEXTS, threads=1), strict=True):
        computed = hidden @ head.T
        if config.logit_softcap is not None:
            computed = config.logit_softcap * np.tanh(computed / config.logit_softcap)
        expected = logits(model, tokens)
        np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
