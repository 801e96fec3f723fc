"""The default calibration text, from Python's own manual and library."""

from __future__ import annotations

import inspect
import pydoc_data.topics
import textwrap

# Chapters of the manual; none of those whose perplexities are published is among them.
_TOPICS = (
    "assignment",
    "class",
    "comparisons",
    "context-managers",
    "dynamic-features",
    "function",
    "import",
    "operator-summary",
    "slicings",
    "specialnames",
    "strings",
    "truth",
    "try",
    "with",
    "yield",
)


def default_text() -> str:
    """Return the calibration text: prose and code in turn, about 250,000 characters."""
    prose = [pydoc_data.topics.topics[name] for name in _TOPICS]
    code = inspect.getsource(inspect) + inspect.getsource(textwrap)
    size = -(-len(code) // len(prose))
    pieces = [code[i : i + size] for i in range(0, len(code), size)]
    return "\n\n".join(part for pair in zip(prose, pieces, strict=True) for part in pair)
