"""What tests of prompts that rest between two layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from inspection import set_costs
from loops import GREEDY, SHORT, prompt

from edgellm import Completion
from edgellm.backends.batch import Rows, Span
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

LAYERS = 6
LENGTHS = (5, 900, 300, 40, 1, 700, 513, 130, 260, 999)
PROMPTS = [prompt(i, length) for i, length in enumerate(LENGTHS)]
STREAM: dict[str, Any] = {**GREEDY, "max_tokens": 400}


def start_layered(folder: str, **options: Any) -> LLM:
    """A step has room for 100 rows of prompts, whatever the machine."""
    llm = load(folder, **{"scheduling": "layered", "cache_size": 64 * BLOCK, **options})
    set_costs(llm, 1e-3)
    return llm


class Groups:
    """Watches the groups of layers that a model computes.

    Attributes:
        layers: of each call.
        rows: of each call, what was computed.
        passed: rows that have passed the last layer.
        before: called with the number of a call, from 1 on, before it is made.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[range] = []
        self.rows: list[Rows] = []
        self.passed = 0
        self.before: Callable[[int], object] = bool
        run = llm.engine.prefill.run

        def watched(spans: Sequence[Span], **options: Any) -> list[Rows]:
            group = spans[0].group
            if group is not None:
                self.layers.append(group.layers)
                self.before(len(self.layers))
            results = run(spans, **options)
            if group is not None:
                self.rows += results
            if group is not None and group.layers.stop == LAYERS:
                self.passed += len(spans[0].tokens)
            return results

        monkeypatch.setattr(llm.engine.prefill, "run", watched)


def in_company(llm: LLM, tokens: list[int], **options: Any) -> Completion:
    """An answer while another one decodes, so that its rows rest."""
    stream = llm.stream(PROMPTS[3], **STREAM)
    next(stream)
    try:
        return llm.generate(tokens, **{**SHORT, **options})
    finally:
        stream.close()
