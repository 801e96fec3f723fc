"""OpenAI's `/v1/responses`. No response is stored: clients send the whole conversation."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from edgellm.results import Stats
from edgellm.serve.ask import Ask, Conversation
from edgellm.serve.events import Begun, Delta, End, Event
from edgellm.serve.http.endpoint import Call, Route, framed
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import Frame, Reply, json_reply
from edgellm.serve.openai.grammar import ANY_OBJECT
from edgellm.serve.openai.messages import effort_hints, error_body, read_choice
from edgellm.serve.openai.responses_items import OfferedTools, OutputItems, read_input
from edgellm.serve.openai.sampling import max_tokens, sampling_arguments
from edgellm.serve.request_error import RequestError
from edgellm.serve.usage import placement, timings, usage
from edgellm.text.grammar import Grammar

_BY_ITSELF = ("stop", "tool_calls")
# Fields that would need stored responses, and so are refused.
_OF_A_STORE = ("previous_response_id", "conversation", "background", "store", "prompt")


async def responses(call: Call) -> Reply:
    fields = await call.fields()
    ask = read_response(fields)
    response = _Response(fields.values, OutputItems(OfferedTools.read(fields.get("tools"))))
    if fields.flag("stream"):
        return call.stream(framed(call.events(ask), response.frames))
    async with aclosing(call.events(ask)) as events:
        async for event in events:
            for _ in response.add(event):
                pass
    return json_reply(response.object())


def read_response(fields: Fields) -> Ask:
    """Read the ask of a request."""
    for name in _OF_A_STORE:
        if fields.get(name):
            raise RequestError(
                "not_supported",
                f"`{name}` is not supported: this server keeps no responses; send the whole "
                "conversation as `input`",
                param=name,
            )
    offered = OfferedTools.read(fields.get("tools"))
    tools = offered.tools
    reasoning = fields.object("reasoning")
    effort = None if reasoning is None else reasoning.text("effort")
    return Ask(
        model=fields.text("model"),
        prompt=Conversation(
            messages=read_input(fields, offered),
            tools=tools,
            tool_choice=read_choice(offered.choice(fields), tools, "tool_choice"),
            parallel_tool_calls=fields.flag("parallel_tool_calls") is not False,
            template_hints=effort_hints(effort),
        ),
        arguments={**sampling_arguments(fields), **max_tokens(fields, "max_output_tokens")},
        grammar=_grammar(fields),
    )


def _grammar(fields: Fields) -> Grammar | None:
    """Read the JSON schema of `text.format`."""
    text = fields.object("text")
    wanted = None if text is None else text.object("format")
    if wanted is None:
        return None
    kind = wanted.choice("type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        return Grammar("json_schema", json.dumps(wanted.required_object("schema").values))
    return ANY_OBJECT if kind == "json_object" else None


@dataclass
class _Response:
    """A response that grows with the events of its ask.

    Attributes:
        asked: fields of the request; the response repeats some of them.
    """

    asked: Mapping[str, Any]
    _items: OutputItems
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _model: str = ""
    _end: End | None = None
    _number: int = 0

    def frames(self, event: Event) -> Iterator[Frame]:
        """Add an event of the ask, and yield its frames, which are numbered."""
        for told in self.add(event):
            yield Frame({**told, "sequence_number": self._number}, told["type"])
            self._number += 1

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """Add an event of the ask, and yield the API's events for it."""
        if isinstance(event, Begun):
            self._model = event.model
            yield {"type": "response.created", "response": self.object()}
            yield {"type": "response.in_progress", "response": self.object()}
        elif isinstance(event, Delta):
            yield from self._items.add(event)
        elif isinstance(event, End):
            self._end = event
            yield from self._items.end(self._status)
            yield {"type": f"response.{self._status}", "response": self.object()}

    def object(self) -> dict[str, Any]:
        asked = self.asked
        incomplete = self._status == "incomplete"
        stats = None if self._end is None else self._end.stats
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": self._model,
            "output": list(self._items.done),
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": asked.get("temperature"),
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
            "usage": None if stats is None else _usage(stats),
            **({} if stats is None else _places(stats)),
        }

    @property
    def _status(self) -> str:
        if self._end is None:
            return "in_progress"
        return "completed" if self._end.finish_reason in _BY_ITSELF else "incomplete"


def _usage(stats: Stats) -> dict[str, Any]:
    counts = usage([stats])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }


def _places(stats: Stats) -> dict[str, Any]:
    return {"timings": timings(stats), "placement": placement(stats)}


def error_frames(error: RequestError) -> list[Frame]:
    """Return the event of an error in mid-stream; its field `error` makes clients raise it."""
    body = error_body(error)
    assert isinstance(body, Mapping)
    described = {"code": error.code or error.kind, "message": error.message, "param": error.param}
    return [Frame({"type": "error", **described, **body}, "error")]


ROUTES = (
    Route("/v1/responses", {"POST": responses}),
    Route("/responses", {"POST": responses}),
)
