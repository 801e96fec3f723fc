"""Default sampling options for models whose own files name none."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.store.sources import ALIASES, DEFAULT_MODEL

# Temperature and top_p are those of SmolLM2's model card. Of 30 seeds, "Name the capital of
# France." is answered with Paris by 30, "What is the capital of France?" by 27 (18 with temperature
# 0.8): there "The" and "L" are nearly as likely in float32 too. With the penalty none of ten
# long answers ended in a loop (4 without, at 0.8, and 7 at 0.4).
_TRIED: Mapping[str, Mapping[str, float]] = {
    ALIASES[DEFAULT_MODEL]: {"temperature": 0.2, "top_p": 0.9, "repeat_penalty": 1.1},
}


def tried_defaults(source: str) -> Mapping[str, float]:
    """Return sampling defaults that trials have shown to suit a model source; empty if none."""
    return _TRIED.get(source, {})
