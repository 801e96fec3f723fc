"""Where edgellm keeps its files, and the environment variables that it reads.

    EDGELLM_HOME            root of everything below (default ~/.cache/edgellm)
    EDGELLM_HOME/models     downloaded checkpoints
    EDGELLM_HOME/bundles    exported bundles, one folder each
    EDGELLM_HOME/compiled   graphs compiled for accelerators
    EDGELLM_HOME/prefixes   named texts with their KV cache, a folder each
    EDGELLM_HOME/history    lines typed into the interactive chat

Hugging Face downloads stay in Hugging Face's own cache (HF_HOME).
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    """A name with everything replaced that some file system does not take."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "model"


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends, or vanishes when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    try:
        yield partial
        if target.exists():
            shutil.rmtree(target)
        partial.chmod(0o755)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def replacing_file(target: Path) -> Iterator[Path]:
    """A temporary file that becomes `target` when the block ends, or vanishes when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".partial-", dir=target.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o644)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
