"""Download of wheels from a package index, by its own protocol (PEP 503 and 691), without pip.

No code of a wheel is run or installed; `wheel_member.py` reads one file of it.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import requests
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DigestMismatchError,
    DistributionPackage,
    NoSuchProjectError,
    PyPISimple,
    UnsupportedRepoVersionError,
)
from requests.adapters import HTTPAdapter
from urllib3 import HTTPResponse

from edgellm.errors import SourceError, first_line
from edgellm.progress import Progress, ProgressCallback

_TIMEOUT_S = 30
_CONNECTION_RETRIES = 2
_VERSIONS_SHOWN = 8


def download_wheel(
    package: str,
    version: str,
    folder: Path,
    *,
    progress: ProgressCallback | None = None,
) -> Path:
    """Download the wheel of a package version that fits this machine, from the first index with it.

    Args:
        progress: see `Progress`.

    Raises:
        SourceError: no index has such a wheel, or none can be reached.
    """
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise SourceError(f"{package}=={version}: {version} is not a version") from None
    problems, without = [], []
    for url in index_urls():
        with _session() as session, PyPISimple(url, session=session) as index:
            try:
                wheel = _choose(
                    index.get_project_page(package, timeout=_TIMEOUT_S).packages, wanted
                )
                target = folder / Path(wheel.filename).name
                index.download_package(
                    wheel,
                    target,
                    verify=bool(wheel.digests),
                    progress=partial(_Progress, _label(package, version, url), progress),
                    timeout=_TIMEOUT_S,
                )
                return target
            except NoSuchProjectError:
                without.append(_shown(url))
            except SourceError as error:
                problems.append(f"{_shown(url)} {error}")
            except (requests.RequestException, UnsupportedRepoVersionError, ValueError) as error:
                problems.append(f"{_shown(url)} {_reason(error)}")
    why = "; ".join(problems) or f"no package of that name at {', '.join(without)}"
    raise SourceError(f"{package}=={version} cannot be downloaded: {why}")


def _choose(packages: Iterable[DistributionPackage], wanted: Version) -> DistributionPackage:
    """Choose the wheel of version `wanted` that an installer would take on this machine.

    Raises:
        SourceError: no wheel fits; the message lists the versions with wheels.
    """
    wheels = [(package, *_parsed(package.filename)) for package in packages]
    offered = [wheel for wheel in wheels if not wheel[0].is_yanked]
    known = sorted({version for _, version, _ in offered if version is not None})
    there_are = ", ".join(map(str, known[-_VERSIONS_SHOWN:])) or "none"
    if wanted not in known:
        withdrawn = [wheel for wheel, version, _ in wheels if version == wanted]
        why = f"has withdrawn {wanted}" if withdrawn else f"has no wheel of version {wanted}"
        reasons = {wheel.yanked_reason for wheel in withdrawn if wheel.yanked_reason}
        note = f" ({' '.join(reasons.pop().split())})" if reasons else ""
        raise SourceError(f"{why}{note}; versions with wheels are {there_are}")
    rank = {tag: i for i, tag in enumerate(sys_tags())}
    fitting = [
        (min(rank.get(tag, len(rank)) for tag in tags), wheel.filename, wheel)
        for wheel, version, tags in offered
        if version == wanted and not rank.keys().isdisjoint(tags)
    ]
    if not fitting:
        raise SourceError(f"has {wanted} for other machines only; versions are {there_are}")
    return min(fitting, key=lambda candidate: candidate[:2])[2]


def _parsed(filename: str) -> tuple[Version | None, frozenset[Any]]:
    """Parse version and tags of a wheel's file name; None and no tags for other files."""
    try:
        _, version, _, tags = parse_wheel_filename(filename)
    except (InvalidWheelFilename, InvalidVersion):
        return None, frozenset()
    return version, tags


def _session() -> requests.Session:
    session = requests.Session()
    session.verify = certificates() or True
    session.mount("https://", HTTPAdapter(max_retries=_CONNECTION_RETRIES))
    session.mount("http://", HTTPAdapter(max_retries=_CONNECTION_RETRIES))
    session.mount("file://", _LocalFiles())
    return session


def _label(package: str, version: str, url: str) -> str:
    """Return the progress label of a download."""
    return f"downloading {package} {version} from {urlsplit(url).hostname or 'this machine'}"


def _shown(url: str) -> str:
    """Return an index URL for messages, without the user name and password in it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _reason(error: Exception) -> str:
    """Return one line on a download error.

    The libraries' own messages contain addresses with passwords, and names of objects.
    """
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"answers {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.exceptions.SSLError):
        return "has a TLS certificate that is not trusted (PIP_CERT names the trusted ones)"
    if isinstance(error, requests.Timeout):
        return f"does not answer within {_TIMEOUT_S} s"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "broke off the download"
    if isinstance(error, requests.ConnectionError):
        return "cannot be reached (check the network)"
    if isinstance(error, DigestMismatchError):
        return "sent a file that is not the one it lists (another checksum)"
    return f"sends what is not understood: {first_line(error)}"


class _Progress:
    """The progress tracker that pypi_simple calls for each piece of a download."""

    def __init__(self, label: str, progress: ProgressCallback | None, total: int | None) -> None:
        self._label = label
        self._done = 0
        self._total = total
        self._progress = progress

    def update(self, increment: int) -> None:
        self._done += increment
        if self._progress is not None and self._total:
            done = min(self._done, self._total)
            self._progress(Progress(self._label, done, self._total, "bytes"))

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _LocalFiles(HTTPAdapter):  # type: ignore[misc]  # requests is untyped
    """An adapter that answers `file://` addresses, which requests itself does not know."""

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        path = Path(url2pathname(urlsplit(request.url or "").path))
        if path.is_dir():
            path /= "index.html"
        if not path.is_file():
            nothing = HTTPResponse(BytesIO(), status=404, preload_content=False)
            return self.build_response(request, nothing)
        headers = {
            "Content-Length": str(path.stat().st_size),
            "Content-Type": "text/html; charset=utf-8",
        }
        answer = HTTPResponse(path.open("rb"), headers, status=200, preload_content=False)
        return self.build_response(request, answer)


# pip's own sections; fetching a package is the beginning of `pip install`.
_SECTIONS = ("global", "install")


def index_urls() -> list[str]:
    """Return the URLs of the default package index and then of the others, each once.

    They are those of PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip's configuration files (PIP_CONFIG_FILE
    among them), UV_DEFAULT_INDEX, UV_INDEX_URL, UV_INDEX and UV_EXTRA_INDEX_URL.

    Raises:
        SourceError: a configuration file of pip cannot be read.
    """
    settings, environment = _pip_settings(), os.environ
    default = (
        environment.get("PIP_INDEX_URL")
        or environment.get("UV_DEFAULT_INDEX")
        or environment.get("UV_INDEX_URL")
        or settings.get("index-url")
        or PYPI_SIMPLE_ENDPOINT
    )
    others = [
        environment.get("PIP_EXTRA_INDEX_URL") or settings.get("extra-index-url", ""),
        environment.get("UV_INDEX", ""),
        environment.get("UV_EXTRA_INDEX_URL", ""),
    ]
    urls = [default, *" ".join(others).split()]
    return list(dict.fromkeys(_without_name(url.strip()) for url in urls))


def certificates() -> str | None:
    """Return the file of trusted TLS certificates; None leaves the choice to the HTTP library."""
    return (
        os.environ.get("PIP_CERT")
        or _pip_settings().get("cert")
        or os.environ.get("SSL_CERT_FILE")
        or None
    )


def _without_name(url: str) -> str:
    """Return the URL of an index that uv's variables may write as NAME=URL."""
    name, equals, rest = url.partition("=")
    return rest if equals and "://" not in name else url


def _pip_settings() -> Mapping[str, str]:
    """Read pip's settings from its configuration files; a later file overrides earlier ones."""
    settings: dict[str, str] = {}
    for file in _pip_files():
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise SourceError(f"{file}: not a configuration of pip: {first_line(error)}") from None
        for section in _SECTIONS:
            if parser.has_section(section):
                settings |= {k.replace("_", "-"): v for k, v in parser.items(section)}
    return settings


def _pip_files() -> list[Path]:
    """Return pip's configuration files: machine, user, virtual environment, PIP_CONFIG_FILE."""
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    user = Path.home()
    if sys.platform == "win32":
        files = [
            Path(os.environ.get("PROGRAMDATA", "C:/ProgramData")) / "pip/pip.ini",
            user / "pip/pip.ini",
            Path(os.environ.get("APPDATA", user / "AppData/Roaming")) / "pip/pip.ini",
            Path(sys.prefix) / "pip.ini",
        ]
    else:
        support = "Library/Application Support/pip/pip.conf"
        config = os.environ.get("XDG_CONFIG_HOME") or user / ".config"
        shared = os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
        files = [
            *([Path("/") / support] if sys.platform == "darwin" else []),
            *(Path(folder) / "pip/pip.conf" for folder in reversed(shared.split(os.pathsep))),
            Path("/etc/pip.conf"),
            user / ".pip/pip.conf",
            Path(config) / "pip/pip.conf",
            *([user / support] if sys.platform == "darwin" else []),
            Path(sys.prefix) / "pip.conf",
        ]
    return [*files, Path(named)] if named else files
