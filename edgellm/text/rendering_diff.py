"""Comparison of a template's renderings in whole tags. Pure Python."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Units of comparison: tags, Mistral's names in brackets, and single characters.
_SEGMENT = re.compile(r"<[^<>\s][^<>]*>?|\[/?[A-Z_]+\]|.", re.DOTALL)


def segments(text: str) -> list[str]:
    """Split a text into tags and single characters."""
    return _SEGMENT.findall(text)


def common_head(a: str, b: str) -> str:
    """Return the common beginning of two texts, in whole tags."""
    return "".join(_common(segments(a), segments(b)))


def common_end(a: str, b: str) -> str:
    """Return the common end of two texts, in whole tags."""
    return "".join(_common(segments(a)[::-1], segments(b)[::-1])[::-1])


def _common(a: Sequence[str], b: Sequence[str]) -> Sequence[str]:
    pairs = zip(a, b, strict=False)
    return a[: next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))]
