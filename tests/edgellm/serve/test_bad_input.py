"""Bodies and fields that are wrong: one error that names the field, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from parsing import refusal
from serving import Running

from edgellm.serve.http.fields import shown
from edgellm.serve.openai.chat import read_chat
from edgellm.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [',
        b"[]",
        b"3",
        b'"text"',
        b"null",
        b"\xff\xfe{}",
        b'{"messages": "\xc3\x28"}',
        b'{"a": 1, "a": 2}',
        b'{"messages": [{"role": "user", "role": "system", "content": "a"}]}',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b"[" * 10_000 + b"]" * 10_000,
        b'{"x": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"\\udc00": 1}',
        b"{}" * 2,
        b"\xef\xbb\xbf{}",
    ],
)
def test_bodies(server: Running, body: bytes) -> None:
    with server.client() as client:
        reply = client.post(PATH, content=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    assert "Traceback" not in reply.text
    assert "/" not in error["message"].replace("and/or", "")


def schema(**schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


WRONG: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", {}),
    ("messages", [3]),
    ("messages", [{"content": "a"}]),
    ("messages", [{"role": "robot", "content": "a"}]),
    ("messages", [{"role": "user", "content": 3}]),
    ("messages", [{"role": "user", "content": [3]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc/passwd"}]}],
    ),
    ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}]),
    ("messages", [{"role": "assistant", "tool_calls": "x"}]),
    ("messages", [{"role": "user", "content": "a"}] * 10_001),
    ("model", 3),
    ("model", ["tiny"]),
    ("max_tokens", -2),
    ("max_tokens", "12"),
    ("max_tokens", True),
    ("max_tokens", 1.5),
    ("max_tokens", 10**30),
    ("max_completion_tokens", -5),
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", 1e400),
    ("temperature", 10**400),
    ("temperature", [1]),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("min_p", 2),
    ("top_k", -2),
    ("presence_penalty", 1000),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("stop", 3),
    ("stop", [""]),
    ("stop", ["a"] * 1000),
    ("stop", ["x" * 1001]),
    ("stop", [None]),
    ("n", 0),
    ("n", 17),
    ("n", 10**9),
    ("n", "2"),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"9" * 40: 1}),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", {"1": 1e30}),
    ("stream_options", 3),
    ("logprobs", 3),
    ("top_logprobs", 3),
    ("response_format", "json"),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_object", "schema": 3}),
    ("tools", 3),
    ("tools", [3]),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "code_interpreter"}]),
    ("tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    ("tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)]),
    ("tool_choice", "sometimes"),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "none"}}),
    ("chat_template_kwargs", 3),
    ("chat_template_kwargs", {"a": {"b": 1}}),
    ("time_limit_ms", 0),
    ("priority", 10**6),
]


# What is refused behind the parser, by the model or its template, and one that is not.
OVER_HTTP: list[tuple[str, Any]] = [
    ("temperature", 1e400),
    ("tool_choice", "required"),
    ("logit_bias", {"99999": 1}),
    ("stream", "yes"),
    ("response_format", schema(type="wrong")),
    ("response_format", schema(pattern="^?[0-9]$")),
    ("response_format", schema(**{"$ref": "http://x/y"})),
    ("response_format", schema(**{"$ref": "#"})),
    ("chat_template_kwargs", {"tokenize": True}),
    ("chat_template_kwargs", {"messages": "x"}),
]


def check_words(message: str) -> None:
    assert 0 < len(message) < 600
    assert "/tmp" not in message
    assert "/work" not in message


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value)[:40])
def test_fields(name: str, value: object) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, name: value}
    error = refusal(lambda fields: read_chat(fields, max_n=16), body)
    assert error.status == 400
    check_words(error.message)


@pytest.mark.parametrize(("name", "value"), OVER_HTTP, ids=lambda value: repr(value)[:40])
def test_fields_over_http(server: Running, name: str, value: object) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, name: value}
    with server.client() as client:
        data = json.dumps(body).replace("Infinity", "1e999").encode()
        reply = client.post(PATH, content=data)
    assert reply.status_code == 400, reply.text
    check_words(reply.json()["error"]["message"])


def test_null_is_absent_and_unknown_fields_are_ignored(server: Running) -> None:
    names = {name for name, _ in WRONG + OVER_HTTP} - {"messages", "max_tokens"}
    body = {"messages": MESSAGES, "max_tokens": 1, **dict.fromkeys(names)}
    assert server.post(PATH, {**body, "slots": ["x"], "user": "me"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (PATH, {"messages": MESSAGES, "logit_bias": {"99999": 1}}, "`logit_bias`"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, "`logit_bias`"),
        (
            "/v1/completions",
            {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(1025)), 1)},
            "at most 1024",
        ),
        (
            PATH,
            {
                "messages": MESSAGES,
                "response_format": {"type": "json_object"},
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
            },
            "`response_format`",
        ),
        ("/completion", {"prompt": "a", "samplers": ["infill"], "json_schema": {}}, "`infill`"),
    ],
)
def test_what_only_the_model_can_refuse_is_no_stream(
    server: Running, path: str, body: dict[str, Any], named: str
) -> None:
    """Its status is an error's, not that of a reply which has begun."""
    reply = server.post(path, {**body, "stream": True, "max_tokens": 2})
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]["message"]


def test_an_empty_prompt_is_no_stream(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: [])
    for path in ("/v1/completions", "/completion"):
        reply = server.post(path, {"prompt": "", "stream": True, "max_tokens": 2})
        assert reply.status_code == 400, reply.text
        assert "empty" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        (["a", "b", "c", "d", "e", "x" * 2000], "too long"),
        (["a", "b", "c", "d", "e", [999_999]], "vocabulary"),
    ],
)
def test_a_wrong_prompt_of_several_is_no_stream(
    server: Running, path: str, prompts: list[Any], named: str
) -> None:
    reply = server.post(path, {"prompt": prompts, "stream": True, "max_tokens": 1})
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]["message"]
    reply = server.post(path, {"prompt": prompts[:-1], "stream": True, "max_tokens": 1})
    assert reply.status_code == 200
    assert "error" not in reply.text


@pytest.mark.parametrize("path", ["/props", "/slots"])
def test_many_parameters(server: Running, path: str) -> None:
    query = "&".join(f"a{i}=1" for i in range(150))
    reply = server.get(f"{path}?{query}")
    assert reply.status_code == 400
    assert "100 parameters" in reply.json()["error"]["message"]


def test_fields_that_mean_nothing(server: Running) -> None:
    """vLLM's `top_k` of all tokens, and a suffix that is not there."""
    asked = {"prompt": "a", "max_tokens": 3, "seed": 1, "temperature": 1}
    plain = server.post("/v1/completions", {**asked, "top_k": 0}).json()
    other = server.post("/v1/completions", {**asked, "top_k": -1, "suffix": ""}).json()
    assert other["choices"] == plain["choices"]


def test_a_prompt_that_is_too_long(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 2000}]}
    for stream in (False, True):
        reply = server.post(PATH, {**body, "stream": stream})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["type"] == "exceed_context_size_error"
        assert error["n_prompt_tokens"] == 2001
        assert error["n_ctx"] == 1024


def test_megabytes_are_refused_without_a_look_at_their_tokens(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def noting(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    text = "x" * (5 << 20)
    for path, body in (
        (PATH, {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": "a", "suffix": text}),
        ("/v1/responses", {"input": text}),
        ("/v1/embeddings", {"input": text}),
    ):
        reply = server.post(path, body)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert max(encoded, default=0) < 1 << 20


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ([1, "ä"], '[1, "ä"]'),
        ("x" * 58, f'"{"x" * 58}"'),
        ("x" * 59, f'"{"x" * 56}...'),
        ([0] * 100, f"[{'0, ' * 18}0,..."),
    ],
)
def test_values_in_errors_are_cut(value: object, text: str) -> None:
    assert shown(value) == text


def test_only_what_is_shown_of_a_value_is_written() -> None:
    class Counted(dict[str, int]):
        read = 0

        def items(self) -> Any:
            for item in super().items():
                self.read += 1
                yield item

    value = Counted({str(number): number for number in range(1000)})
    assert len(shown(value)) == 60
    assert value.read < 40


def test_paths_and_methods(server: Running) -> None:
    for path in ("/none", "/v1/none", "/v1/chat", "/../etc/passwd", "/v1/chat/completions/x"):
        reply = server.get(path)
        assert reply.status_code == 404, path
        assert reply.json()["error"]["type"] == "not_found_error"
    with server.client() as client:
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
            reply = client.request(method, PATH)
            assert reply.status_code == 405, method
            assert reply.headers["allow"] == "POST"
        assert client.head("/health").status_code == 200


def test_unknown_errors_say_nothing(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("/home/user/secret")

    monkeypatch.setattr("edgellm.serve.answering.answerable_prompt", fail)
    reply = server.post(PATH, {"messages": MESSAGES})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    assert "/home/user/secret" in caplog.text  # in the log
    monkeypatch.undo()
    assert server.post(PATH, {"messages": MESSAGES, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (PATH, {"type": "server_error", "param": None, "code": None}),
        ("/v1/messages", {"type": "api_error"}),
        ("/completion", {"type": "server_error", "code": 500}),
        ("/api/chat", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_files_are_in_the_dialect(
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    error: dict[str, Any] | None,
    stream: bool,
) -> None:
    """A disk that fails, before there is anything of an answer."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error", "/home/user/secret")

    monkeypatch.setattr("edgellm.serve.answering.answerable_prompt", fail)
    body = {"messages": MESSAGES, "prompt": "a", "max_tokens": 3, "model": "tiny"}
    reply = server.post(path, {**body, "stream": stream})
    assert reply.status_code == 500
    shown = reply.json()["error"]
    assert "secret" not in reply.text
    if error is None:
        assert "its log says why" in shown
    else:
        assert {**error, "message": shown["message"]} == shown
    assert "/home/user/secret" in caplog.text


def test_errors_of_files_outside_of_answers(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error", "/home/user/secret")

    monkeypatch.setattr("edgellm.serve.llama_cpp.text.asked_prompt", fail)
    reply = server.post("/apply-template", {"messages": MESSAGES})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    assert "/home/user/secret" in caplog.text
