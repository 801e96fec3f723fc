"""Mistral's `/v1/fim/completions`: fills gaps, and replies in the form of chats."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from edgellm.generation_options import GenerationArguments
from edgellm.serve.ask import Ask, Infill
from edgellm.serve.events import Begun, Delta, Event, PromptProgress
from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import Comment, Frame, Frames, Reply, json_reply
from edgellm.serve.openai.chat import AskedChat, ChatIdentity, chat_object
from edgellm.serve.openai.sampling import max_tokens, sampling_arguments
from edgellm.serve.usage import finish_reason, placement, timings, usage
from edgellm.text.fim import Gap


async def fim_completions(call: Call) -> Reply:
    fields = await call.fields()
    ask = read_fim(fields)
    if fields.flag("stream"):
        return call.stream(fim_frames(call.events(ask)))
    begun, answers = await call.answers(ask)
    return json_reply(chat_object(begun, answers, AskedChat(ask=ask)))


def read_fim(fields: Fields) -> Ask:
    """Read the ask of a request: greedy, as in `LLM.infill`, unless `temperature` is given."""
    arguments: GenerationArguments = {
        "temperature": 0.0,
        **sampling_arguments(fields),
        **max_tokens(fields, "max_tokens"),
    }
    seed = fields.whole("random_seed", 0, 2**64 - 1)
    if seed is not None:
        arguments["seed"] = seed
    gap = Gap(prefix=fields.required_text("prompt"), suffix=fields.text("suffix") or "")
    return Ask(model=fields.text("model"), prompt=Infill(gap=gap), arguments=arguments)


async def fim_frames(events: AsyncGenerator[Event, None]) -> Frames:
    """Convert an ask's events to chunks, all with a choice and a text: editors check neither."""
    identity: ChatIdentity | None = None
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Begun):
                identity = ChatIdentity(event.model)
                yield Comment("")  # the reply begins
                continue
            if isinstance(event, PromptProgress):
                yield Comment(f"prompt {event.done}/{event.total}")
                continue
            assert identity is not None
            if isinstance(event, Delta):
                if event.text:
                    yield _chunk(identity, event.text, None)
                continue
            yield _chunk(
                identity,
                "",
                finish_reason(event.finish_reason),
                usage=usage([event.stats]),
                timings=timings(event.stats),
                placement=placement(event.stats),
            )
    yield Frame("[DONE]")


def _chunk(identity: ChatIdentity, text: str, reason: str | None, **more: object) -> Frame:
    delta = {"role": "assistant", "content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return Frame(identity.object("chat.completion.chunk", [choice], **more))


ROUTES = (
    Route("/v1/fim/completions", {"POST": fim_completions}),
    Route("/fim/completions", {"POST": fim_completions}),
)
