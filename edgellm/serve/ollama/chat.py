"""Ollama's `/api/chat` and `/api/generate`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from edgellm.results import Piece
from edgellm.serve.ask import Ask, AskedPrompt, Conversation, Infill
from edgellm.serve.events import Begun, Delta, End
from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import Comment, Frame, Frames, Reply, json_reply
from edgellm.serve.ollama.messages import (
    CallCollector,
    generation_arguments,
    read_conversation,
    read_format,
    read_keep_alive,
    refuse,
    refuse_images,
    thinking_hints,
)
from edgellm.serve.ollama.models import now, usable_model
from edgellm.serve.openai.logprobs import chat_logprobs
from edgellm.serve.usage import FINISH, placement, timings
from edgellm.text.fim import Gap
from edgellm.text.prompt import Message

_NO_TEMPLATE = "the model's own is used; for a prompt as it is there is `raw`"
_NO_CONTEXT = "send the conversation to /api/chat"


async def generate(call: Call) -> Reply:
    fields = await call.fields()
    asked = _Asked(fields, "response")
    prompt = await _prompt(call, fields)
    return await _load(call, asked) if prompt is None else await _answer(call, asked, prompt)


async def chat(call: Call) -> Reply:
    fields = await call.fields()
    asked = _Asked(fields, "message")
    conversation = read_conversation(fields)
    if not conversation.messages:
        return await _load(call, asked)
    wanted = ["thinking"] if fields.get("think") else []
    if conversation.tools and conversation.tool_choice == "auto":
        wanted.append("tools")
    if wanted:
        await usable_model(call, asked.model, wanted)
    return await _answer(call, asked, conversation)


class _Asked:
    """Fields of a request beside its prompt, and the form of its reply.

    Attributes:
        started: time of arrival, on the clock of `time.perf_counter`.
        told_as: field of the reply that has the answer's text.
        keep_alive_s: seconds that the model is to stay loaded; see `read_keep_alive`.
    """

    def __init__(self, fields: Fields, told_as: Literal["response", "message"]) -> None:
        self.started = time.perf_counter()
        self.told_as = told_as
        self.model = fields.text("model")
        self.arguments = generation_arguments(fields)
        self.grammar = read_format(fields)
        self.with_logprobs = bool(fields.flag("logprobs"))
        self.keep_alive_s = read_keep_alive(fields)
        self.streams = fields.flag("stream") is not False

    def object(self, id: str, part: _Part, **more: Any) -> dict[str, Any]:
        """Return a line of the stream, or the whole reply.

        Args:
            id: id of the model, shown where the client named none.
        """
        value: dict[str, Any] = {"model": self.model or id, "created_at": now()}
        if self.told_as == "response":
            value["response"] = part.text
            if part.reasoning:
                value["thinking"] = part.reasoning
        else:
            message: dict[str, Any] = {"role": "assistant", "content": part.text}
            if part.reasoning:
                message["thinking"] = part.reasoning
            if part.calls:
                message["tool_calls"] = part.calls
            value["message"] = message
        if part.logprobs is not None:
            value["logprobs"] = part.logprobs
        return {**value, **more}


@dataclass
class _Part:
    """A part of an answer, or the whole answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.logprobs)

    def add(self, other: _Part) -> None:
        """Append the part that follows this one."""
        self.text += other.text
        self.reasoning += other.reasoning
        self.calls += other.calls
        if other.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *other.logprobs]


async def _prompt(call: Call, fields: Fields) -> AskedPrompt | None:
    """Read the prompt of `/api/generate`; None: the model is only to be loaded or unloaded.

    Raises:
        RequestError: a field is not supported, or the model cannot do what the request asks for.
    """
    refuse_images(fields)
    refuse(fields, "template", _NO_TEMPLATE)
    refuse(fields, "context", _NO_CONTEXT)
    model, system = fields.text("model"), fields.text("system")
    prompt, suffix = fields.text("prompt") or "", fields.text("suffix")
    raw, hints = fields.flag("raw"), thinking_hints(fields)
    if suffix:
        refuse(fields, "system", "a gap is filled without instructions")
        await usable_model(call, model, ["insert"])
        return Infill(gap=Gap(prefix=prompt, suffix=suffix))
    if not prompt:
        return None
    if raw:
        refuse(fields, "system", "with `raw`, put it into the prompt")
        return prompt
    card = await usable_model(call, model, ["thinking"] if fields.get("think") else [])
    if not card.template and not system:
        return prompt  # as in Ollama, where a model without a template gets the prompt alone
    messages = [Message("system", system)] if system else []
    return Conversation(messages=(*messages, Message("user", prompt)), template_hints=hints)


async def _load(call: Call, asked: _Asked) -> Reply:
    """Load the model, or unload it if idle: the meaning of a request without a prompt."""
    pool = call.answering.pool
    id = pool.resolve(asked.model)
    if asked.keep_alive_s != 0:
        async with pool.use(id):
            pass
    _keep(call, asked)
    reason = "unload" if asked.keep_alive_s == 0 else "load"
    return json_reply(asked.object(id, _Part(), done=True, done_reason=reason))


def _keep(call: Call, asked: _Asked) -> None:
    call.answering.pool.keep(asked.model, asked.keep_alive_s)


async def _answer(call: Call, asked: _Asked, prompt: AskedPrompt) -> Reply:
    arguments = asked.arguments
    if isinstance(prompt, Infill):
        arguments = {"temperature": 0.0, **arguments}  # as in `LLM.infill`
    ask = Ask(
        model=asked.model,
        prompt=prompt,
        arguments=arguments,
        grammar=asked.grammar,
    )
    if asked.streams:
        return call.stream(_lines(call, asked, ask), format="lines")
    whole = _Part()
    async with aclosing(_parts(call, asked, ask)) as parts:
        async for model, part, more in parts:
            whole.add(part)
            value = asked.object(model, whole, **more)
    return json_reply(value)


async def _lines(call: Call, asked: _Asked, ask: Ask) -> Frames:
    async with aclosing(_parts(call, asked, ask)) as parts:
        async for model, part, more in parts:
            if part or more["done"]:
                yield Frame(asked.object(model, part, **more))
            else:
                yield Comment("")


async def _parts(
    call: Call, asked: _Asked, ask: Ask
) -> AsyncGenerator[tuple[str, _Part, dict[str, Any]], None]:
    """Answer an ask: yield the model's id, a part of the answer, and further fields of its line."""
    calls = CallCollector()
    try:
        async with aclosing(call.events(ask)) as events:
            async for event in events:
                if isinstance(event, Begun):
                    begun, loaded = event, time.perf_counter()
                    yield begun.model, _Part(), {"done": False}  # the reply begins
                elif isinstance(event, Delta):
                    complete, wrong = calls.add(event.calls)
                    part = _Part(event.text + wrong, event.reasoning, complete)
                    if asked.with_logprobs:
                        part.logprobs = _logprobs(begun, event.pieces)
                    yield begun.model, part, {"done": False}
                elif isinstance(event, End):
                    complete, wrong = calls.finish()
                    yield begun.model, _Part(wrong, calls=complete), {"done": False}
                    load_s = loaded - asked.started
                    yield begun.model, _Part(), {"done": True, **_counts(event, asked, load_s)}
    finally:
        _keep(call, asked)


def _logprobs(begun: Begun, pieces: tuple[Piece, ...]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = chat_logprobs(begun.engine.tokenizer, pieces)["content"]
    return content


def _counts(end: End, asked: _Asked, load_s: float) -> dict[str, Any]:
    """Return the last line's fields: finish reason, token counts, durations in ns, placement.

    `prompt_eval_count` counts the whole prompt, its tokens from the KV cache included.
    """
    times = timings(end.stats)
    called = end.finish_reason == "tool_calls"
    return {
        "done_reason": "stop" if called else FINISH[end.finish_reason],
        "total_duration": int((time.perf_counter() - asked.started) * 1e9),
        "load_duration": int(load_s * 1e9),
        "prompt_eval_count": end.stats.prompt_tokens,
        "prompt_eval_duration": int(times["prompt_ms"] * 1e6),
        "eval_count": end.stats.generation_tokens,
        # clients divide by it
        "eval_duration": max(1, int(times["predicted_ms"] * 1e6)),
        "placement": placement(end.stats),
    }


ROUTES = (
    Route("/api/generate", {"POST": generate}),
    Route("/api/chat", {"POST": chat}),
)
