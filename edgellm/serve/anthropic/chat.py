"""Anthropic's `/v1/messages`."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from edgellm.generation_options import GenerationArguments
from edgellm.results import Stats
from edgellm.serve.anthropic.messages import read_conversation
from edgellm.serve.ask import Ask, asked_prompt
from edgellm.serve.events import Begun, Delta, End, Event, PromptProgress
from edgellm.serve.http.endpoint import Call, Route, framed
from edgellm.serve.http.fields import MAX_STOPS, Fields
from edgellm.serve.http.streaming import Comment, Frame, Frames, Reply, json_reply
from edgellm.serve.openai.sampling import MOST_TOKENS, sampling_arguments, stop_texts
from edgellm.serve.usage import placement, timings
from edgellm.text.grammar import Grammar
from edgellm.tool_use import ToolCallDelta


async def messages(call: Call) -> Reply:
    fields = await call.fields()
    ask = read_ask(fields)
    if fields.flag("stream"):
        return call.stream(message_frames(call.events(ask), ask), beat=_BEAT)
    return json_reply(await _whole(call, ask))


async def count_tokens(call: Call) -> Reply:
    """Count a conversation's tokens with the template and tokenizer of the request's model."""
    ask = read_ask(await call.fields(), counts=True)
    async with call.answering.pool.use(ask.model) as llm:
        prompt = await call.answering.text_work.call(
            partial(asked_prompt, llm, ask.model or "", ask)
        )
    return json_reply({"input_tokens": len(prompt.tokens)})


def read_ask(fields: Fields, *, counts: bool = False) -> Ask:
    """Read the ask of a request.

    Args:
        counts: whether only the prompt's tokens are to be counted; then `max_tokens` may be
            missing.
    """
    arguments: GenerationArguments = sampling_arguments(fields)
    limit = fields.whole("max_tokens", 0, MOST_TOKENS)
    if not counts:
        fields.required("max_tokens", limit)
    arguments["max_tokens"] = limit
    stops = fields.texts("stop_sequences", MAX_STOPS)
    if stops:
        arguments["stop"] = stop_texts(fields, stops)
    return Ask(
        model=fields.text("model"),
        prompt=read_conversation(fields),
        arguments=arguments,
        grammar=_grammar(fields),
    )


def _grammar(fields: Fields) -> Grammar | None:
    """Read the JSON schema of `output_config.format` or of the older `output_format`."""
    config = fields.object("output_config") or Fields({})
    wanted = config.object("format") or fields.object("output_format")
    if wanted is None:
        return None
    wanted.choice("type", ("json_schema",))
    return Grammar("json_schema", json.dumps(wanted.required_object("schema").values))


async def _whole(call: Call, ask: Ask) -> dict[str, Any]:
    """Answer an ask with one message, put together from the frames of a stream."""
    message: dict[str, Any] = {}
    parts: list[str] = []
    async with aclosing(message_frames(call.events(ask), ask)) as frames:
        async for frame in frames:
            if isinstance(frame, Comment):
                continue
            event = frame.data
            assert isinstance(event, dict)
            if event["type"] == "message_start":
                message = event["message"]
            elif event["type"] == "content_block_start":
                message["content"].append(event["content_block"])
                parts = []
            elif event["type"] == "content_block_delta":
                parts += [text for key, text in event["delta"].items() if key != "type"]
            elif event["type"] == "content_block_stop":
                _fill(message["content"][-1], "".join(parts))
            elif event["type"] == "message_delta":
                told = {name: event[name] for name in ("usage", "timings", "placement")}
                message |= {**event["delta"], **told}
    return message


def _fill(block: dict[str, Any], text: str) -> None:
    """Put the joined text of its deltas into a content block."""
    if block["type"] != "tool_use":
        block[block["type"]] = text
        return
    try:
        arguments = json.loads(text or "{}")
    except ValueError:  # cut off by a limit
        arguments = {}
    block["input"] = arguments if isinstance(arguments, dict) else {}


def message_frames(events: AsyncGenerator[Event, None], ask: Ask) -> Frames:
    return framed(events, _MessageFrames(ask).of)


class _MessageFrames:
    """Frames of a message: content blocks one after the other, each begun and ended."""

    _begun: Begun

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._blocks = 0
        self._open: str | None = None  # the type of the block that is open
        self._stop_text: str | None = None

    def _begin(self, begun: Begun) -> list[Frame]:
        """Return the frames before prefill; only the last usage tells cached tokens apart."""
        self._begun = begun
        message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self._ask.model or begun.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(begun.prompt),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        }
        return [_frame("message_start", message=message), _frame("ping")]

    def of(self, event: Event) -> list[Frame]:
        if isinstance(event, Begun):
            return self._begin(event)
        if isinstance(event, PromptProgress):
            return []
        return self._delta(event) if isinstance(event, Delta) else self._end(event)

    def _delta(self, event: Delta) -> list[Frame]:
        if event.pieces:
            self._stop_text = event.pieces[-1].stop_text
        frames = []
        if event.reasoning:
            frames += self._begin_block("thinking", {"thinking": "", "signature": ""})
            frames.append(self._block_delta("thinking_delta", thinking=event.reasoning))
        if event.text:
            frames += self._begin_block("text", {"text": ""})
            frames.append(self._block_delta("text_delta", text=event.text))
        for call in event.calls:
            frames += self._call(call)
        return frames

    def _call(self, call: ToolCallDelta) -> list[Frame]:
        if call.name is None:
            return [self._block_delta("input_json_delta", partial_json=call.arguments)]
        fields: dict[str, Any] = {"id": call.id, "name": call.name, "input": {}}
        return [*self._end_block(), *self._begin_block("tool_use", fields)]

    def _begin_block(self, kind: str, fields: dict[str, Any]) -> list[Frame]:
        """Begin a content block, unless one of this type is open."""
        if self._open == kind:
            return []
        frames = self._end_block()
        self._open = kind
        block = {"type": kind, **fields}
        return [*frames, self._block("content_block_start", content_block=block)]

    def _end_block(self) -> list[Frame]:
        """End the open content block, if there is one."""
        if self._open is None:
            return []
        frames = [self._block("content_block_stop")]
        self._open = None
        self._blocks += 1
        return frames

    def _block_delta(self, kind: str, **fields: str) -> Frame:
        return self._block("content_block_delta", delta={"type": kind, **fields})

    def _block(self, kind: str, **fields: Any) -> Frame:
        return _frame(kind, index=self._blocks, **fields)

    def _end(self, event: End) -> list[Frame]:
        stop = self._stop_text if event.finish_reason == "stop" else None
        delta = {"stop_reason": self._reason(event, stop), "stop_sequence": stop}
        return [
            *self._end_block(),
            _frame(
                "message_delta",
                delta=delta,
                usage=_usage(event.stats),
                timings=timings(event.stats),
                placement=placement(event.stats),
            ),
            _frame("message_stop"),
        ]

    def _reason(self, event: End, stop: str | None) -> str:
        if event.finish_reason == "tool_calls":
            return "tool_use"
        if event.finish_reason == "stop":
            return "end_turn" if stop is None else "stop_sequence"
        limit = self._begun.options.max_tokens
        full = limit is None or event.stats.generation_tokens < limit
        if event.finish_reason == "length" and full:
            return "model_context_window_exceeded"
        return "max_tokens"


def _usage(stats: Stats) -> dict[str, int]:
    """Return Anthropic's `usage`, which counts cached prompt tokens apart from the others."""
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.generation_tokens,
    }


def _frame(kind: str, **fields: Any) -> Frame:
    return Frame({"type": kind, **fields}, kind)


# Claude Code leaves a stream after 300 s without an event, and its SDK drops comments and pings.
# This event changes nothing of a message: its values are those that the message begins with.
_BEAT = _frame(
    "message_delta",
    delta={"stop_reason": None, "stop_sequence": None},
    usage={"output_tokens": 0},
)

ROUTES = (
    Route("/v1/messages", {"POST": messages}),
    Route("/v1/messages/count_tokens", {"POST": count_tokens}),
)
