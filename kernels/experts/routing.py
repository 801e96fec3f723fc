"""Rules by which a router chooses experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Scores of a row's experts: the softmax of their logits, or the sigmoid of each.
Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Choice of experts for a row from the router's logits (Shazeer et al., arXiv:1701.06538).

    Attributes:
        experts: number of experts.
        used: number of experts that a row goes through: those with the best scores.
        normalized: whether the scores of a row's chosen experts are divided by their sum. With
            softmax that is the softmax of the chosen logits alone.
        scale: factor of the sum of the experts' outputs.
        bias: whether the logits have a bias.
        selection_bias: whether the scores have a bias that counts in the choice alone
            (Wang et al., arXiv:2408.15664).
        scaled: whether the share of each expert is multiplied by a number of its own.
        groups, used_groups: number of groups of as many experts each, and of those that a row's
            experts are chosen from: those with the best expert or, of sigmoids, the best two
            together (DeepSeek-V2 and V3, arXiv:2405.04434, arXiv:2412.19437).
    """

    experts: int
    used: int
    normalized: bool = True
    scale: float = 1.0
    scores: Scores = "softmax"
    bias: bool = False
    selection_bias: bool = False
    scaled: bool = False
    groups: int = 1
    used_groups: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether the softmax of the logits alone makes choice and shares."""
        return self == Routing(
            experts=self.experts, used=self.used, normalized=self.normalized, scale=self.scale
        )
