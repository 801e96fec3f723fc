"""Operators and methods of values for chat templates, as far as released templates use them.

Each is paid for before it works; see `template_budget.py`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Undefined
from jinja2.runtime import LoopContext
from markupsafe import Markup

from edgellm.text.template_budget import (
    ITEM,
    LISTS,
    LimitError,
    each,
    spend,
    spend_tree,
    text_of,
)

# Maximum of characters that escaping makes of one character.
ESCAPED = 5
# Maximum of characters that a change of case makes of one character.
_CASED = 3
_NUMBER = re.compile(r"\d+")
# A width taken from the arguments of a format: `%*d`, `{:{width}}`.
_NESTED = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
# Maximum of characters of a formatted value that is no text, without its width.
_SHORT = 400
_MAX_BITS = 1024

_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
}


def compare(left: Any, *rest: Any) -> Any:
    """Compute `left OPERATOR right ...`; `rest` holds operator names and right sides in turn."""
    result: Any = True
    for name, right in zip(rest[::2], rest[1::2], strict=True):
        if name in ("in", "notin"):
            result = _contains(right, left) == (name == "in")
        else:
            _pay_comparison(left, name, right)
            result = _COMPARISONS[name](left, right)
        if not result:
            return result
        left = right
    return result


def _pay_comparison(left: Any, name: str, right: Any) -> None:
    texts = isinstance(left, str) and isinstance(right, str)
    if not texts and not all(isinstance(value, (Mapping, *LISTS)) for value in (left, right)):
        return
    if name in ("eq", "ne") and len(left) != len(right):
        return
    if texts:
        spend(min(len(left), len(right)))
    else:
        spend_tree(left)
        spend_tree(right)


def _contains(values: Any, value: Any) -> bool:
    if isinstance(values, str):
        spend(len(values))
        return value in values
    if isinstance(values, Mapping):
        return key(value) in values
    if not isinstance(values, list | tuple):
        values = list(each(values))
    spend(len(values) * spend_tree(value))
    return value in values


def key(value: Any) -> Any:
    """Return a key for a mapping after a check that it is a scalar.

    Other values may take for ever to hash.

    Raises:
        TypeError: the value is no scalar.
    """
    if not isinstance(value, str | int | float | None | Undefined):
        raise TypeError(f"a {type(value).__name__} is no key")
    return value


def literal(value: Sequence[Any] | Mapping[Any, Any]) -> Any:
    """Pay for a list, tuple or mapping written in the template, and return it."""
    spend(ITEM * (1 + len(value) * (1 + isinstance(value, Mapping))))
    return value


def concat(values: Sequence[Any]) -> str:
    """Compute `a ~ b ~ ...`, the values' texts joined."""
    return "".join(map(text_of, values))


def cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """Compute `value[start:stop:step]`."""
    if isinstance(value, str | list | tuple):
        count = len(range(*slice(start, stop, step).indices(len(value))))
        spend(count if isinstance(value, str) else ITEM * count)
    return value[start:stop:step]


def pay_arithmetic(sign: str, left: Any, right: Any) -> None:
    """Pay for `left SIGN right`, which is not computed here.

    Raises:
        LimitError: a number is too large.
    """
    if _is_number(left) and _is_number(right):
        bits = [value.bit_length() for value in (left, right) if isinstance(value, int)]
        if max(bits, default=0) > _MAX_BITS or (
            sign == "**" and len(bits) == 2 and bits[0] * max(0, right) > _MAX_BITS
        ):
            raise LimitError(f"it computed with a number of more than {_MAX_BITS} bits")
    elif sign == "%" and isinstance(left, str):
        pay_format(left, right)
    elif sign == "*":
        sequence, count = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            spend(weight(sequence) * max(0, count))
    elif sign == "+":
        spend((weight(left) + weight(right)) * escaping(left, right))
    elif not isinstance(left, Undefined) and not isinstance(right, Undefined):
        kinds = f"{type(left).__name__} and {type(right).__name__}"
        raise TypeError(f"unsupported operand types for {sign}: {kinds}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def weight(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return ITEM * len(value) if isinstance(value, list | tuple) else 0


def escaping(*values: Any) -> int:
    """Bound the characters made of one: `Markup` in operators and methods escapes other text."""
    return ESCAPED if any(isinstance(value, Markup) for value in values) else 1


def pay_format(text: str, values: Any) -> None:
    """Pay for `text % values` or `text.format(values)`: all widths, and all values in each field.

    Every number in the text counts as a width.
    """
    if _NESTED.search(text):
        raise LimitError("it took a width from the arguments of a format")
    widths = sum(int(number[:18]) for number in _NUMBER.findall(text))
    fields = text.count("%") + text.count("{")
    values = spend_tree(values, printed=True)
    spend((len(text) + widths + fields * (values + _SHORT)) * escaping(text))


# ---- methods of strings


def _pay_split(text: str, arguments: Sequence[Any]) -> None:
    separator = next((a for a in arguments if isinstance(a, str)), None)
    parts = text.count(separator) if separator else len(text) // 2
    spend(len(text) + ITEM * (1 + parts))


def _pay_rsplit(text: str, arguments: Sequence[Any]) -> None:
    pay_strip(text, arguments)
    _pay_split(text, arguments)


def pay_strip(text: str, arguments: Sequence[Any]) -> None:
    """Pay for `strip`, `lstrip` and `rstrip`: each character compared with the whole argument."""
    spend(len(text) * max([1, *(len(a) for a in arguments if isinstance(a, str))]))


def pay_replace(text: str, arguments: Sequence[Any]) -> None:
    old, new = ([a for a in arguments if isinstance(a, str)] + ["", ""])[:2]
    grown = text.count(old) * len(new)
    spend((len(text) + grown) * escaping(text))


def pay_case(text: str, arguments: Sequence[Any]) -> None:
    spend(len(text) * _CASED)


def _pay_arguments(text: str, arguments: Sequence[Any]) -> None:
    spend_tree(arguments)


def _pay_whole(text: str, arguments: Sequence[Any]) -> None:
    spend(len(text))


_STRING_METHODS: Mapping[str, Callable[[str, Sequence[Any]], None]] = {
    "capitalize": pay_case,
    "endswith": _pay_arguments,
    "find": _pay_whole,
    "format": pay_format,
    "lower": pay_case,
    "lstrip": pay_strip,
    "removeprefix": _pay_whole,
    "removesuffix": _pay_whole,
    "replace": pay_replace,
    "rsplit": _pay_rsplit,
    "rstrip": pay_strip,
    "split": _pay_split,
    "startswith": _pay_arguments,
    "strip": pay_strip,
    "title": pay_case,
    "upper": pay_case,
}
# Attributes that templates may read, by type of the value, besides items of a mapping or namespace.
ATTRIBUTES: Sequence[tuple[type, frozenset[str]]] = (
    (str, frozenset([*_STRING_METHODS, "join"])),
    (Mapping, frozenset(["get", "items", "keys", "values"])),
    (
        LoopContext,
        frozenset(
            [
                *("depth", "depth0", "first", "index", "index0", "last", "length"),
                *("nextitem", "previtem", "revindex", "revindex0"),
            ]
        ),
    ),
)


def called_method(
    owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Pay for a method call, and return its arguments, with those of `join` as lists.

    Raises:
        TypeError: the method is not for chat templates.
    """
    if isinstance(owner, Mapping):
        if args:
            key(args[0])
    elif name == "join":
        texts = [list(each(arg)) for arg in args]
        joined = [text for arg in texts for text in arg if isinstance(text, str)]
        length = sum(map(len, joined)) + len(owner) * len(joined)
        spend(length * escaping(owner))
        return tuple(texts)
    elif name in _STRING_METHODS:
        _STRING_METHODS[name](owner, [*args, *kwargs.values()])
    else:
        raise TypeError(f"the method {name} is not for chat templates")
    return args
