"""Upper bounds on what Jinja's filters and methods of strings would make, before they make it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_NUMBER = re.compile(r"\d+")
# A width that comes from the arguments: `%*d`, `{:{width}}`.
_NESTED = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
# What a value that is no text takes at most, as far as anyone prints it into a prompt.
_SHORT = 64


def formatted_size(text: str, values: Iterable[Any], *, largest_argument: int) -> int:
    """Size of `text % values` and `text.format(*values)`: all widths, the longest value each time.

    Every number in the text counts as a width, wherever it stands.
    """
    widths = sum(_saturated(number) for number in _NUMBER.findall(text))
    nested = len(_NESTED.findall(text)) * largest_argument
    longest = max((len(v) for v in _leaves(values) if isinstance(v, str)), default=0)
    fields = text.count("%") + text.count("{")
    return len(text) + widths + nested + fields * max(longest, _SHORT)


def joined_size(separator: str, texts: Sequence[str]) -> int:
    """Size of `separator.join(texts)`."""
    return sum(map(len, texts)) + len(separator) * max(0, len(texts) - 1)


def replaced_size(text: str, old: str, new: str) -> int:
    """Size of `text.replace(old, new)`."""
    return len(text) + text.count(old) * max(0, len(new) - len(old))


def method_size(text: str, name: str, arguments: Sequence[Any], *, largest_argument: int) -> int:
    """Size of what a method of a string makes, where that can be far more than it is given."""
    known: Mapping[str, Callable[[], int]] = {
        "format": lambda: formatted_size(text, arguments, largest_argument=largest_argument),
        "format_map": lambda: formatted_size(text, arguments, largest_argument=largest_argument),
        "replace": lambda: replaced_size(text, *map(str, arguments[:2])),
        "join": lambda: joined_size(text, [v for v in _leaves(arguments) if isinstance(v, str)]),
        "expandtabs": lambda: len(text) + text.count("\t") * _first_integer(arguments, 8),
    }
    return known[name]() if name in known else 0


def _leaves(values: Iterable[Any]) -> Iterable[Any]:
    """The values, and those in lists and mappings among them."""
    for value in values:
        if isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _first_integer(arguments: Sequence[Any], default: int) -> int:
    return next((abs(value) for value in arguments if isinstance(value, int)), default)


def _saturated(digits: str) -> int:
    """The number, without the time that a number of thousands of digits takes."""
    return int(digits[:18])
