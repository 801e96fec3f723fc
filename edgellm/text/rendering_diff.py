"""Where renderings of a template differ, in whole tags. Pure Python."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What stands whole or not at all: tags, and Mistral's names in brackets.
_SEGMENT = re.compile(r"<[^<>\s][^<>]*>?|\[/?[A-Z_]+\]|.", re.DOTALL)


def segments(text: str) -> list[str]:
    """Tags and single characters."""
    return _SEGMENT.findall(text)


def common_head(a: str, b: str) -> str:
    """What two texts begin with, up to where a tag begins that only one of them has."""
    return "".join(_common(segments(a), segments(b)))


def common_end(a: str, b: str) -> str:
    """What two texts end with, from where a tag begins."""
    return "".join(_common(segments(a)[::-1], segments(b)[::-1])[::-1])


def _common(a: Sequence[str], b: Sequence[str]) -> Sequence[str]:
    pairs = zip(a, b, strict=False)
    return a[: next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))]
