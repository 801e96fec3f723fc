"""Writing of KV blocks in a separate thread, so that the engine's does not wait for a disk."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator

from edgellm.cache.block_store import BlockStore

# Maximum of bytes of waiting blocks in memory; a sequence's blocks beyond it are written with its
# next answer.
_MOST_BYTES = 256 << 20
_log = logging.getLogger(__name__)


class WriteBehind:
    """A block store that takes blocks at once, and writes them to a slower store later.

    All methods but `wait` are for the thread that uses the cache. The thread that writes exists
    while blocks wait, and the end of the process waits for it; where none can start, the caller
    writes.

    Args:
        store: the slower store, which is read from while the thread writes to it.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._batches: deque[tuple[list[bytes], dict[bytes, bytes]]] = deque()
        self._batch: dict[bytes, bytes] | None = None  # blocks written in the present `pin`
        self._waiting: dict[bytes, bytes] = {}  # blocks of all batches
        self._size = 0

    def wait(self) -> None:
        """Wait until all blocks that waited at the call are written, or given up.

        May be called from any thread.
        """
        with self._lock:
            thread = self._thread
        if thread is not None and self._process == os.getpid():
            thread.join()

    def has(self, name: bytes) -> bool:
        """Whether a block waits or is in the slower store, see `BlockStore`."""
        return name in self._waiting or self._store.has(name)

    def read(self, name: bytes, *, size: int) -> memoryview | None:
        """Read a block that waits or is in the slower store, see `BlockStore`."""
        data = self._waiting.get(name)
        return self._store.read(name, size=size) if data is None else memoryview(data)

    def write(self, name: bytes, data: bytes) -> bool:
        """Take a block to be written later, see `BlockStore`; False while too many bytes wait."""
        if self._batch is None:
            with self.pin([]):
                return self.write(name, data)
        with self._lock:
            if self._size + len(data) > _MOST_BYTES:
                return False
            self._size += len(data)
        self._batch[name] = self._waiting[name] = data
        return True

    @contextlib.contextmanager
    def pin(self, names: Iterable[bytes]) -> Iterator[None]:
        """Pin blocks, see `BlockStore`, until the blocks written within the context are stored."""
        if self._process != os.getpid():  # forked: the thread and its blocks are the parent's
            self._begin()
        pinned, self._batch = list(names), {}
        try:
            yield
        finally:
            batch, self._batch = self._batch, None
            if batch:
                self._hand_on(pinned, batch)

    def _hand_on(self, names: list[bytes], blocks: dict[bytes, bytes]) -> None:
        with self._lock:
            self._batches.append((names, blocks))
            written = self._thread is not None or self._started()
        if not written:
            self._run()
        elif not threading.main_thread().is_alive():  # the thread may have begun too late for it
            self.wait()

    def _started(self) -> bool:
        """Start the thread; returns whether it has started, with the lock held."""
        if not threading.main_thread().is_alive():  # the end of the program would not wait for it
            return False
        thread = threading.Thread(target=self._run, name="edgellm-kv-cache")
        try:
            thread.start()
        except RuntimeError:  # no more threads can be started
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._batches:
                    self._thread = None
                    return
                names, blocks = self._batches.popleft()
            try:
                with self._store.pin(names):
                    for name, data in blocks.items():
                        if not self._store.write(name, data):
                            break
            except OSError as error:
                _log.warning("the KV cache's blocks were not kept: %s", error.strerror)
            with self._lock:
                for name in blocks:
                    self._size -= len(self._waiting.pop(name))
