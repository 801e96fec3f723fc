"""Checks of callers' arguments; each error names the parameter and says what is allowed.

A parameter stands in backquotes in the message; the command line shows its flag instead.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.errors import OptionError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_number(
    name: str, value: object, low: float, high: float = math.inf, *, whole: bool = False
) -> None:
    """Refuse a value that is no number from `low` to `high`.

    Args:
        whole: whether only whole numbers are allowed.

    Raises:
        OptionError: the value is not allowed.
    """
    limit = f"{low} to {high}" if high < math.inf else f"{low} or more"
    kind = "whole number" if whole else "number"
    try:
        number = operator.index(value) if whole else float(value)  # type: ignore[arg-type]
        right = not isinstance(value, bool | str | bytes) and low <= number <= high
    except (TypeError, ValueError, OverflowError):
        right = False
    if not right:
        raise OptionError(f"`{name}` is {shown(value)}; allowed is a {kind}, {limit}")


def check_flag(name: str, value: object) -> None:
    """Refuse a value that is neither true nor false."""
    if not isinstance(value, bool):
        raise OptionError(f"`{name}` is {shown(value)}; allowed are True and False")


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Refuse a value that is not one of the allowed texts."""
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(f"`{name}` is {shown(value)}; allowed are {', '.join(allowed)}")


def check_text(name: str, value: object) -> None:
    """Refuse a value that is no text."""
    if not isinstance(value, str):
        raise OptionError(f"`{name}` is {shown(value)}; a text (str) is expected")


def check_texts(name: str, values: object) -> None:
    """Refuse a value that is no list of texts that are not empty."""
    right = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    if not right or any(not isinstance(text, str) or not text for text in values):  # type: ignore[attr-defined]
        raise OptionError(
            f"`{name}` is {shown(values)}; a list of texts that are not empty is expected"
        )


def check_path(name: str, value: object) -> Path:
    """Return the path that a text or `Path` means; refuse other values."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise OptionError(f"`{name}` is {shown(value)}; a path (str or Path) is expected")
    return Path(value)


def check_token_ids(name: str, values: object, *, vocab_size: int) -> list[int]:
    """Return token ids as a list.

    Raises:
        OptionError: a value that is no list of whole numbers from 0 to `vocab_size - 1`.
    """
    allowed = f"allowed are whole numbers from 0 to {vocab_size - 1}"
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise OptionError(f"`{name}` is {shown(values)}; a list of token ids is expected")
    ids: list[int] = []
    for value in values:
        try:
            ids.append(operator.index(value))
        except TypeError:
            raise OptionError(f"`{name}`: {shown(value)} is no token id; {allowed}") from None
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise OptionError(f"`{name}`: token {wrong} is not in the vocabulary; {allowed}")
    return ids


def shown(value: object) -> str:
    """Return a value as an error shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_hooks(cancel: object, progress: object, logit_filter: object = None) -> None:
    """Refuse a `cancel` that is no event, and a `progress` or `logit_filter` that is not callable.

    Raises:
        OptionError: one of them is not allowed.
    """
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise OptionError(f"`cancel` is {shown(cancel)}; a threading.Event is expected")
    for name, value in (("progress", progress), ("logit_filter", logit_filter)):
        if value is not None and not callable(value):
            raise OptionError(f"`{name}` is {shown(value)}; a function is expected")


def check_names(
    values: Mapping[str, object], options: type[DataclassInstance] | None, *others: str
) -> None:
    """Refuse names that are neither fields of a class of options, if any, nor others.

    Raises:
        TypeError: an unknown name, as for a function that has no such parameter.
    """
    names = [*others, *(field.name for field in (fields(options) if options else ()))]
    for name in values:
        if name not in names:
            from difflib import get_close_matches  # rarely needed

            close = get_close_matches(name, names, 1)
            meant = f"`{close[0]}` may be meant; " if close else ""
            raise TypeError(f"there is no option `{name}`; {meant}allowed are {', '.join(names)}")


# References times levels of a schema. llguidance compiles by recursion: 800 in 6 levels pass with a
# stack of 8 MB, 1,000 end the process.
_MOST_REFERENCES = 2000


def check_references(what: str, schema: object) -> None:
    """Refuse a JSON schema whose references may lead too deep.

    Raises:
        OptionError: there are too many for so many levels.
    """
    references, deepest, left = set[str](), 0, [(schema, 1)]
    while left:
        value, level = left.pop()
        deepest = max(deepest, level)
        if isinstance(value, Mapping):
            if isinstance(value.get("$ref"), str):
                references.add(value["$ref"])
            left += [(each, level + 1) for each in value.values()]
        elif isinstance(value, list):
            left += [(each, level + 1) for each in value]
    if len(references) * deepest > _MOST_REFERENCES:
        raise OptionError(
            f"{what} cannot be used: it has {len(references)} references in {deepest} levels, and "
            f"{_MOST_REFERENCES // deepest} are allowed; write some of them out"
        )
