"""The folders of edgellm's own files, below EDGELLM_HOME, and safe writing into them.

    EDGELLM_HOME            root of everything below (default ~/.cache/edgellm)
    EDGELLM_HOME/models     downloaded checkpoints
    EDGELLM_HOME/bundles    exported bundles, one folder each
    EDGELLM_HOME/compiled   graphs compiled for accelerators
    EDGELLM_HOME/prefixes   named texts with their KV cache, a folder each
    EDGELLM_HOME/locks      empty files, by which processes wait for each other
    EDGELLM_HOME/history    lines typed into the interactive chat

Hugging Face downloads stay in Hugging Face's own cache (HF_HOME). Files and
folders, here or at a path that a user names, are written under another name first (`.partial-...`,
see `replacing_file`), so that none is ever half there. A rename may reach the disk before the
content of the file, which is then empty or cut short after a loss of power. So contents are synced
first, then the name is changed, then the folder that has the name is synced.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PARTIAL = ".partial-"
# Age in seconds at which a partial file, written in one go, is taken for a killed process's.
ABANDONED_S = 600
# The same age for exports, which may compute for hours before they write the next file.
_ABANDONED_EXPORT_S = 24 * 3600


def home() -> Path:
    value = os.environ.get("EDGELLM_HOME")
    return Path(value).expanduser() if value else Path.home() / ".cache" / "edgellm"


def models_dir() -> Path:
    return home() / "models"


def bundles_dir() -> Path:
    return home() / "bundles"


def compiled_dir() -> Path:
    return home() / "compiled"


def prefixes_dir() -> Path:
    return home() / "prefixes"


def file_safe(name: str) -> str:
    """Return `name` as a file name: at most 80 letters, digits, `.`, `_` and `-`; never empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "model"


@contextmanager
def replacing_folder(
    target: Path, *, private: bool = False, make_parents: bool = False
) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` at the block's end, or vanishes on an error.

    Args:
        private: readable by its owner alone, whatever the umask: for text that people wrote.
        make_parents: make missing parents, for a path in EDGELLM_HOME; in a path that a user
            names, a missing folder is rather a typing error.
    """
    with partial_folder(
        target.parent, of=target.name, private=private, make_parents=make_parents
    ) as partial:
        yield partial
        sync_tree(partial)
        if target.exists():
            delete_folder(target, replaced_by=partial)
        else:
            partial.replace(target)
            sync_folder(target.parent)


@contextmanager
def partial_folder(
    folder: Path, *, of: str, private: bool = False, make_parents: bool = False
) -> Iterator[Path]:
    """Yield a temporary folder in `folder` that is deleted when the block ends.

    Args:
        of: name of the file or folder to be made of it, for `delete_abandoned`.
        private, make_parents: see `replacing_folder`.
    """
    if make_parents:
        make_folder(folder)
    partial = _partial_path(folder, of)
    partial.mkdir(mode=0o700 if private else 0o777)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def replacing_file(target: Path, *, private: bool = False, lasting: bool = True) -> Iterator[Path]:
    """Yield a temporary file that becomes `target` at the block's end, or vanishes on an error.

    Args:
        private: see `replacing_folder`.
        lasting: wait for the disk; False for a file that is made again if it is damaged.
    """
    partial = _partial_path(target.parent, target.name)
    # made here, and not by the caller's writer, so that its mode is right from the start
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666))
    try:
        yield partial
        if lasting:
            sync_file(partial)
        partial.replace(target)
        if lasting:
            sync_folder(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def delete_folder(folder: Path, *, replaced_by: Path | None = None) -> None:
    """Delete a folder, renamed away first; `replaced_by`, if given, takes its name."""
    aside = _partial_path(folder.parent, folder.name)
    if replaced_by is not None and exchange(folder, replaced_by):
        aside = replaced_by
    else:
        folder.replace(aside)
        if replaced_by is not None:
            try:
                replaced_by.replace(folder)
            except BaseException:
                aside.replace(folder)
                raise
    sync_folder(folder.parent)  # so that no half-deleted folder has its name
    shutil.rmtree(aside)


def delete_abandoned(
    folder: Path, *, of: str | None = None, abandoned_s: float = ABANDONED_S
) -> None:
    """Delete half-written files and folders that killed processes have left in `folder`.

    Args:
        of: name of the file or folder that they were to become; None: any name.
        abandoned_s: age in seconds from which they are deleted; 0 where a lock excludes writers.
    """
    begin = _PARTIAL if of is None else _partial_path(folder, of).name.rpartition("-")[0]
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if path.name.startswith(begin):
                _delete_if_older(path, abandoned_s)


def delete_abandoned_at_home() -> None:
    """Delete abandoned models, bundles, compiled graphs and prefixes in EDGELLM_HOME."""
    for folder in (models_dir(), bundles_dir(), compiled_dir(), prefixes_dir()):
        delete_abandoned(folder, abandoned_s=_ABANDONED_EXPORT_S)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes for `path` during the block, waiting for it if need be.

    Raises:
        OSError: EDGELLM_HOME cannot be written.
    """
    from filelock import FileLock  # rarely needed

    locks = home() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    # not beside `path`, where it would stay: a lock file cannot be deleted while others wait for it
    digest = hashlib.sha256(str(path.resolve()).encode(errors="surrogateescape")).hexdigest()
    file = locks / f"{digest[:16]}.lock"
    file.touch()  # raises where the file cannot be made; FileLock would try for ever
    with FileLock(file):
        yield


def _partial_path(folder: Path, of: str) -> Path:
    # a digest of the name: never too long, and never the beginning of another one
    digest = hashlib.sha256(of.encode(errors="surrogateescape")).hexdigest()[:12]
    return folder / f"{_PARTIAL}{digest}-{secrets.token_hex(6)}"


def _delete_if_older(path: Path, seconds: float) -> None:
    with contextlib.suppress(OSError):
        changed = max(file.lstat().st_mtime for file in (path, *path.rglob("*")))
        if time.time() - changed < seconds:
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux
_RENAME_SWAP = 2  # macOS


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    # Windows syncs no file that is open for reading alone
    file = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        _sync(file)
    finally:
        os.close(file)


def sync_folder(path: Path) -> None:
    """Wait until the file names in a folder are on the disk; Windows cannot, so no wait there."""
    if os.name == "nt":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        # some network file systems sync no folders
        with contextlib.suppress(OSError):
            _sync(folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and wait until their names are on the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and all files and folders below it are on the disk."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync_file(Path(parent, name))
        sync_folder(Path(parent))


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False, with nothing done, where the system cannot."""
    if os.name != "posix":
        return False
    library = ctypes.CDLL(None)
    first, second = os.fsencode(one), os.fsencode(other)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        at = _AT_FDCWD
        return int(library.renameat2(at, first, at, second, _RENAME_EXCHANGE)) == 0
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        return int(library.renamex_np(first, second, _RENAME_SWAP)) == 0
    return False


def _sync(descriptor: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        # fsync on macOS leaves the data in the disk's own cache
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)
