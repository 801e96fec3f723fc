"""The best logits that a device finds, against a row that is all on the host."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.triton

from edgellm.kernels.linear.packed import PANEL  # noqa: E402
from edgellm.kernels.sampling import MOST_CANDIDATES, Logits, reference  # noqa: E402
from edgellm.kernels.sampling.gpu import LogitRows  # noqa: E402

SIZES = [1, 15, 16, 40, 2048, 2049, 49_152]


def found(logits: np.ndarray, device: str) -> list[Logits]:
    """Through the peaks of panels, as the product writes them, in the first rows of buffers."""
    count, size = logits.shape
    rows = LogitRows.empty(count + 1, size, device).of(count)
    rows.logits[:] = torch.tensor(logits)
    padded = np.full((count, -(-size // PANEL) * PANEL), -np.inf, np.float32)
    padded[:, :size] = logits
    panels = padded.reshape(count, -1, PANEL)
    largest = np.nanmax(panels, axis=2)  # as Triton's own
    rows.peaks.largest.copy_(torch.tensor(largest))
    rows.peaks.share.copy_(torch.tensor(np.exp(panels - largest[..., None]).sum(axis=2)))
    rows.packed.fill_(-1)
    rows.pack()
    return rows.best()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("size", SIZES)
def test_the_best_are_there(triton_device: str, size: int, rows: int) -> None:
    every = (np.random.default_rng(size).standard_normal((rows, size)) * 5).astype(np.float32)
    for best, logits in zip(found(every, triton_device), every, strict=True):
        check(best, logits)


def check(best: Logits, logits: np.ndarray) -> None:
    size = len(logits)
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
    (best,) = found(logits[None], triton_device)
    assert list(best.best(128)) == list(range(32_000, 32_128))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_overlooked(triton_device: str, value: float) -> None:
    logits = np.random.default_rng(0).standard_normal(49_152).astype(np.float32)
    logits[20_001] = value
    with np.errstate(invalid="ignore"):
        (best,) = found(logits[None], triton_device)
    assert not np.isfinite(best.scores.max())
