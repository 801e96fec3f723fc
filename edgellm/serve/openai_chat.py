"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from edgellm.results import Stats
from edgellm.serve.answering import Begun, Delta, End, Event, PromptProgress
from edgellm.serve.ask import Ask, Conversation
from edgellm.serve.body import Fields
from edgellm.serve.endpoint import Answered, Call, Route
from edgellm.serve.openai_messages import read_messages
from edgellm.serve.openai_sampling import max_tokens, sampling_arguments
from edgellm.serve.request_error import RequestError
from edgellm.serve.streaming import Comment, Frame, Frames, Reply, json_reply
from edgellm.serve.usage import finish_reason, placement, timings, usage


async def chat_completions(call: Call) -> Reply:
    fields = await call.fields()
    ask = read_ask(fields, max_n=call.answering.options.max_n)
    if fields.flag("stream"):
        stream_options = fields.object("stream_options") or Fields({})
        with_usage = bool(stream_options.flag("include_usage"))
        return call.stream(chat_frames(call.events(ask), with_usage=with_usage))
    begun, answers = await call.answers(ask)
    return json_reply(chat_object(begun, answers))


def read_ask(fields: Fields, *, max_n: int) -> Ask:
    """What is asked for."""
    messages = read_messages(fields)
    n = fields.whole("n", 1, max_n) or 1
    return Ask(
        model=fields.text("model"),
        prompt=Conversation(messages=messages),
        arguments={
            **sampling_arguments(fields),
            **max_tokens(fields, "max_completion_tokens", "max_tokens", "n_predict"),
        },
        n=n,
        json_schema=read_schema(fields),
    )


def read_schema(fields: Fields) -> str | None:
    """The JSON schema of `response_format`, as text."""
    wanted = fields.object("response_format")
    if wanted is None:
        return None
    kind = wanted.choice("type", ("text", "json_object", "json_schema"))
    if kind == "json_object":
        schema = wanted.object("schema")  # llama.cpp's
        return json.dumps({"type": "object"} if schema is None else schema.values)
    if kind != "json_schema":
        return None
    given = wanted.object("json_schema")
    schema = None if given is None else given.object("schema")
    if schema is None:
        raise RequestError(
            "invalid_request",
            "`response_format.json_schema.schema` is missing",
            param="response_format",
        )
    return json.dumps(schema.values)


@dataclass
class _Identity:
    """What all objects of one reply have in common."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def chat_object(begun: Begun, answers: list[Answered]) -> dict[str, Any]:
    """All answers as one object."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None,
            "finish_reason": finish_reason(answer.finish_reason),
        }
        for index, answer in enumerate(answers)
    ]
    stats = [answer.stats for answer in answers]
    return _Identity(begun.model).object(
        "chat.completion",
        choices,
        usage=usage(stats),
        timings=timings(stats[0]),
        placement=placement(stats[0]),
    )


async def chat_frames(events: AsyncGenerator[Event, None], *, with_usage: bool) -> Frames:
    """The events of an ask as chunks."""
    identity = _Identity("")
    ended: list[Stats] = []

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> Frame:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return Frame(identity.object("chat.completion.chunk", [choice], **more))

    begun: set[int] = set()
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Begun):
                identity = _Identity(event.model)
                yield Comment("begun")
            elif isinstance(event, PromptProgress):
                yield Comment(f"prompt {event.done}/{event.total}")
            else:
                if event.sample not in begun:
                    begun.add(event.sample)
                    yield chunk(event.sample, {"role": "assistant", "content": ""})
                if isinstance(event, Delta) and event.text:
                    yield chunk(event.sample, {"content": event.text})
                if isinstance(event, End):
                    ended.append(event.stats)
                    yield chunk(
                        event.sample,
                        {},
                        finish_reason(event.finish_reason),
                        timings=timings(event.stats),
                        placement=placement(event.stats),
                    )
    if with_usage:
        yield Frame(identity.object("chat.completion.chunk", [], usage=usage(ended)))
    yield Frame("[DONE]")


ROUTES = (
    Route("/v1/chat/completions", {"POST": chat_completions}),
    Route("/chat/completions", {"POST": chat_completions}),
)
