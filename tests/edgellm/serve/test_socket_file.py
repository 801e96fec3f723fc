"""`--host FILE.sock`: the file that a server listens at, and what it finds there."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import httpx
import pytest
from serving import running, served

from edgellm import OptionError
from edgellm.llm import LLM
from edgellm.serve import ModelPool, ServeOptions
from edgellm.serve.server import _bound


def bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    return listener


def test_one_that_a_killed_server_left(tiny: LLM, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    bound(path).close()  # which leaves the file
    options = ServeOptions(host=str(path), grace_s=1)
    with running(ModelPool([served(tiny)]), tiny, options):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://localhost/health").status_code == 200
    assert not path.exists()


@pytest.mark.parametrize("what", ["server", "file", "link", "folder"])
def test_one_that_is_not_ours(tmp_path: Path, what: str) -> None:
    """It stays where it is."""
    path = tmp_path / "s.sock"
    other = bound(tmp_path / "other.sock")
    if what == "server":
        other.close()
        other = bound(path)
        other.listen()
    elif what == "file":
        path.write_text("mine")
    elif what == "link":
        other.close()
        path.symlink_to("other.sock")
    else:
        path.mkdir()
    with (
        pytest.raises(OptionError, match="Address already in use"),
        _bound(ServeOptions(host=str(path))),
    ):
        pass
    assert path.exists()
    other.close()
