"""Budgets of chat templates: limits on a rendering's work and time.

Each operation of a template that may make or read much text pays for it before it begins. A
character costs 1, an item of a list or a turn of a loop `ITEM`, about its size in memory.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

from jinja2 import Undefined

ITEM = 16
WORK_LIMIT = 1 << 26
# Processor time, so that other threads and processes do not stop a template that takes little.
TIME_LIMIT_S = 2.0
# Work between two looks at the time.
_LOOK_EVERY = 64 * ITEM
LISTS = (list, tuple, KeysView, ValuesView, ItemsView)
_PRINTED = (Mapping, Undefined, range, type(None), *LISTS)
_FLOAT_CHARACTERS = 330


class LimitError(Exception):
    """Error: a rendering exceeded a limit; `ChatTemplate` turns it into a TemplateError."""


class Budget:
    """Work and processor time left to a rendering.

    Args:
        work: characters that the rendering may make.
        seconds: processor time of this thread.
    """

    def __init__(self, work: int, seconds: float) -> None:
        self._work = self._left = self._look_at = work
        self._until = time.thread_time() + seconds

    def spend(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            raise LimitError(f"it made more than {self._work} characters")
        if self._left <= self._look_at:
            self._look_at = self._left - _LOOK_EVERY
            if time.thread_time() > self._until:
                raise LimitError("it took too long")


# The budget of the rendering that runs in this thread.
_BUDGET: ContextVar[Budget] = ContextVar("template budget")


@contextmanager
def budget(work: int, seconds: float) -> Iterator[None]:
    """Limit the work and time of renderings in the block; a budget around it applies instead."""
    if _BUDGET.get(None) is not None:
        yield
        return
    token = _BUDGET.set(Budget(work, seconds))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def spend(work: int) -> None:
    """Pay for work of the rendering that runs in this thread.

    Raises:
        LimitError: the rendering's budget is spent.
    """
    _BUDGET.get().spend(work)


def each(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and pay `ITEM` for each as it is taken."""
    for value in values:
        spend(ITEM)
        yield value


def spend_tree(value: Any, *, printed: bool = False, indent: int = 0) -> int:
    """Pay for a walk over a value and all values in it, and return the price.

    A value in several places counts in each, as it does in comparing, hashing or printing.

    Args:
        printed: whether to pay for the characters of the value as JSON or in Python's notation.
        indent: characters before each line for each level of JSON.

    Raises:
        TypeError: a value to be printed has no text.
    """
    total, stack = 0, [iter((value,))]
    while stack:
        for item in stack[-1]:
            price = ITEM + indent * len(stack) + _characters(item, printed=printed)
            spend(price)
            total += price
            if isinstance(item, Mapping):
                stack.append(chain(item.keys(), item.values()))
                break
            if isinstance(item, LISTS):
                stack.append(iter(item))
                break
        else:
            stack.pop()
    return total


def text_of(value: Any) -> str:
    """Return a value's text as a template prints it, and pay for that."""
    if isinstance(value, str):
        spend(ITEM + len(value))
        return value
    spend_tree(value, printed=True)
    return str(value)


def _characters(value: Any, *, printed: bool) -> int:
    """Bound the characters written for a value, without the values in it."""
    if isinstance(value, str):
        plain = not printed or (value.isascii() and value.isprintable())
        return len(value) * (1 + printed if plain else 12)
    if isinstance(value, int):
        return value.bit_length()
    if isinstance(value, float):
        return _FLOAT_CHARACTERS
    if printed and not isinstance(value, _PRINTED):
        raise TypeError(f"a {type(value).__name__} has no text")
    return 0
