"""The best logits that a device finds, against a row that is all on the host."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.triton

from edgellm.kernels.linear.packed import PANEL  # noqa: E402
from edgellm.kernels.sampling import MOST_CANDIDATES, Logits, reference  # noqa: E402
from edgellm.kernels.sampling.gpu import LogitRow  # noqa: E402

SIZES = [1, 15, 16, 40, 2048, 2049, 49_152]


def found(logits: np.ndarray, device: str) -> Logits:
    """Through the peaks of panels, as the vector product writes them."""
    row = LogitRow.empty(len(logits), device)
    row.logits[0] = torch.tensor(logits)
    padded = np.full(-(-len(logits) // PANEL) * PANEL, -np.inf, np.float32)
    padded[: len(logits)] = logits
    panels = padded.reshape(-1, PANEL)
    largest = np.nanmax(panels, axis=1)  # as Triton's own
    row.peaks.largest.copy_(torch.tensor(largest))
    row.peaks.share.copy_(torch.tensor(np.exp(panels - largest[:, None]).sum(axis=1)))
    row.packed.fill_(-1)
    row.pack()
    return row.best()


@pytest.mark.parametrize("size", SIZES)
def test_the_best_are_there(triton_device: str, size: int) -> None:
    logits = (np.random.default_rng(size).standard_normal(size) * 5).astype(np.float32)
    best = found(logits, triton_device)
    assert best.ids is not None
    assert (np.diff(best.ids) > 0).all()
    np.testing.assert_array_equal(best.scores, logits[best.ids])
    count = min(size, MOST_CANDIDATES)
    assert set(reference.top_k(logits, count)) <= set(best.ids.tolist())
    assert len(best.ids) <= PANEL * MOST_CANDIDATES
    assert best.log_sum_exp == pytest.approx(reference.log_sum_exp(logits), abs=1e-5)
    whole = Logits(logits, reference.log_sum_exp(logits))
    ours, theirs = best.best(min(count, 20)), whole.best(min(count, 20))
    assert list(ours) == list(theirs)
    assert list(ours.values()) == pytest.approx(list(theirs.values()), abs=1e-5)


@pytest.mark.smoke
def test_one_panel_has_them_all(triton_device: str) -> None:
    logits = np.zeros(49_152, np.float32)
    logits[32_000:32_128] = np.arange(128, 0, -1)
    best = found(logits, triton_device)
    assert list(best.best(128)) == list(range(32_000, 32_128))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_overlooked(triton_device: str, value: float) -> None:
    logits = np.random.default_rng(0).standard_normal(49_152).astype(np.float32)
    logits[20_001] = value
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(found(logits, triton_device).scores.max())
