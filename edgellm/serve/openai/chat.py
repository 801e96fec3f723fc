"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from edgellm.generation_options import GenerationArguments
from edgellm.results import Piece, Stats
from edgellm.serve.ask import Ask
from edgellm.serve.events import Begun, Delta, End, Event, PromptProgress
from edgellm.serve.http.endpoint import Answered, Call, Route, framed
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import Comment, Frame, Reply, json_reply
from edgellm.serve.openai.grammar import read_grammar
from edgellm.serve.openai.logprobs import chat_logprobs
from edgellm.serve.openai.messages import read_conversation
from edgellm.serve.openai.sampling import (
    MOST_LOGPROBS,
    max_tokens,
    refuse_unsupported,
    sampling_arguments,
)
from edgellm.serve.request_error import RequestError
from edgellm.serve.usage import FINISH, placement, reasoning_tokens, timings, usage
from edgellm.tool_use import ToolCallDelta


async def chat_completions(call: Call) -> Reply:
    fields = await call.fields()
    asked = read_chat(fields, max_n=call.answering.options.max_n)
    if fields.flag("stream"):
        chunks = _Chunks(asked)
        return call.stream(framed(call.events(asked.ask), chunks.of, chunks.last))
    begun, answers = await call.answers(asked.ask)
    return json_reply(chat_object(begun, answers, asked))


@dataclass(frozen=True, kw_only=True)
class AskedChat:
    """A parsed chat request: its ask, and the form of its reply.

    Attributes:
        with_logprobs: whether the reply has the log probability of each token.
        with_usage: whether a stream ends with token counts.
        usage_always: whether each chunk of a stream has token counts.
    """

    ask: Ask
    with_logprobs: bool = False
    with_usage: bool = False
    usage_always: bool = False


def read_chat(fields: Fields, *, max_n: int) -> AskedChat:
    """Read a chat request.

    Args:
        max_n: largest number of answers.
    """
    refuse_unsupported(fields)
    with_logprobs = bool(fields.flag("logprobs"))
    arguments: GenerationArguments = {
        **sampling_arguments(fields),
        **max_tokens(fields, "max_completion_tokens", "max_tokens", "n_predict"),
    }
    top = fields.whole("top_logprobs", 0, MOST_LOGPROBS)
    if top is not None and not with_logprobs:
        raise RequestError(
            "invalid_request", "`top_logprobs` needs `logprobs`: true", param="top_logprobs"
        )
    if top:
        arguments["logprobs"] = top
    stream_options = fields.object("stream_options") or Fields({})
    return AskedChat(
        ask=Ask(
            model=fields.text("model"),
            prompt=read_conversation(fields),
            arguments=arguments,
            n=fields.whole("n", 1, max_n) or 1,
            grammar=read_grammar(fields),
        ),
        with_logprobs=with_logprobs,
        with_usage=bool(stream_options.flag("include_usage")),
        usage_always=bool(stream_options.flag("continuous_usage_stats")),
    )


def chat_object(begun: Begun, answers: list[Answered], asked: AskedChat) -> dict[str, Any]:
    stats = [answer.stats for answer in answers]
    return Identity(begun.model).object(
        "chat.completion",
        [
            {
                "index": index,
                "message": _message(answer),
                "logprobs": _logprobs(begun, answer.pieces, asked),
                "finish_reason": FINISH[answer.finish_reason],
            }
            for index, answer in enumerate(answers)
        ],
        usage=usage(
            stats, reasoning_tokens=sum(reasoning_tokens(answer.pieces) for answer in answers)
        ),
        timings=timings(stats[0]),
        placement=placement(stats[0]),
    )


def _message(answer: Answered) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message |= _reasoning(answer.reasoning)
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [call.to_json() for call in answer.calls]
    return message


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning text under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _logprobs(begun: Begun, pieces: Iterable[Piece], asked: AskedChat) -> dict[str, Any] | None:
    if not asked.with_logprobs:
        return None
    return chat_logprobs(begun.engine.tokenizer, pieces)


@dataclass
class Identity:
    """Fields that all objects of one reply share."""

    model: str
    prefix: str = "chatcmpl"
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": "edgellm",
            "choices": choices,
            **more,
        }


class _Chunks:
    """Chunks of a streamed chat reply."""

    _begun: Begun
    _identity: Identity

    def __init__(self, asked: AskedChat) -> None:
        self._asked = asked
        self._shown: set[int] = set()
        self._generated = self._thoughts = 0
        self._ended: list[Stats] = []

    def of(self, event: Event) -> list[Frame | Comment]:
        if isinstance(event, Begun):
            self._begun, self._identity = event, Identity(event.model)
            return [Comment("")]  # the reply begins
        if isinstance(event, PromptProgress):
            return []
        frames: list[Frame | Comment] = []
        if event.sample not in self._shown:
            self._shown.add(event.sample)
            frames.append(self._chunk(event.sample, {"role": "assistant", "content": ""}))
        return [*frames, *(self._delta(event) if isinstance(event, Delta) else [self._end(event)])]

    def last(self) -> list[Frame]:
        """Return the end, behind a chunk without choices for the token counts of all answers."""
        done = Frame("[DONE]")
        if not self._asked.with_usage:
            return [done]
        counts = usage(self._ended, reasoning_tokens=self._thoughts)
        return [Frame(self._identity.object("chat.completion.chunk", [], usage=counts)), done]

    def _delta(self, event: Delta) -> list[Frame]:
        self._thoughts += reasoning_tokens(event.pieces)
        self._generated += sum(piece.token is not None for piece in event.pieces)
        deltas: list[dict[str, Any]] = []
        if event.reasoning:
            deltas.append(_reasoning(event.reasoning))
        if event.text:
            deltas.append({"content": event.text})
        for call in event.calls:
            deltas.append({"tool_calls": [call_delta(call)]})
        logprobs = _logprobs(self._begun, event.pieces, self._asked)
        if not deltas and logprobs is not None:
            deltas.append({"content": ""})
        frames = []
        for i, delta in enumerate(deltas):
            frames.append(self._chunk(event.sample, delta, logprobs=None if i else logprobs))
        return frames

    def _end(self, event: End) -> Frame:
        self._ended.append(event.stats)
        return self._chunk(
            event.sample,
            {},
            FINISH[event.finish_reason],
            timings=timings(event.stats),
            placement=placement(event.stats),
        )

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
        **more: Any,
    ) -> Frame:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if self._asked.usage_always:
            prompt = len(self._begun.prompt)
            more["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": self._generated,
                "total_tokens": prompt + self._generated,
            }
        return Frame(self._identity.object("chat.completion.chunk", [choice], **more))


def call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """Return a part of a tool call: its name first, then its arguments as they come."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


ROUTES = (
    Route("/v1/chat/completions", {"POST": chat_completions}),
    Route("/chat/completions", {"POST": chat_completions}),
)
