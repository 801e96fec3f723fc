"""Attention over latents in Triton, in the step."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

from gpu_steps import step_on  # noqa: E402
from model_shapes import LATENTS  # noqa: E402
from random_model import Model, span_of  # noqa: E402


@pytest.mark.parametrize("name", LATENTS)
@pytest.mark.parametrize("format", ["f32", "int8", "int4", "f16"])
@pytest.mark.usefixtures("poisoned_tensors")
def test_latents_match_reference(triton_device: str, name: str, format: str) -> None:
    """One token, some, and more than take codes; then one again."""
    model = Model(LATENTS[name])
    views = model.views(format)
    step, _ = step_on(model, views, triton_device)
    found = []
    for start, end in ((0, 1), (1, 10), (10, 43), (43, 44)):
        rows = end - start
        found.append(step.run([span_of(views, model.tokens[start:end], start, logit_rows=rows)]))
    for ours, theirs in zip(zip(*found, strict=True), model.reference(44, format), strict=True):
        error = np.abs(np.concatenate(ours) - theirs).mean() / np.abs(theirs).mean()
        print(name, format, error)
        assert error < 0.04
