"""A line for each request, and nothing of its text."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import httpx
import pytest
from serving import LONG, PATH, Running, chat, start, until
from stepping import asking

from edgellm.serve.http import request_log

ANSWER = (
    r"tiny: \d+ prompt tokens, \d+ of them cached, {} generated, \d\.\d{{3}} s to the first, "
    r"then \d+\.\d/s, length"
)


def until_told(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    until(lambda: len(caplog.messages) == count)
    return caplog.messages


@pytest.mark.parametrize("stream", [False, True])
def test_answers(server: Running, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.INFO, request_log.log.name)
    body = chat("a secret", max_tokens=4, n=2, stream=stream, ignore_eos=True)
    assert server.post(PATH, body).status_code == 200
    (line,) = until_told(caplog, 1)
    answer = ANSWER.format(4)
    assert re.fullmatch(rf"127.0.0.1 POST {PATH} 200 \d+\.\d{{3}} s; {answer}; {answer}", line)


def test_what_is_refused(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, request_log.log.name)
    server.get("/health")
    server.post(PATH, {"messages": 3})
    server.get("/v1/models", headers={"Host": "elsewhere.example"})
    server.get("/a%0Ab%20c?key=secret")
    told = until_told(caplog, 3)
    ends = [line.rpartition(" ")[0].rpartition(" ")[0] for line in told]
    assert ends == [
        f"127.0.0.1 POST {PATH} 400",
        "127.0.0.1 GET /v1/models 403",
        "127.0.0.1 GET /a%0Ab%20c 404",
    ]


def test_a_client_that_goes_away(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, request_log.log.name)
    with asking(server, PATH, [chat("hi", stream=True, **LONG)]):
        until(lambda: server.live == 1)
    (line,) = until_told(caplog, 1)
    assert re.match(rf"127.0.0.1 POST {PATH} (200|-) client gone \d", line)


def test_without_a_reader_of_the_log_nothing_is_told(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    server.post(PATH, chat("hi", max_tokens=1))
    assert caplog.messages == []


@pytest.mark.slow
def test_on_stderr(tiny_model: Path) -> None:
    with start(tiny_model, "--log-requests") as (process, url):
        assert httpx.get(url + "/v1/models", trust_env=False).status_code == 200
        assert process.stderr is not None
        assert "127.0.0.1 GET /v1/models 200 " in next(process.stderr)
