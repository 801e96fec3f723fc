"""A disk that loses power: what is written is recorded, and every moment of it can be replayed.

Names reach the disk when their folder is synced, contents when their file is. Before that they may
or may not, so each moment is replayed in several ways: a process that was killed (all is there),
and contents that were not synced are lost, with the names of all folders, of none, or of those down
to some depth or from it on that were not synced.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# A folder's names, and what they stand for; a file's bytes.
State = dict[str, "State | bytes"]
_CHANGING = ("replace", "rename", "unlink", "remove", "mkdir", "rmdir")


@dataclass(eq=False)
class _Node:
    """A file or folder, whatever its name is.

    Attributes:
        now: bytes, or the nodes of a folder by name.
        synced: the same as it is on the disk.
    """

    now: bytes | dict[str, _Node]
    synced: bytes | dict[str, _Node] = b""


@dataclass
class RecordedDisk:
    """All that happens below a folder, which is on the disk at the beginning.

    Attributes:
        states: after each change, as it may be found after a loss of power then.
    """

    root: Path
    states: list[State] = field(default_factory=list)
    _nodes: dict[int, _Node] = field(default_factory=dict)
    _read: dict[tuple[int, int, int], bytes] = field(default_factory=dict)

    def start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._look()
        for node in self._nodes.values():
            node.synced = dict(node.now) if isinstance(node.now, dict) else node.now
        for name in _CHANGING:
            monkeypatch.setattr(os, name, self._noted(getattr(os, name)))
        fsync = os.fsync
        monkeypatch.setattr(os, "fsync", lambda file: (self._sync(file), fsync(file))[1])
        # it calls the C library, past `os`
        exchange = "edgellm.store.home.exchange"
        from edgellm.store import home

        monkeypatch.setattr(exchange, self._noted(home.exchange))

    def finish(self) -> list[State]:
        """What may be found once all calls have returned."""
        self._note()
        return _states(self._look())

    def _noted(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            self._note()  # what was written into files since the last change
            result = change(*arguments, **options)
            self._note()
            return result

        return noted

    def _sync(self, descriptor: int) -> None:
        self._note()
        node = self._nodes.get(os.fstat(descriptor).st_ino)
        if node is not None:
            node.synced = dict(node.now) if isinstance(node.now, dict) else node.now
        self._note()

    def _note(self) -> None:
        for state in _states(self._look()):
            if state not in self.states[-20:]:
                self.states.append(state)

    def _look(self) -> _Node:
        """Bring the nodes up to date; a number that vanished may be given to another file."""
        seen: dict[int, _Node] = {}
        root = self._visit(self.root, seen)
        self._nodes = seen
        return root

    def _visit(self, path: Path, seen: dict[int, _Node]) -> _Node:
        status = path.lstat()
        node = self._nodes.get(status.st_ino)
        if stat.S_ISDIR(status.st_mode):
            if node is None or not isinstance(node.now, dict):
                node = _Node({}, {})
            node.now = {child.name: self._visit(child, seen) for child in sorted(path.iterdir())}
        else:
            if node is None or isinstance(node.now, dict):
                node = _Node(b"")
            node.now = self._content(path, status)
        seen[status.st_ino] = node
        return node

    def _content(self, path: Path, status: os.stat_result) -> bytes:
        key = (status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in self._read:
            self._read[key] = path.read_bytes()
        return self._read[key]


def _states(root: _Node) -> list[State]:
    """Folders of each depth have the names that were synced, or those of now."""
    ways = [[late] * before + [not late] * 3 for late in (False, True) for before in range(4)]
    return [_killed(root), *(_after(root, way) for way in ways)]


def _killed(node: _Node) -> Any:
    if not isinstance(node.now, dict):
        return node.now
    return {name: _killed(child) for name, child in node.now.items()}


def _after(node: _Node, late: list[bool]) -> Any:
    """After a loss of power.

    Args:
        late: of each depth, whether names that were not synced are lost; the last is for all below.
    """
    names = node.synced if late[0] else node.now
    if not isinstance(names, dict):
        return node.synced
    return {name: _after(child, late[1:] or late) for name, child in names.items()}


def restored(states: list[State], folder: Path) -> Iterator[Path]:
    """Each state in turn, as files in a folder of its own."""
    for number, state in enumerate(states):
        target = folder / str(number)
        _write(state, target)
        yield target


def _write(state: State | bytes, path: Path) -> None:
    if isinstance(state, bytes):
        path.write_bytes(state)
        return
    path.mkdir(parents=True)
    for name, child in state.items():
        _write(child, path / name)
