from __future__ import annotations

import gc
from typing import Any

import pytest
from inspection import used_blocks

from edgellm import OptionError
from edgellm.llm import LLM
from edgellm.measure.benchmark import bench


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": [-5]}, "`prompts`: -5 tokens; allowed is 0 or more"),
        ({"prompts": [8, -1]}, "`prompts`: -1 tokens"),
        ({"generations": [-2]}, "`generations`: -2 tokens"),
        ({"depths": [-1]}, "`depths`: -1 tokens"),
        ({"repetitions": 0}, "`repetitions` is 0; allowed is 1 or more"),
        ({"repetitions": -3}, "`repetitions` is -3"),
        ({"prompts": [], "generations": []}, "nothing to measure"),
        ({"prompts": [0], "generations": [0]}, "nothing to measure"),
        ({"prompts": [10**9]}, "pp1000000000 needs 1000000000 tokens.*takes no more"),
        ({"prompts": [9000], "depths": [9]}, "pp9000 @ d9 needs 9009 tokens"),
    ],
)
def test_sizes_that_are_not_allowed(llm: LLM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        bench(llm.engine, **options)


def test_an_interrupt_leaves_no_block_behind(llm: LLM) -> None:
    gc.collect()
    before = used_blocks(llm)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.decoder, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench(llm.engine, prompts=[0], generations=[5], depths=[3], repetitions=1)
    assert used_blocks(llm) == before
    assert len(bench(llm.engine, prompts=[3], generations=[2], repetitions=1)) == 2
