"""Filters, tests and functions for chat templates, as far as released templates use them.

Each pays for its work before it does it; see `template_budget.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import filters, pass_context, pass_environment, tests
from jinja2.filters import make_attrgetter
from jinja2.utils import Namespace
from markupsafe import Markup, escape

from edgellm.text.template_budget import ITEM, LimitError, each, spend, spend_tree, text_of
from edgellm.text.template_operators import (
    ESCAPED,
    compare,
    escaping,
    pay_arithmetic,
    pay_case,
    pay_format,
    pay_replace,
    pay_strip,
    weight,
)

_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_LONGEST_INDENT = 64
# Maximum of characters that `strftime` of C's library makes of one character of a pattern.
_DATE_CHARACTERS = 256


@pass_environment
def _join(environment: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        spend(ITEM * weight(attribute))
        value = map(make_attrgetter(environment, attribute), value)
    texts, separator = [text_of(part) for part in each(value)], str(text_of(d))
    spend(len(separator) * len(texts))
    return separator.join(texts)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (str(text_of(value)) for value in (s, old, new))
    pay_replace(text, (old, new))
    replaced: str = text.replace(old, new, -1 if count is None else count)
    return replaced


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    text = text_of(text)
    if args and kwargs:
        raise JinjaError("format takes positional or keyword arguments, not both")
    pay_format(text, [*args, *kwargs.values()])
    formatted: str = text % (kwargs or args)
    return formatted


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as plain JSON; Jinja's own filter escapes HTML."""
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
    spend((weight(s) + lines * (ITEM + one)) * escaping(s))
    return filters.do_indent(s, width, first, blank)


def _trim(value: Any, chars: str | None = None) -> str:
    text = text_of(value)
    pay_strip(text, (chars,))
    return text.strip(chars)


def _cased(name: str) -> Callable[[Any], str]:
    def cased(value: Any) -> str:
        text = text_of(value)
        pay_case(text, ())
        changed: str = getattr(text, name)()
        return changed

    return cased


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    spend(weight(value))
    return filters.do_int(value, default, base)


def _escape(value: Any) -> Markup:
    text = text_of(value)
    spend(len(text) * ESCAPED)
    return escape(text)


def _reverse(value: Any) -> Any:
    spend(weight(value))
    return filters.do_reverse(value)


def _lazy(function: Callable[..., Any], name_at: int) -> Callable[..., Any]:
    """Make a paying filter of a Jinja filter that takes one value after the other.

    Args:
        name_at: index of the argument that is the name of a filter or test.
    """

    @pass_context
    def lazy(context: Any, value: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        names = (*args[: name_at + 1], kwargs.get("attribute"))
        spend(ITEM * sum(map(weight, names)))
        if not all(isinstance(name, str) for name in args[name_at : name_at + 1]):
            raise TypeError("a filter or test has no name")
        taken: Iterator[Any] = function(context, each(value) if value else (), *args, **kwargs)
        return taken

    return lazy


def _ordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a paying filter of a Jinja filter that compares all values with each other."""

    @pass_environment
    def ordered(environment: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        spend(ITEM * sum(map(weight, (*args, *kwargs.values()))))
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
