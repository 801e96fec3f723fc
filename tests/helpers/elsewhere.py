"""A system without what only Unix has, in a child process: `import elsewhere; elsewhere.enter()`.

Other packages take care of themselves: it is the package and its tests that find nothing.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

# Windows has none of them.
MODULES = {"fcntl", "grp", "pty", "pwd", "readline", "resource", "termios", "tty"}
NAMES = {
    os: "fork forkpty getegid geteuid getgid getpgrp getuid killpg mkfifo openpty posix_fadvise "
    "posix_fallocate register_at_fork sched_getaffinity sched_setaffinity setsid statvfs tcgetpgrp "
    "uname",
    signal: "SIGALRM SIGCONT SIGHUP SIGKILL SIGTSTP SIGUSR1 SIGUSR2 SIGWINCH ITIMER_REAL alarm "
    "pthread_kill pthread_sigmask setitimer",
    socket: "AF_UNIX",
    select: "poll",
}


def _ours() -> tuple[str, ...]:
    package = find_spec("edgellm")
    assert package is not None
    assert package.origin is not None
    return str(Path(package.origin).parent), str(Path(__file__).parents[1])


OURS = _ours()


def _is_ours(frame: FrameType) -> bool:
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(OURS)


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in MODULES and _is_ours(sys._getframe(1)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


class _Without(ModuleType):
    def __getattribute__(self, name: str) -> Any:
        get = super().__getattribute__
        if name in NAMES[self].split() and _is_ours(sys._getframe(1)):
            raise AttributeError(f"module {get('__name__')!r} has no attribute {name!r}")
        return get(name)


def enter() -> None:
    """Take away what Windows does not have."""
    for module in NAMES:
        module.__class__ = _Without
    for name in MODULES & sys.modules.keys():
        del sys.modules[name]  # looked for again
    sys.meta_path.insert(0, _Finder())
