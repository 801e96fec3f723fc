"""Answers as generators that say where they wait, so that they run with and without asyncio.

`Loop.drive` steps where one waits; `asynchronous.py` lets others do something meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias, TypeVar

from edgellm.engine.request import Request

T = TypeVar("T")


@dataclass(frozen=True)
class Waiting:
    """An item that waits for news of one of the requests, which takes a step."""

    requests: Sequence[Request]


class _Marker(Enum):
    WORKING = "working"


# What follows takes long: it encodes a text, waits for the cache's lock, writes to disk, or is the
# caller's. So does what comes before the first item.
WORKING = _Marker.WORKING
Pending: TypeAlias = Generator[T | Waiting | Literal[_Marker.WORKING], None, None]
