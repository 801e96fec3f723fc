"""Filters, tests, functions and methods of chat templates: those that released ones use.

All of them pay for their work before they do it; see `template_budget.py`.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import Undefined, filters, pass_context, pass_environment, tests
from jinja2.filters import make_attrgetter
from jinja2.runtime import LoopContext, Namespace
from markupsafe import Markup, escape

from edgellm.text.template_budget import ITEM, LimitError, each, spend, spend_tree, text_of

# Characters that escaping makes of one.
_ESCAPED = 5
# Characters that changing the case makes of one.
_CASED = 3
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_NUMBER = re.compile(r"\d+")
# A width that comes from the arguments: `%*d`, `{:{width}}`.
_NESTED = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
# Characters of a value in a format, where they are no text of its own.
_SHORT = 400
_LONGEST_INDENT = 64
_MAX_BITS = 1024
# `strftime` of C's library makes no more of one.
_DATE_CHARACTERS = 256

_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
}

# ---- operators


def compare(left: Any, *rest: Any) -> Any:
    """`left OPERATOR right ...`, with names and right sides in turn."""
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
    if not texts and not all(isinstance(v, list | tuple | Mapping) for v in (left, right)):
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
    """A key of a mapping, which is a scalar; others may take for ever to hash."""
    if not isinstance(value, str | int | float | None | Undefined):
        raise TypeError(f"a {type(value).__name__} is no key")
    return value


def literal(value: Sequence[Any] | Mapping[Any, Any]) -> Any:
    """A list, tuple or mapping that the template writes."""
    spend(ITEM * (1 + len(value) * (1 + isinstance(value, Mapping))))
    return value


def concat(values: Sequence[Any]) -> str:
    """`a ~ b ~ ...`."""
    return "".join(map(text_of, values))


def cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """`value[start:stop:step]`."""
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
        _pay_format(left, right)
    elif sign == "*":
        sequence, count = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            spend(_weight(sequence) * max(0, count))
    elif sign == "+":
        spend((_weight(left) + _weight(right)) * _escaping(left, right))
    elif not isinstance(left, Undefined) and not isinstance(right, Undefined):
        kinds = f"{type(left).__name__} and {type(right).__name__}"
        raise TypeError(f"unsupported operand types for {sign}: {kinds}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _weight(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return ITEM * len(value) if isinstance(value, list | tuple) else 0


def _escaping(*values: Any) -> int:
    """Characters that may become of one: of `Markup`, operators and methods escape the others."""
    return _ESCAPED if any(isinstance(value, Markup) for value in values) else 1


def _pay_format(text: str, values: Any) -> None:
    """Pay for `text % values` or `text.format(values)`: all widths, and all values each time.

    Every number in the text counts as a width, wherever it stands.
    """
    if _NESTED.search(text):
        raise LimitError("it took a width from the arguments of a format")
    widths = sum(int(number[:18]) for number in _NUMBER.findall(text))
    fields = text.count("%") + text.count("{")
    values = spend_tree(values, printed=True)
    spend((len(text) + widths + fields * (values + _SHORT)) * _escaping(text))


# ---- methods of strings


def _pay_split(text: str, arguments: Sequence[Any]) -> None:
    separator = next((a for a in arguments if isinstance(a, str)), None)
    parts = text.count(separator) if separator else len(text) // 2
    spend(len(text) + ITEM * (1 + parts))


def _pay_rsplit(text: str, arguments: Sequence[Any]) -> None:
    _pay_strip(text, arguments)
    _pay_split(text, arguments)


def _pay_strip(text: str, arguments: Sequence[Any]) -> None:
    """Each character, or each beginning, is compared with the whole argument."""
    spend(len(text) * max([1, *(len(a) for a in arguments if isinstance(a, str))]))


def _pay_replace(text: str, arguments: Sequence[Any]) -> None:
    old, new = ([a for a in arguments if isinstance(a, str)] + ["", ""])[:2]
    grown = text.count(old) * len(new)
    spend((len(text) + grown) * _escaping(text))


def _pay_case(text: str, arguments: Sequence[Any]) -> None:
    spend(len(text) * _CASED)


def _pay_arguments(text: str, arguments: Sequence[Any]) -> None:
    spend_tree(arguments)


def _pay_whole(text: str, arguments: Sequence[Any]) -> None:
    spend(len(text))


_STRING_METHODS: Mapping[str, Callable[[str, Sequence[Any]], None]] = {
    "capitalize": _pay_case,
    "endswith": _pay_arguments,
    "find": _pay_whole,
    "format": _pay_format,
    "lower": _pay_case,
    "lstrip": _pay_strip,
    "removeprefix": _pay_whole,
    "removesuffix": _pay_whole,
    "replace": _pay_replace,
    "rsplit": _pay_rsplit,
    "rstrip": _pay_strip,
    "split": _pay_split,
    "startswith": _pay_arguments,
    "strip": _pay_strip,
    "title": _pay_case,
    "upper": _pay_case,
}
# Attributes that are not items of a mapping or a namespace.
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
    """Pay for a method's call; its arguments, iterators among them as lists."""
    if isinstance(owner, Mapping):
        if args:
            key(args[0])
    elif name == "join":
        texts = [list(each(arg)) for arg in args]
        joined = [text for arg in texts for text in arg if isinstance(text, str)]
        length = sum(map(len, joined)) + len(owner) * len(joined)
        spend(length * _escaping(owner))
        return tuple(texts)
    elif name in _STRING_METHODS:
        _STRING_METHODS[name](owner, [*args, *kwargs.values()])
    else:
        raise TypeError(f"the method {name} is not for chat templates")
    return args


# ---- filters


@pass_environment
def _join(environment: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        spend(ITEM * _weight(attribute))
        value = map(make_attrgetter(environment, attribute), value)
    texts, separator = [text_of(part) for part in each(value)], str(text_of(d))
    spend(len(separator) * len(texts))
    return separator.join(texts)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (str(text_of(value)) for value in (s, old, new))
    _pay_replace(text, (old, new))
    replaced: str = text.replace(old, new, -1 if count is None else count)
    return replaced


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    text = text_of(text)
    if args and kwargs:
        raise JinjaError("format takes positional or keyword arguments, not both")
    _pay_format(text, [*args, *kwargs.values()])
    formatted: str = text % (kwargs or args)
    return formatted


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML."""
    width = len(indent) if isinstance(indent, str) else int(indent or 0)
    if max([width, *map(len, separators or ())]) > _LONGEST_INDENT:
        raise LimitError(f"JSON with an indent or separator of more than {_LONGEST_INDENT}")
    spend_tree(value, printed=True, indent=max(0, width) + _LONGEST_INDENT * bool(separators))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return "".join(each(encoder.iterencode(value)))


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    lines = 2 + sum(map(s.count, _LINE_ENDS)) if isinstance(s, str) else 0
    one = len(width) if isinstance(width, str) else abs(width)
    spend((_weight(s) + lines * (ITEM + one)) * _escaping(s))
    return filters.do_indent(s, width, first, blank)


def _trim(value: Any, chars: str | None = None) -> str:
    text = text_of(value)
    _pay_strip(text, (chars,))
    return text.strip(chars)


def _cased(name: str) -> Callable[[Any], str]:
    def cased(value: Any) -> str:
        text = text_of(value)
        _pay_case(text, ())
        changed: str = getattr(text, name)()
        return changed

    return cased


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    spend(_weight(value))
    return filters.do_int(value, default, base)


def _escape(value: Any) -> Markup:
    text = text_of(value)
    spend(len(text) * _ESCAPED)
    return escape(text)


def _reverse(value: Any) -> Any:
    spend(_weight(value))
    return filters.do_reverse(value)


def _lazy(function: Callable[..., Any], name_at: int) -> Callable[..., Any]:
    """A filter that takes one value after the other.

    Args:
        name_at: which argument is the name of a filter or test.
    """

    @pass_context
    def lazy(context: Any, value: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        names = (*args[: name_at + 1], kwargs.get("attribute"))
        spend(ITEM * sum(map(_weight, names)))
        if not all(isinstance(name, str) for name in args[name_at : name_at + 1]):
            raise TypeError("a filter or test has no name")
        taken: Iterator[Any] = function(context, each(value) if value else (), *args, **kwargs)
        return taken

    return lazy


def _ordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that compares all values with each other."""

    @pass_environment
    def ordered(environment: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        spend(ITEM * sum(map(_weight, (*args, *kwargs.values()))))
        values = list(each(value))
        spend(spend_tree(values) * len(values).bit_length())
        return function(environment, values, *args, **kwargs)

    return ordered


def _dictsort(value: Mapping[Any, Any], *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
    spend(spend_tree(value) * len(value).bit_length())
    return filters.do_dictsort(value, *args, **kwargs)


FILTERS: Mapping[str, Callable[..., Any]] = {
    "capitalize": _cased("capitalize"),
    "count": len,
    "d": filters.do_default,
    "default": filters.do_default,
    "dictsort": _dictsort,
    "e": _escape,
    "escape": _escape,
    "first": filters.do_first,
    "format": _format,
    "indent": _indent,
    "int": _int,
    "items": lambda value: each(filters.do_items(value)),
    "join": _join,
    "last": filters.do_last,
    "length": len,
    "list": lambda value: list(each(value)),
    "lower": _cased("lower"),
    "map": _lazy(filters.do_map, 0),
    "max": _ordered(filters.do_max),
    "min": _ordered(filters.do_min),
    "reject": _lazy(filters.do_reject, 0),
    "rejectattr": _lazy(filters.do_rejectattr, 1),
    "replace": _replace,
    "reverse": _reverse,
    "safe": lambda value: Markup(text_of(value)),
    "select": _lazy(filters.do_select, 0),
    "selectattr": _lazy(filters.do_selectattr, 1),
    "sort": _ordered(filters.do_sort),
    "string": text_of,
    "tojson": _tojson,
    "trim": _trim,
    "unique": _ordered(filters.do_unique),
    "upper": _cased("upper"),
}

# ---- tests


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    return lambda value, other: compare(value, name, other)


def _divides(value: Any, remainder: int) -> bool:
    pay_arithmetic("%", value, 2)
    return bool(value % 2 == remainder)


TESTS: Mapping[str, Callable[..., Any]] = {
    "boolean": tests.test_boolean,
    "defined": tests.test_defined,
    "even": lambda value: _divides(value, 0),
    "false": tests.test_false,
    "float": tests.test_float,
    "integer": tests.test_integer,
    "iterable": tests.test_iterable,
    "mapping": tests.test_mapping,
    "none": tests.test_none,
    "number": tests.test_number,
    "odd": lambda value: _divides(value, 1),
    "sequence": tests.test_sequence,
    "string": tests.test_string,
    "true": tests.test_true,
    "undefined": tests.test_undefined,
    **{
        name: _comparison(operation)
        for operation, names in {
            "eq": "eq equalto ==",
            "ne": "ne !=",
            "gt": "gt greaterthan >",
            "gteq": "ge >=",
            "lt": "lt lessthan <",
            "lteq": "le <=",
            "in": "in",
        }.items()
        for name in names.split()
    },
}

# ---- functions


def _dict(*args: Mapping[Any, Any], **kwargs: Any) -> dict[Any, Any]:
    if not all(isinstance(arg, Mapping) for arg in args):
        raise TypeError("dict takes mappings")
    spend(2 * ITEM * sum(map(len, args)))
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> NoReturn:
    raise JinjaError(text_of(message))


def _strftime_now(pattern: str) -> str:
    spend(_DATE_CHARACTERS * len(pattern))
    return datetime.now().strftime(pattern)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "dict": _dict,
    "namespace": lambda *args, **kwargs: Namespace(_dict(*args, **kwargs)),
    "raise_exception": _raise_exception,
    "range": range,
    "strftime_now": _strftime_now,
}
