"""Top-k of rows of logits on the device, so that few of them come to the host.

The k highest logits lie in the k panels of 16 with the highest maxima. The product that computes
the logits also writes the maxima, so only one number in sixteen has to be searched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgellm.kernels.linear.gpu import Peaks
from edgellm.kernels.linear.packed import PANEL
from edgellm.kernels.sampling import MOST_CANDIDATES, Logits


@dataclass(frozen=True)
class LogitRows:
    """Buffers for rows of logits and for their top k.

    Attributes:
        logits: `[R, V]` float32, each row padded to whole panels.
        peaks: maxima and sums of the panels.
        packed: bits for the host, of each row: log-sum-exp, indices of the best panels, and their
            logits.
    """

    logits: torch.Tensor
    peaks: Peaks
    packed: torch.Tensor

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: str) -> LogitRows:
        panels = -(-vocabulary // PANEL)
        kept = min(MOST_CANDIDATES, panels)
        padded = torch.full((rows, panels * PANEL), float("-inf"), device=device)
        return cls(
            padded[:, :vocabulary],
            Peaks(*(torch.empty((rows, panels), device=device) for _ in range(2))),
            torch.empty((rows, 1 + kept + kept * PANEL), dtype=torch.int32, device=device),
        )

    def of(self, rows: int) -> LogitRows:
        """Return the part of the buffers for the first `rows` rows."""
        peaks = Peaks(self.peaks.largest[:rows], self.peaks.share[:rows])
        return LogitRows(self.logits[:rows], peaks, self.packed[:rows])

    def pack(self) -> None:
        """Queue the search for the best panels on the device; the host does not wait."""
        peaks, (rows, panels) = self.peaks, self.peaks.largest.shape
        kept = min(MOST_CANDIDATES, panels)
        # a panel with NaN has a share of NaN, which ranks highest, so that NaN is not overlooked
        rank = peaks.largest + 0 * peaks.share
        best = torch.topk(rank, kept, sorted=False).indices
        stride = self.logits.stride(0)
        each = self.logits.as_strided((rows, panels, PANEL), (stride, PANEL, 1))
        scores = each.gather(1, best[:, :, None].expand(-1, -1, PANEL))
        total = torch.logsumexp(peaks.largest + peaks.share.log(), 1)
        self.packed[:, 0] = total.view(torch.int32)
        self.packed[:, 1 : 1 + kept] = best
        self.packed[:, 1 + kept :] = scores.view(rows, -1).view(torch.int32)

    def best(self) -> list[Logits]:
        """Return the logits that `pack` selected, on the host."""
        return [self._row(row) for row in self.packed.cpu().numpy()]

    def _row(self, packed: NDArray[np.int32]) -> Logits:
        kept = (len(packed) - 1) // (1 + PANEL)
        panels = packed[1 : 1 + kept]
        order = np.argsort(panels)
        ids = (panels[order, None].astype(np.intp) * PANEL + np.arange(PANEL)).reshape(-1)
        floats = packed.view(np.float32)
        scores = floats[1 + kept :].reshape(kept, PANEL)[order].reshape(-1)
        there = ids < self.logits.shape[1]
        return Logits(scores[there], float(floats[0]), ids[there])
