"""Top-k of a row of logits on the device, so that few of them come to the host.

The k highest logits lie in the k panels of 16 with the highest maxima. The vector product that
computes the logits also writes the maxima, so only one number in sixteen has to be searched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from edgellm.kernels.linear.gpu import Peaks
from edgellm.kernels.linear.packed import PANEL
from edgellm.kernels.sampling import MOST_CANDIDATES, Logits


@dataclass(frozen=True)
class LogitRow:
    """Buffers for one row of logits and for its top k.

    Attributes:
        logits: `[1, V]` float32, padded with -inf to whole panels.
        peaks: maxima and sums of the panels.
        packed: bits for the host: log-sum-exp, indices of the best panels, and their logits.
    """

    logits: torch.Tensor
    peaks: Peaks
    packed: torch.Tensor

    @classmethod
    def empty(cls, vocabulary: int, device: str) -> LogitRow:
        panels = -(-vocabulary // PANEL)
        kept = min(MOST_CANDIDATES, panels)
        padded = torch.full((1, panels * PANEL), float("-inf"), device=device)
        return cls(
            padded[:, :vocabulary],
            Peaks(*(torch.empty(panels, device=device) for _ in range(2))),
            torch.empty(1 + kept + kept * PANEL, dtype=torch.int32, device=device),
        )

    def pack(self) -> None:
        """Queue the search for the best panels on the device; the host does not wait."""
        peaks, panels = self.peaks, len(self.peaks.largest)
        kept = min(MOST_CANDIDATES, panels)
        # a panel with NaN has a share of NaN, which ranks highest, so that NaN is not overlooked
        rank = peaks.largest + 0 * peaks.share
        best = torch.topk(rank, kept, sorted=False).indices
        rows = self.logits.as_strided((panels, PANEL), (PANEL, 1))[best]
        total = torch.logsumexp(peaks.largest + peaks.share.log(), 0)
        self.packed[0] = total.view(torch.int32)
        self.packed[1 : 1 + kept] = best
        self.packed[1 + kept :] = rows.view(-1).view(torch.int32)

    def best(self) -> Logits:
        """Return the logits that `pack` selected, on the host."""
        packed = self.packed.cpu().numpy()
        kept = (len(packed) - 1) // (1 + PANEL)
        panels = packed[1 : 1 + kept]
        order = np.argsort(panels)
        ids = (panels[order, None].astype(np.intp) * PANEL + np.arange(PANEL)).reshape(-1)
        floats = packed.view(np.float32)
        scores = floats[1 + kept :].reshape(kept, PANEL)[order].reshape(-1)
        there = ids < self.logits.shape[1]
        return Logits(scores[there], float(floats[0]), ids[there])
