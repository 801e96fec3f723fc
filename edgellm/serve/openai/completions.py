"""OpenAI's `/v1/completions`: continues texts and, with `suffix`, fills gaps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edgellm.generation_options import GenerationArguments
from edgellm.results import Piece, Stats
from edgellm.serve.ask import Ask, AskedPrompt, Infill
from edgellm.serve.events import Begun, Delta, Event, PromptProgress
from edgellm.serve.http.endpoint import Answered, Call, Route
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import Comment, Frame, Frames, Reply, json_reply
from edgellm.serve.openai.chat import Identity
from edgellm.serve.openai.grammar import read_grammar
from edgellm.serve.openai.logprobs import completion_logprobs, prompt_logprobs
from edgellm.serve.openai.sampling import (
    MOST_LOGPROBS,
    max_tokens,
    refuse_unsupported,
    sampling_arguments,
    unsupported,
)
from edgellm.serve.usage import FINISH, placement, timings, usage
from edgellm.text.fim import Gap

MAX_PROMPTS = 256
_LARGEST_TOKEN = 2**31 - 1


async def completions(call: Call) -> Reply:
    fields = await call.fields()
    asked = read_completion(fields, max_n=call.answering.options.max_n)
    if fields.flag("stream"):
        await call.check_all(asked.asks)
        return call.stream(completion_frames(call.all_events(asked.asks), asked))
    answers = await call.all_answers(asked.asks)
    if any(ask.arguments.get("prompt_logprobs") is not None for ask in asked.asks):
        # half a million scores take a second
        return await asyncio.to_thread(lambda: json_reply(_whole(answers, asked)))
    return json_reply(_whole(answers, asked))


@dataclass(frozen=True, kw_only=True)
class AskedCompletion:
    """A parsed completion request: one ask for each prompt, and the form of the reply.

    Attributes:
        with_logprobs: whether the reply has the log probability of each token.
        echo: whether the prompt comes before each answer, with its log probabilities.
        with_prompt_logprobs: whether the reply has those of the prompt in vLLM's form.
        with_usage: whether a stream ends with token counts.
    """

    asks: Sequence[Ask]
    with_logprobs: bool
    with_usage: bool
    echo: bool
    with_prompt_logprobs: bool

    @property
    def n(self) -> int:
        return self.asks[0].n


def read_completion(fields: Fields, *, max_n: int) -> AskedCompletion:
    """Read a completion request.

    Args:
        max_n: largest number of answers to one prompt.
    """
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
    echo, of_prompt = bool(fields.flag("echo")), _prompt_logprobs(fields)
    if (echo and logprobs is not None) or of_prompt is not None:
        arguments["prompt_logprobs"] = max(logprobs or 0, of_prompt or 0)
    prompts = read_prompts(fields)
    suffix = fields.text("suffix")
    if suffix and echo:
        raise unsupported("echo", "leave out `suffix`")
    if suffix:  # clients send "" for no suffix
        arguments.setdefault("temperature", 0.0)  # as in `LLM.infill`
        prompts = [_gap(fields, prompt, suffix) for prompt in prompts]
    grammar = read_grammar(fields)
    model = fields.text("model")
    stream_options = fields.object("stream_options") or Fields({})
    return AskedCompletion(
        asks=[
            Ask(
                model=model,
                prompt=prompt,
                arguments=arguments,
                n=n,
                of=len(prompts),
                grammar=grammar,
            )
            for prompt in prompts
        ],
        with_logprobs=logprobs is not None,
        with_usage=bool(stream_options.flag("include_usage")),
        echo=echo,
        with_prompt_logprobs=of_prompt is not None,
    )


def _prompt_logprobs(fields: Fields) -> int | None:
    """Read vLLM's `prompt_logprobs`; None if they are not asked for.

    Raises:
        RequestError: they are asked for in a stream, which has no place for them.
    """
    count = fields.whole("prompt_logprobs", 0, MOST_LOGPROBS)
    if count is not None and fields.flag("stream"):
        raise fields.wrong("prompt_logprobs", "null where `stream` is true; `echo` works there")
    return count


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


def _whole(
    answers: Sequence[tuple[Begun, list[Answered]]], asked: AskedCompletion
) -> dict[str, Any]:
    begun, _ = answers[0]
    stats = [[answer.stats for answer in of_one] for _, of_one in answers]
    choices: list[dict[str, Any]] = []
    for ask, (of_ask, of_one) in zip(asked.asks, answers, strict=True):
        scores = [piece for piece in of_one[0].pieces if piece.prompt_logprobs]
        prompt = _prompt_text(of_ask, ask) if asked.echo else ""
        for answer in of_one:
            sampled = [piece for piece in answer.pieces if not piece.prompt_logprobs]
            choice = _choice(
                len(choices),
                prompt + answer.text,
                FINISH[answer.finish_reason],
                _logprobs(of_ask, [*scores, *sampled], asked),
            )
            if asked.with_prompt_logprobs:
                scored = [each for piece in scores for each in piece.prompt_logprobs]
                choice["prompt_logprobs"] = prompt_logprobs(of_ask.engine.tokenizer, scored)
            choices.append(choice)
    return Identity(begun.model, "cmpl").object(
        "text_completion",
        choices,
        usage=summed_usage(stats),
        timings=timings(stats[0][0]),
        placement=placement(stats[0][0]),
    )


def _prompt_text(begun: Begun, ask: Ask) -> str:
    if isinstance(ask.prompt, str):
        return ask.prompt
    return begun.engine.tokenizer.decode(begun.prompt, skip_special=False)


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
    tokenizer = begun.engine.tokenizer
    return completion_logprobs(tokenizer, pieces, echo=asked.echo, offset=offset)


def _choice(
    index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def completion_frames(
    events: AsyncGenerator[tuple[int, Event], None], asked: AskedCompletion
) -> Frames:
    """Convert the events of all asks to chunks of a completion reply."""
    identity: Identity | None = None
    begun: dict[int, Begun] = {}
    stats: list[list[Stats]] = [[] for _ in asked.asks]
    shown: dict[int, int] = {}  # characters of each choice's text
    unscored: set[int] = set()  # prompts that are echoed once their scores are known
    echoed: dict[int, int] = {}  # characters of each prompt, where it is part of the text
    async with aclosing(_scores_first(events)) as ordered:
        async for number, event in ordered:
            if isinstance(event, Begun):
                begun[number] = event
                if identity is None:
                    identity = Identity(event.model, "cmpl")
                yield Comment("")  # the reply begins
                if asked.echo:
                    echoed[number] = len(_prompt_text(event, asked.asks[number]))
                if asked.echo and asked.with_logprobs:
                    unscored.add(number)
                elif asked.echo:
                    for frame in _echoed(identity, number, event, asked, ()):
                        yield frame
                continue
            if isinstance(event, PromptProgress):
                yield Comment(f"prompt {event.done}/{event.total}")
                continue
            assert identity is not None
            index = number * asked.n + event.sample
            if number in unscored and event.sample == 0:
                unscored.remove(number)
                pieces = event.pieces if isinstance(event, Delta) else ()
                scores = [piece for piece in pieces if piece.prompt_logprobs]
                # half a million scores take a second
                echoes = partial(_echoed, identity, number, begun[number], asked, scores)
                for frame in await asyncio.to_thread(echoes):
                    yield frame
            if isinstance(event, Delta):
                event = replace(event, pieces=tuple(p for p in event.pieces if p.token is not None))
            if isinstance(event, Delta):
                offset = shown.get(index, echoed.get(number, 0))
                shown[index] = offset + len(event.text)
                logprobs = _logprobs(begun[number], event.pieces, asked, offset=offset)
                if event.text or event.pieces:
                    choice = _choice(index, event.text, None, logprobs)
                    yield Frame(identity.object("text_completion", [choice]))
            else:
                stats[number].append(event.stats)
                choice = _choice(index, "", FINISH[event.finish_reason], None)
                yield Frame(
                    identity.object(
                        "text_completion",
                        [choice],
                        timings=timings(event.stats),
                        placement=placement(event.stats),
                    )
                )
    if asked.with_usage and identity is not None:
        yield Frame(identity.object("text_completion", [], usage=summed_usage(stats)))
    yield Frame("[DONE]")


async def _scores_first(
    events: AsyncGenerator[tuple[int, Event], None],
) -> AsyncGenerator[tuple[int, Event], None]:
    """Put events of a prompt's first answer, which begin with its scores, before the others'."""
    held: dict[int, list[Event]] = {}
    async with aclosing(events):
        async for number, event in events:
            if isinstance(event, Begun):
                held[number] = []
            if number not in held or isinstance(event, Begun | PromptProgress):
                yield number, event
            elif event.sample == 0:
                yield number, event
                for later in held.pop(number):
                    yield number, later
            else:
                held[number].append(event)


def _echoed(
    identity: Identity, number: int, begun: Begun, asked: AskedCompletion, scores: Sequence[Piece]
) -> list[Frame]:
    """Return a chunk with the prompt for each answer of an ask."""
    text = _prompt_text(begun, asked.asks[number])
    logprobs = _logprobs(begun, scores, asked)
    return [
        Frame(identity.object("text_completion", [_choice(index, text, None, logprobs)]))
        for index in range(number * asked.n, (number + 1) * asked.n)
    ]


ROUTES = (Route("/v1/completions", {"POST": completions}),)
