"""The Python package indexes that pip and uv are configured to use on this machine.

Sources are PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_CERT, pip's configuration files
(PIP_CONFIG_FILE among them), UV_DEFAULT_INDEX, UV_INDEX_URL, UV_INDEX and UV_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pypi_simple import PYPI_SIMPLE_ENDPOINT

from edgellm.errors import SourceError, first_line

# pip's own sections; fetching a package is the beginning of `pip install`.
_SECTIONS = ("global", "install")


def index_urls() -> list[str]:
    """Return the URLs of the default package index and then of the others, each once.

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
