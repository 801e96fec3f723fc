"""Who may ask: keys, hosts, origins, sizes and times."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import inspection
import pytest
from serving import Running, connected
from waiting import CEILING_S, until

from edgellm import OptionError
from edgellm.engine.request import Request
from edgellm.serve import ServeOptions
from edgellm.serve.application import DIALECTS

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
PATH = "/v1/chat/completions"


def raw(server: Running, data: bytes) -> bytes:
    """What comes back for bytes, until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=CEILING_S) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)


def test_every_route_but_health_needs_a_key(serving: Callable[..., Running]) -> None:
    server = serving(api_keys=("secret", "other"))
    for dialect in DIALECTS:
        for route in dialect.routes:
            for method in route.handlers:
                with server.client() as client:
                    reply = client.request(method, route.path.replace("{model:path}", "tiny"))
                public = route.path in ("/", "/health", "/v1/health") and method == "GET"
                assert reply.status_code == (200 if public else 401), route.path
    assert server.get("/none").status_code == 401
    assert server.get("/v1/models").headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"authorization": "bearer other"}, 200),
        ({"X-Api-Key": "secret"}, 200),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"Authorization": "Bearer secre"}, 401),
        ({"Authorization": "Bearer secrets"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"X-Api-Key": "x" * 5000}, 401),
    ],
)
def test_keys(serving: Callable[..., Running], headers: dict[str, str], status: int) -> None:
    server = serving(api_keys=("secret", "other"))
    assert server.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("header", [b"Authorization: Bearer \r\n", b"Authorization: Bearer x\r\n"])
def test_where_none_is_needed_any_key_will_do(server: Running, header: bytes) -> None:
    """llama.vim always sends an empty one."""
    data = json.dumps(CHAT).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    length = f"Content-Length: {len(data)}\r\n\r\n".encode()
    assert raw(server, head + header + length + data).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1234", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("192.168.1.5", 200),
        ("app.localhost", 200),
        ("host.docker.internal:8080", 200),
        ("box.local", 403),
        ("a.internal", 403),
        ("attacker.example", 403),
        ("localhost.attacker.example", 403),
        ("127.0.0.1.nip.io", 403),
        ("8.8.8.8", 403),
        ("user@localhost@evil.example", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_hosts(server: Running, host: str, status: int) -> None:
    """DNS rebinding: a page's own name that points here."""
    assert server.get("/v1/models", headers={"Host": host}).status_code == status


def test_hosts_and_origins_can_be_allowed(serving: Callable[..., Running]) -> None:
    server = serving(allowed_hosts=("me.example",), allowed_origins=("https://app.example",))
    assert server.get("/v1/models", headers={"Host": "me.example"}).status_code == 200
    headers = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
    reply = server.post(PATH, CHAT, headers=headers)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    assert reply.headers["vary"] == "Origin"
    with server.client() as client:
        preflight = client.options(PATH, headers=headers)
        foreign = client.options(PATH, headers={"Origin": "https://evil.example"})
    assert preflight.status_code == 204
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert foreign.status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "http://127.0.0.1:8080"}, 200),
        ({"Origin": "http://[::1]:8080"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "file://"}, 403),
        ({"Origin": "app://obsidian.md"}, 200),
        ({"Origin": "tauri://localhost"}, 200),
        ({"Origin": "vscode-webview://0a1b2c"}, 200),
        ({"Origin": "http://[::1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://localhost:3000", "Sec-Fetch-Site": "cross-site"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Mode": "cors"}, 200),  # node sends it
    ],
)
def test_origins(server: Running, headers: dict[str, str], status: int) -> None:
    reply = server.post(PATH, CHAT, headers=headers)
    assert reply.status_code == status
    shared = headers.get("Origin") if status == 200 else None
    assert reply.headers.get("access-control-allow-origin") == shared
    if status == 403:
        assert server.answering.metrics.waiting == 0


SAME = [
    ("192.168.1.5:8080", "http://192.168.1.5:8080", 200),
    ("host.docker.internal", "http://host.docker.internal", 403),
    ("box.local", "https://box.local", 403),
    ("me.example", "https://ME.example", 200),
    ("192.168.1.5:8080", "http://192.168.1.5:3000", 403),
    ("192.168.1.5:8080", "http://192.168.1.6:8080", 403),
    ("192.168.1.5:8080", "ftp://192.168.1.5:8080", 403),
    ("attacker.example", "http://attacker.example", 403),
    ("", "http://", 403),
]


@pytest.mark.parametrize("others_reach_it", [False, True])
def test_the_page_of_this_server_may_call_it(
    serving: Callable[..., Running], others_reach_it: bool
) -> None:
    """But no page whose name was made to point here, also where `Host` is not checked."""
    server = serving(
        allowed_hosts=("me.example",),
        insecure=others_reach_it,
        host="0.0.0.0" if others_reach_it else "127.0.0.1",
    )
    for host, origin, status in SAME:
        headers = {"Host": host, "Origin": origin, "Sec-Fetch-Site": "same-origin"}
        assert server.post(PATH, CHAT, headers=headers).status_code == status, (host, origin)
    if others_reach_it:
        assert server.get("/v1/models", headers={"Host": "any.example"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://app.example"])
def test_preflights_allow_the_headers_that_are_asked_for(
    serving: Callable[..., Running], origin: str
) -> None:
    server = serving(allowed_origins=("https://app.example",))
    names = "anthropic-version,content-type,x-stainless-lang"
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    with server.client() as client:
        usual = client.options(PATH, headers=headers)
        asked = client.options(PATH, headers={**headers, "Access-Control-Request-Headers": names})
        foreign = client.options(
            PATH, headers={"Origin": "https://e.example", "Access-Control-Request-Headers": names}
        )
    assert usual.status_code == asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == origin
    assert "Content-Type" in usual.headers["access-control-allow-headers"]
    assert asked.headers["access-control-allow-headers"] == names
    assert foreign.status_code == 403
    assert "access-control-allow-headers" not in foreign.headers


def test_a_browser_has_to_say_that_it_is_json(server: Running) -> None:
    data = json.dumps(CHAT).encode()
    with server.client() as client:
        for content_type, status in (("text/plain", 415), ("application/json; charset=utf-8", 200)):
            headers = {"Origin": "http://localhost:1", "Content-Type": content_type}
            assert client.post(PATH, content=data, headers=headers).status_code == status
        # curl -d
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        assert client.post(PATH, content=data, headers=form).status_code == 200


def test_large_bodies(serving: Callable[..., Running]) -> None:
    server = serving(max_body_bytes=2000)
    assert server.post(PATH, {**CHAT, "user": "x" * 3000}).status_code == 413

    def chunks() -> Any:
        for _ in range(100):
            yield b" " * 100

    with server.client() as client:
        assert client.post(PATH, content=chunks()).status_code == 413
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 60}\r\n\r\n"
    assert raw(server, head.encode()).startswith(b"HTTP/1.1 413")
    assert server.post(PATH, CHAT).status_code == 200


def test_compressed_bodies(server: Running) -> None:
    headers = {"Content-Encoding": "gzip"}
    assert server.post(PATH, CHAT, headers=headers).status_code == 415


def test_large_headers(server: Running) -> None:
    data = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 17) + b"\r\n\r\n"
    with contextlib.suppress(ConnectionError):  # closed while it is being sent
        assert raw(server, data).startswith(b"HTTP/1.1 4")
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /health HT",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n{",
    ],
)
def test_requests_that_never_end(serving: Callable[..., Running], data: bytes) -> None:
    server = serving(read_timeout_s=0.3)
    begin = time.monotonic()
    reply = raw(server, data)
    assert time.monotonic() - begin > 0.2
    assert reply == b"" or reply.startswith(b"HTTP/1.1 408")
    assert server.post(PATH, CHAT).status_code == 200


def test_nonsense_is_no_http(server: Running) -> None:
    assert raw(server, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_others_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.2", "box.example"):
        with pytest.raises(OptionError, match="which others can reach"):
            ServeOptions(host=host)
        ServeOptions(host=host, api_keys=("k",))
        ServeOptions(host=host, insecure=True)
    for host in ("127.0.0.1", "::1", "localhost", "x.sock"):
        ServeOptions(host=host)


def test_keys_share_no_prefixes(serving: Callable[..., Running]) -> None:
    """Else the time of an answer, or its counts, tell what others have asked."""
    server = serving(api_keys=("first", "second"))
    question = "a secret of many words " * 12
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 1}

    def cached(key: str) -> int:
        reply = server.post(PATH, body, headers={"X-Api-Key": key}).json()
        count: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert [cached("first"), cached("second")] == [0, 0]
    assert cached("first") > 200
    assert cached("second") > 200


def test_no_key_pushes_out_another(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though one has filled the queue: the other is taken in, and begins as its second."""
    server = serving(api_keys=("many", "one"), max_waiting=12)
    begun: list[str] = []
    begin = Request.begin

    def noting(request: Request) -> None:
        begun.append(request.owner)
        begin(request)

    monkeypatch.setattr(Request, "begin", noting)

    def ask(i: int, key: str = "many") -> int:
        body = {"messages": [{"role": "user", "content": f"{i} " * 200}], "max_tokens": 1}
        return server.post(PATH, body, headers={"X-Api-Key": key}).status_code

    with ThreadPoolExecutor(21) as threads:
        with inspection.all_submitted(server.llm, 13):
            asked = [threads.submit(ask, i) for i in range(20)]
            until(lambda: sum(each.done() for each in asked) == 8)
            until(lambda: len(inspection.submitted(server.llm)) == 12)
            one = threads.submit(ask, 99, "one")
        assert one.result() == 200
        assert sorted(each.result() for each in asked) == [200] * 12 + [503] * 8
    owner = next(each for each in begun if begun.count(each) == 1)
    assert begun.index(owner) <= 1
    assert len(begun) == 13


def test_the_own_name_in_the_local_network(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.lan")
    server = serving()
    for host, status in (("box.lan", 200), ("box.local", 200), ("other.local", 403)):
        assert server.get("/v1/models", headers={"Host": host}).status_code == status


REFUSED = [
    ("POST", PATH, "", 401),
    ("POST", "/none", "X-Api-Key: secret\r\n", 404),
    ("PUT", PATH, "X-Api-Key: secret\r\n", 405),
    ("POST", PATH, "X-Api-Key: secret\r\nOrigin: https://evil.example\r\n", 403),
    ("POST", PATH, "X-Api-Key: secret\r\nContent-Encoding: gzip\r\n", 415),
    ("OPTIONS", PATH, "Origin: http://localhost:3000\r\n", 204),
    ("GET", "/health/", "X-Api-Key: secret\r\n", 307),
]


@pytest.mark.slow
def test_refused_requests_whose_bodies_never_end(serving: Callable[..., Running]) -> None:
    """What comes behind the answer does not hold the connection."""
    server = serving(api_keys=("secret",), read_timeout_s=3)
    with contextlib.ExitStack() as stack:
        connections = []
        for method, path, headers, status in REFUSED:
            connection = stack.enter_context(connected(server))
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
            connection.sendall(f"{head}{headers}\r\n".encode())
            assert connection.recv(4096).startswith(f"HTTP/1.1 {status} ".encode())
            connection.sendall(b"x")
            connections.append(connection)
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    pass
    until(lambda: server.connections == 0)


def test_a_refused_request_is_followed_by_another(serving: Callable[..., Running]) -> None:
    """Once its body has come to its end."""
    server = serving(api_keys=("secret",))
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
        connection.sendall(b"12345" + health)
        parts = b"".join(iter(lambda: connection.recv(4096), b""))
    assert b"HTTP/1.1 200 " in parts


def test_nonsense_is_logged_with_its_address(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    raw(server, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
    assert "127.0.0.1: Invalid HTTP request received." in caplog.text
