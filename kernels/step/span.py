"""What a step computes: rows of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.kernels.kv_blocks import BlockTable


@dataclass(frozen=True, kw_only=True)
class StepSpan:
    """Consecutive tokens of one sequence.

    Attributes:
        tables: the sequence's block ids in each pool, those of the new positions among them.
        start: the position of the first token.
        logit_rows: the last so many tokens go through the LM head.
    """

    tables: Sequence[BlockTable]
    tokens: Sequence[int]
    start: int
    logit_rows: int


def check_spans(spans: Sequence[StepSpan], *, pools: int) -> None:
    """Refuse a call without tokens, or for logits of more than there are.

    Raises:
        ValueError: it is one, or a span has tables in more or fewer pools.
    """
    if not spans:
        raise ValueError("0 spans; needed are 1 or more")
    for span in spans:
        count = len(span.tokens)
        if count < 1 or not 0 <= span.logit_rows <= count:
            raise ValueError(f"{count} tokens and {span.logit_rows} rows of logits")
        if len(span.tables) != pools:
            raise ValueError(f"{len(span.tables)} tables; needed is one in each of {pools} pools")
