"""OpenAI's `/v1/completions`: continues texts and, with `suffix`, fills gaps."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from edgellm.generation_options import GenerationArguments
from edgellm.results import Piece, Stats
from edgellm.serve.ask import Ask, AskedPrompt, Infill
from edgellm.serve.events import Begun, Delta, Event, PromptProgress
from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import Comment, Frame, Frames, Reply, json_reply
from edgellm.serve.openai.grammar import read_grammar
from edgellm.serve.openai.logprobs import completion_logprobs
from edgellm.serve.openai.sampling import (
    MOST_LOGPROBS,
    max_tokens,
    refuse_unsupported,
    sampling_arguments,
    unsupported,
)
from edgellm.serve.usage import finish_reason, placement, timings, usage
from edgellm.text.fim import Gap

MAX_PROMPTS = 256
_LARGEST_TOKEN = 2**31 - 1


async def completions(call: Call) -> Reply:
    fields = await call.fields()
    asked = read_completion(fields, max_n=call.answering.options.max_n)
    if fields.flag("stream"):
        await call.check_all(asked.asks)
        return call.stream(completion_frames(call.all_events(asked.asks), asked))
    return json_reply(await _whole(call, asked))


@dataclass(frozen=True, kw_only=True)
class AskedCompletion:
    """A parsed completion request: one ask for each prompt, and the form of the reply.

    Attributes:
        with_logprobs: whether the reply has the log probability of each token.
        with_usage: whether a stream ends with token counts.
    """

    asks: Sequence[Ask]
    with_logprobs: bool
    with_usage: bool

    @property
    def n(self) -> int:
        return self.asks[0].n


def read_completion(fields: Fields, *, max_n: int) -> AskedCompletion:
    """Read a completion request.

    Args:
        max_n: largest number of answers to one prompt.
    """
    if fields.flag("echo"):
        raise unsupported("echo", "put the prompt before the answer")
    refuse_unsupported(fields)
    n = fields.whole("n", 1, max_n) or 1
    if fields.whole("best_of", 1, n) not in (None, 1, n):
        raise fields.wrong("best_of", f"1 or `n`, which is {n}")
    arguments: GenerationArguments = {
        **sampling_arguments(fields),
        **max_tokens(fields, "max_tokens", "max_completion_tokens", "n_predict"),
    }
    logprobs = fields.whole("logprobs", 0, MOST_LOGPROBS)
    if logprobs:
        arguments["logprobs"] = logprobs
    prompts = read_prompts(fields)
    suffix = fields.text("suffix")
    if suffix:  # clients send "" for no suffix
        arguments.setdefault("temperature", 0.0)  # as in `LLM.infill`
        prompts = [_gap(fields, prompt, suffix) for prompt in prompts]
    grammar = read_grammar(fields)
    model = fields.text("model")
    stream_options = fields.object("stream_options") or Fields({})
    return AskedCompletion(
        asks=[
            Ask(model=model, prompt=prompt, arguments=arguments, n=n, grammar=grammar)
            for prompt in prompts
        ],
        with_logprobs=logprobs is not None,
        with_usage=bool(stream_options.flag("include_usage")),
    )


def read_prompts(fields: Fields, name: str = "prompt") -> list[AskedPrompt]:
    """Read prompts: a text, token ids, or a list of texts and lists of token ids."""
    value = fields.required(name, fields.get(name))
    if isinstance(value, str):
        return [value]
    allowed = f"a string, a list of token ids, or a list of at most {MAX_PROMPTS} of these"
    if not isinstance(value, list) or not value:
        raise fields.wrong(name, allowed)
    if all(_is_token(item) for item in value):
        return [tuple(value)]
    if len(value) > MAX_PROMPTS:
        raise fields.wrong(name, allowed)
    prompts: list[AskedPrompt] = []
    for item in value:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item and all(_is_token(each) for each in item):
            prompts.append(tuple(item))
        else:
            raise fields.wrong(name, allowed)
    return prompts


def _is_token(value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 0 <= value <= _LARGEST_TOKEN  # type: ignore[operator]


def _gap(fields: Fields, prompt: AskedPrompt, suffix: str) -> Infill:
    if not isinstance(prompt, str):
        raise fields.wrong("prompt", "a string, where there is a `suffix`")
    return Infill(gap=Gap(prefix=prompt, suffix=suffix))


async def _whole(call: Call, asked: AskedCompletion) -> dict[str, Any]:
    answers = await call.all_answers(asked.asks)
    begun, _ = answers[0]
    stats = [[answer.stats for answer in of_one] for _, of_one in answers]
    flat = [answer for _, of_one in answers for answer in of_one]
    return _Identity(begun.model).object(
        [
            _choice(
                index,
                answer.text,
                finish_reason(answer.finish_reason),
                _logprobs(begun, answer.pieces, asked),
            )
            for index, answer in enumerate(flat)
        ],
        usage=summed_usage(stats),
        timings=timings(stats[0][0]),
        placement=placement(stats[0][0]),
    )


def summed_usage(stats: Sequence[Sequence[Stats]]) -> dict[str, Any]:
    """Return OpenAI's `usage` object summed over several prompts, each with its answers."""
    each = [usage(of_one) for of_one in stats]
    total = {
        key: sum(one[key] for one in each)
        for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in each)
    return {**total, "prompt_tokens_details": {"cached_tokens": cached}}


def _logprobs(
    begun: Begun, pieces: Sequence[Piece], asked: AskedCompletion, *, offset: int = 0
) -> dict[str, Any] | None:
    if not asked.with_logprobs:
        return None
    return completion_logprobs(begun.engine.tokenizer, pieces, offset=offset)


def _choice(
    index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


@dataclass
class _Identity:
    """Fields that all objects of one completion reply share."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": "edgellm",
            "choices": choices,
            **more,
        }


async def completion_frames(
    events: AsyncGenerator[tuple[int, Event], None], asked: AskedCompletion
) -> Frames:
    """Convert the events of all asks to chunks of a completion reply."""
    identity: _Identity | None = None
    begun: dict[int, Begun] = {}
    stats: list[list[Stats]] = [[] for _ in asked.asks]
    shown: dict[int, int] = {}  # characters of each choice's text
    async with aclosing(events):
        async for number, event in events:
            if isinstance(event, Begun):
                begun[number] = event
                if identity is None:
                    identity = _Identity(event.model)
                yield Comment("")  # the reply begins
                continue
            if isinstance(event, PromptProgress):
                yield Comment(f"prompt {event.done}/{event.total}")
                continue
            assert identity is not None
            index = number * asked.n + event.sample
            if isinstance(event, Delta):
                offset = shown.get(index, 0)
                shown[index] = offset + len(event.text)
                logprobs = _logprobs(begun[number], event.pieces, asked, offset=offset)
                if event.text or logprobs is not None:
                    choice = _choice(index, event.text, None, logprobs)
                    yield Frame(identity.object([choice]))
            else:
                stats[number].append(event.stats)
                choice = _choice(index, "", finish_reason(event.finish_reason), None)
                yield Frame(
                    identity.object(
                        [choice], timings=timings(event.stats), placement=placement(event.stats)
                    )
                )
    if asked.with_usage and identity is not None:
        yield Frame(identity.object([], usage=summed_usage(stats)))
    yield Frame("[DONE]")


ROUTES = (Route("/v1/completions", {"POST": completions}),)
