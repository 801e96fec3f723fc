"""KV blocks on disk, so that a cached prefix need not be computed again after a restart.

A file holds one full block of one cache group, enclosed (see `block_store.py`), and has the block's
name. Files appear whole, by renaming, and may vanish at any time: processes share a folder
without locks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from edgellm.cache.block_store import BlockStore, enclosed, opened
from edgellm.errors import OptionError
from edgellm.store.home import delete_abandoned, replacing_file

_SUFFIX = ".kv"
# The folder is listed again when the budget divided by this has been written, as other processes
# may have written as well.
_UNSEEN = 16

_log = logging.getLogger(__name__)


class DiskCache:
    """A block store in a folder, which keeps the last used blocks.

    Args:
        folder: the folder, made if it is missing.
        budget: maximum of bytes of all files in it.

    Raises:
        OptionError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, budget: int) -> None:
        self._folder = folder
        self._budget = budget
        self._pinned: Counter[bytes] = Counter()
        self._room = -1  # bytes that may be written before the folder is listed
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"`kv_cache_dir` {folder}: {error.strerror}") from None
        delete_abandoned(folder)

    def has(self, name: bytes) -> bool:
        return os.path.exists(self._path(name))  # Path.exists raises without permission

    def read(self, name: bytes, *, size: int) -> memoryview | None:
        """Read a block, see `BlockStore`; a damaged file is deleted."""
        path = self._path(name)
        try:
            # not mapped: a map of a file that another process cuts short would kill this one
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        block = opened(name, data, size=size)
        if block is None:
            _log.warning("%s is damaged or another model's; deleted", path)
            with contextlib.suppress(OSError):
                path.unlink()
        return block

    def write(self, name: bytes, data: bytes) -> bool:
        """Write a block, see `BlockStore`; False if the disk is full or read-only.

        A folder that was deleted is made again.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            block = enclosed(name, data)
            # not lasting: a block that a loss of power cuts short is found damaged when read
            with replacing_file(self._path(name), private=True, lasting=False) as partial:
                partial.write_bytes(block)
        except OSError as error:
            _log.warning("kv_cache_dir %s: %s; not all was kept", self._folder, error.strerror)
            return False
        self._room -= len(block)
        if not self._pinned:
            self._make_room()
        return True

    @contextlib.contextmanager
    def pin(self, names: Iterable[bytes]) -> Iterator[None]:
        """Pin blocks, see `BlockStore`; other processes may delete them all the same.

        Blocks written within the context may exceed the budget until its end.
        """
        pinned = Counter(names)
        self._pinned += pinned
        try:
            yield
        finally:
            self._pinned -= pinned
            self._make_room()

    def _path(self, name: bytes) -> Path:
        return self._folder / (name.hex() + _SUFFIX)

    def _make_room(self) -> None:
        """Delete the least recently used files until the budget holds; pinned blocks stay."""
        if self._room >= 0:
            return
        files = sorted(self._files(), key=lambda file: file[1])
        total = sum(size for _, _, size in files)
        pinned = {self._path(name) for name in self._pinned}
        for path, _, size in files:
            if total <= self._budget:
                break
            if path in pinned:
                continue
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
        self._room = min(self._budget - total, self._budget // _UNSEEN)

    def _files(self) -> Iterator[tuple[Path, float, int]]:
        """Yield path, time of last use and size in bytes of each block's file."""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                yield path, status.st_mtime, status.st_size


# Maximum of bytes of waiting blocks in memory; a sequence's blocks beyond it are written with its
# next answer.
_MOST_BYTES = 256 << 20


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
