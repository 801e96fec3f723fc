"""Texts of megabytes, wherever they stand in a request: their tokens are not looked for."""

from __future__ import annotations

from typing import Any

import pytest
from calling import TEMPLATE, tool_template
from serving import PATH, Running, chat

from edgellm.text.template import ChatTemplate
from edgellm.text.tokenizer import Tokenizer

TEXT = "x" * (3 << 20)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{TEXT}"}}'}}
DESCRIBED = TEMPLATE.replace("{{ tool.function.name }}", "{{ tool | tojson }}")


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that a tokenizer has encoded."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def noting(self: Tokenizer, text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    return lengths


def tools(count: int) -> list[dict[str, Any]]:
    described = "d" * 30_000
    return [
        {"type": "function", "function": {"name": f"f{i}", "description": described}}
        for i in range(count)
    ]


def messages(**fields: Any) -> dict[str, Any]:
    first, last = ({"role": "user", "content": text} for text in ("hi", "go on"))
    return {"messages": [first, {"role": "assistant", "content": "", **fields}, last]}


@pytest.mark.parametrize("path", [PATH, "/apply-template"])
@pytest.mark.parametrize(
    "body",
    [
        messages(reasoning_content=TEXT),
        messages(tool_calls=[CALL]),
        {**chat("hi"), "tools": tools(100)},
    ],
    ids=["reasoning", "arguments", "tools"],
)
def test_beside_the_content(
    server: Running, encoded: list[int], path: str, body: dict[str, Any]
) -> None:
    with tool_template(server.llm):
        server.llm.engine.template = ChatTemplate(DESCRIBED)
        assert server.llm.engine.template.answer_format.calls is not None
        encoded.clear()
        reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    assert "too long" in reply.json()["error"]["message"]
    assert max(encoded, default=0) < 1 << 17


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"prompt": TEXT, "shift": True}),
        ("/api/generate", {"prompt": TEXT, "shift": True, "raw": True}),
        ("/api/chat", {**chat(TEXT), "shift": True}),
    ],
)
def test_where_a_full_context_shifts(
    server: Running, encoded: list[int], path: str, body: dict[str, Any]
) -> None:
    reply = server.post(path, {**body, "stream": False, "options": {"num_predict": 1}})
    assert reply.status_code == 400, reply.text
    assert "too long" in reply.json()["error"]
    assert max(encoded, default=0) < 1 << 17


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": TEXT}, 400),
        ({"input_prefix": TEXT, "input_suffix": TEXT}, 200),
        ({"input_extra": [{"filename": "a.py", "text": TEXT}]}, 200),
        ({"input_extra": [{"filename": TEXT, "text": ""}]}, 200),
        ({"input_extra": [{"text": TEXT[:5000]}] * 600}, 200),
    ],
    ids=["prompt", "around", "extra", "name", "many"],
)
def test_around_a_gap(
    fim_server: Running, encoded: list[int], body: dict[str, Any], status: int
) -> None:
    asked = {"input_prefix": "a", "input_suffix": "b", "n_predict": 1}
    reply = fim_server.post("/infill", {**asked, **body})
    assert reply.status_code == status, reply.text
    assert sum(encoded) < 1 << 17


@pytest.mark.parametrize("path", ["/apply-template", "/v1/messages/count_tokens"])
def test_where_nothing_is_answered(server: Running, encoded: list[int], path: str) -> None:
    reply = server.post(path, {**chat(TEXT), "model": "tiny"})
    assert reply.status_code == 400
    assert max(encoded, default=0) < 1 << 17
