"""Layers that keep a state in the Triton step: what they compute, and where states are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

from gpu_steps import step_on  # noqa: E402
from model_shapes import HYBRIDS  # noqa: E402
from random_model import Model, span_of  # noqa: E402

MIXERS = [name for name in HYBRIDS if not name.startswith("mamba2")]


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.usefixtures("poisoned_tensors")
def test_mixers_match_reference(triton_device: str, name: str) -> None:
    """One token, some, and more than half of a block, whose states go on in the next one."""
    model = Model(HYBRIDS[name])
    views = model.views("f32")
    step, _ = step_on(model, views, triton_device)
    found = []
    for start, end in ((0, 1), (1, 9), (9, 10), (10, 60)):
        found.append(step.run([span_of(views, model.tokens[start:end], start, logit_rows=end - start)]))
    for ours, theirs in zip(zip(*found, strict=True), model.reference(60, "f32"), strict=True):
        print(name, np.abs(np.concatenate(ours) - theirs).mean() / np.abs(theirs).mean())
