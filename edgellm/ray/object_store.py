"""A block store in Ray's object store: KV blocks by the names of their content."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

from edgellm.cache.block_store import opened, sealed

# Seconds to wait for a block that another node sends.
_READ_TIMEOUT_S = 10
_log = logging.getLogger(__name__)


class ObjectStore:
    """A block store of the blocks that this process has references to.

    A block exists as long as some process has a reference to it, and the process that wrote it
    lives. References that `references` returns keep blocks for the process that they are sent to.

    Args:
        budget: maximum of bytes of written blocks; the last used are kept.
        references: references by name to blocks that another process has written.
    """

    def __init__(
        self, *, budget: int = 0, references: Mapping[bytes, ray.ObjectRef] | None = None
    ) -> None:
        self._budget = budget
        self._references = OrderedDict(references or {})
        self._sizes: dict[bytes, int] = {}
        self._pinned: Counter[bytes] = Counter()
        self._lock = threading.RLock()

    def has(self, name: bytes) -> bool:
        with self._lock:
            return name in self._references

    def read(self, name: bytes, *, size: int) -> memoryview | None:
        """Read a block, see `BlockStore`; the view is of the object's own memory, not a copy."""
        with self._lock:
            reference = self._references.get(name)
        if reference is None:
            return None
        try:
            data = ray.get(reference, timeout=_READ_TIMEOUT_S)
        except RayError as error:  # its process or node is gone
            _log.warning("a KV block was lost on its way: %s", type(error).__name__)
            block = None
        else:
            block = opened(name, memoryview(data), size=size)
            if block is None:
                _log.warning("a KV block came damaged, or under a wrong name")
        with self._lock:
            if block is None:
                self._drop(name)
            elif name in self._references:
                self._references.move_to_end(name)
        return block

    def write(self, name: bytes, data: bytes) -> bool:
        """Store a block, see `BlockStore`; False if the object store is full."""
        block = np.frombuffer(sealed(name, data), np.uint8)  # numpy arrays are read without a copy
        try:
            reference = ray.put(block)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            _log.warning("Ray's object store took no KV block: %s", type(error).__name__)
            return False
        with self._lock:
            self._references[name] = reference
            self._references.move_to_end(name)
            self._sizes[name] = block.nbytes
            self._make_room()
        return True

    @contextmanager
    def pin(self, names: Iterable[bytes]) -> Iterator[None]:
        """Pin blocks, see `BlockStore`; written blocks may exceed the budget meanwhile."""
        pinned = Counter(names)
        with self._lock:
            self._pinned += pinned
        try:
            yield
        finally:
            with self._lock:
                self._pinned -= pinned
                self._make_room()

    def references(self, names: Iterable[bytes]) -> dict[bytes, ray.ObjectRef]:
        """Return the references by name of those blocks that exist, to send to another process."""
        with self._lock:
            return {name: self._references[name] for name in names if name in self._references}

    def fetch(self, *, timeout_s: float) -> None:
        """Wait until all blocks are in this machine's memory, so that reading takes no time.

        Blocks that have not arrived after `timeout_s` are dropped.
        """
        with self._lock:
            names = {reference: name for name, reference in self._references.items()}
        if not names:
            return
        _, late = ray.wait(list(names), num_returns=len(names), timeout=timeout_s)
        with self._lock:
            for reference in late:
                self._drop(names[reference])

    def _make_room(self) -> None:
        total = sum(self._sizes.values())
        for name in list(self._references):
            if total <= self._budget:
                return
            if name in self._sizes and name not in self._pinned:
                total -= self._sizes[name]
                self._drop(name)

    def _drop(self, name: bytes) -> None:
        self._references.pop(name, None)
        self._sizes.pop(name, None)
