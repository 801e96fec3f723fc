"""What would grow if something of a request stayed."""

from __future__ import annotations

import gc
import threading
from collections import Counter

import psutil
from waiting import until

# Of these packages; other objects are the tests' own, or caches of Python's.
_PACKAGES = ("edgellm", "uvicorn", "h11", "starlette")
# Which stay on purpose, as many as the KV cache has blocks for.
_PREFIXES = "edgellm.cache.prefix_index"


def remains() -> Counter[str]:
    """How many objects there are of each type of the server, its threads, and open files.

    Threads of asyncio's pool are left out, which grows to what it may be.
    """
    gc.collect()
    types = ((str(type(each).__module__), type(each).__qualname__) for each in gc.get_objects())
    found = Counter(
        f"{module}.{name}"
        for module, name in types
        if module.partition(".")[0] in _PACKAGES and module != _PREFIXES
    )
    found["threads"] = sum(each.name.startswith("edgellm") for each in threading.enumerate())
    found["files"] = psutil.Process().num_fds()
    return found


def until_remains(before: Counter[str]) -> None:
    """Wait until there is no more than there was before."""
    more = Counter[str]()

    def settled() -> bool:
        nonlocal more
        more = remains() - before
        return not more

    try:
        until(settled)
    except AssertionError as error:
        raise AssertionError(f"there is more than before: {dict(more)}") from error
