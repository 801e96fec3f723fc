"""llama.cpp's `/completion` and `/infill`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from edgellm.generation_options import GenerationArguments
from edgellm.serve.ask import Ask, Infill
from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.fields import MAX_BIASES, Fields, shown
from edgellm.serve.http.streaming import Frames, Reply, json_reply
from edgellm.serve.llama_cpp.answer import Shown, frames, result_object
from edgellm.serve.llama_cpp.fields import (
    INT32_MAX,
    field_error,
    generation_arguments,
    hard,
    logit_bias,
    lora,
)
from edgellm.serve.llama_cpp.text import encode, model_id
from edgellm.serve.openai.messages import checked
from edgellm.serve.openai.sampling import sampler_names
from edgellm.serve.request_error import RequestError
from edgellm.text.fim import Gap
from edgellm.text.grammar import Grammar

# Limits of the prompts of a request, the other files of a gap, and the paths of `response_fields`.
_MOST_PROMPTS = 64
_MOST_CHUNKS = 1024
_MOST_PATHS = 256


@dataclass(frozen=True)
class _Wanted:
    """A parsed request: its asks, one for each prompt, and the form of their answers."""

    asks: list[Ask]
    shown: Shown
    stream: bool


async def completion(call: Call) -> Reply:
    fields = await call.fields()
    model = model_id(call, fields)
    prompts = await _prompts(call, model, fields)
    wanted = await _wanted(call, fields, model)
    (ask,) = wanted.asks
    return await _answer(call, replace(wanted, asks=[replace(ask, prompt=p) for p in prompts]))


async def infill(call: Call) -> Reply:
    """Fill a gap. Prefix, suffix and other files are cut to fit the context.

    The field `prompt` is the end of the prefix, which is not cut.
    """
    fields = await call.fields()
    extra = [
        (chunk.text("filename") or "tmp", chunk.required_text("text"))
        for chunk in fields.objects("input_extra", _MOST_CHUNKS)
    ]
    gap = Gap(
        prefix=fields.required_text("input_prefix"),
        suffix=fields.required_text("input_suffix"),
        tail=fields.text("prompt") or "",
        extra=extra,
        path="filename",
        repository="myproject" if extra else None,
    )
    wanted = await _wanted(call, fields, model_id(call, fields))
    (ask,) = wanted.asks
    return await _answer(
        call, replace(wanted, asks=[replace(ask, prompt=Infill(gap=gap, fitted=True))])
    )


async def _wanted(call: Call, fields: Fields, model: str) -> _Wanted:
    """Read all fields of a request but the prompt, which is left empty."""
    arguments = generation_arguments(fields)
    infills = apply_samplers(fields, arguments)
    bias = await _bias(call, model, logit_bias(fields))
    if bias:
        arguments = {**arguments, **bias}
    reuse = hard(fields, ("n_cache_reuse",), 0, INT32_MAX)
    n = hard(fields, ("n_cmpl", "n"), 1, call.answering.options.max_n) or 1
    ask = Ask(
        model=model,
        prompt="",
        arguments=arguments,
        n=n,
        grammar=_grammar(fields),
        infill_sampler=infills,
        lora=lora(fields),
        cache_reuse=call.answering.options.cache_reuse if reuse is None else reuse,
    )
    show = Shown(
        tokens=bool(fields.flag("return_tokens")),
        probabilities=arguments.get("logprobs", 0) > 0,
        progress=bool(fields.flag("return_progress")),
        timings=bool(fields.flag("timings_per_token")),
        fields=_paths(fields.get("response_fields")),
        id_slot=max(0, hard(fields, ("id_slot",), -1, INT32_MAX) or 0),
    )
    return _Wanted([ask], show, bool(fields.flag("stream")))


async def _answer(call: Call, wanted: _Wanted) -> Reply:
    if wanted.stream:
        await call.check_all(wanted.asks)
        return call.stream(_all_frames(call, wanted))
    results: list[dict[str, Any]] = []
    for begun, samples in await call.all_answers(wanted.asks):
        for answer in samples:
            results.append(result_object(begun, answer, wanted.shown, index=len(results)))
    return json_reply(results[0] if len(results) == 1 else results)


async def _all_frames(call: Call, wanted: _Wanted) -> Frames:
    """Yield the chunks of all answers, one prompt after the other."""
    for number, ask in enumerate(wanted.asks):
        first = number * ask.n
        async with aclosing(frames(call.events(ask), replace(wanted.shown, first=first))) as chunks:
            async for chunk in chunks:
                yield chunk


async def _prompts(call: Call, model: str, fields: Fields) -> list[str | tuple[int, ...]]:
    """Read the prompts: a text, a list of token ids and texts, or a list of such prompts."""
    given = fields.get("prompt")
    if given is None:
        raise RequestError("invalid_request", "Field 'prompt': it is missing", param="prompt")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise _not_a_prompt(given)
    if any(isinstance(part, int) for part in given):
        return [await _mixed(call, model, given)]
    if len(given) > _MOST_PROMPTS:
        raise field_error("prompt", f"{len(given)} prompts; at most {_MOST_PROMPTS} are allowed")
    return [
        prompt if isinstance(prompt, str) else await _mixed(call, model, prompt) for prompt in given
    ]


async def _mixed(call: Call, model: str, parts: Any) -> tuple[int, ...]:
    """Return the tokens of a list of token ids and texts; special tokens in texts are parsed."""
    if not isinstance(parts, list) or not parts:
        raise _not_a_prompt(parts)
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, str):
            tokens += await encode(call, model, part, add_bos=None if not tokens else False)
        elif isinstance(part, int) and not isinstance(part, bool) and 0 <= part <= INT32_MAX:
            tokens.append(part)
        else:
            raise _not_a_prompt(part)
    return tuple(tokens)


def _not_a_prompt(value: Any) -> RequestError:
    return field_error(
        "prompt",
        f"a text, a list of token ids and texts, or a list of those is expected, but got "
        f"{shown(value)}",
    )


async def _bias(
    call: Call, model: str, biases: Sequence[tuple[int | str, float]]
) -> GenerationArguments:
    """Return the bias of each token; a text means all its tokens, and repeated biases add up.

    Raises:
        RequestError: there are too many tokens, or one is not in the vocabulary.
    """
    values: dict[int, float] = {}
    for token, bias in biases:
        named = [token]
        if isinstance(token, str):
            named = [*await encode(call, model, token, add_bos=False, parse_special=False)]
        for each in named:
            assert isinstance(each, int)
            values[each] = values.get(each, 0.0) + bias
    if len(values) > MAX_BIASES:
        raise field_error(
            "logit_bias", f"{len(values)} tokens are meant; at most {MAX_BIASES} are allowed"
        )
    if values:
        async with call.answering.pool.use(model) as llm:
            size = llm.engine.config.vocab_size
        if max(values) >= size:
            raise field_error(
                "logit_bias", f"token {max(values)} is not in the vocabulary of {size}"
            )
    return {"logit_bias": values} if values else {}


def _grammar(fields: Fields) -> Grammar | None:
    schema, text = fields.object("json_schema"), fields.text("grammar")
    if schema is not None and text:
        raise field_error("grammar", "`json_schema` is given as well; leave one of them out")
    if schema is not None:
        return Grammar("json_schema", json.dumps(schema.values))
    return checked("grammar", lambda: Grammar.of(text)) if text else None


def _paths(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    right = isinstance(given, list) and all(isinstance(path, str) for path in given)
    if not right or len(given) > _MOST_PATHS:
        raise field_error("response_fields", f"a list of paths is expected, but got {shown(given)}")
    return tuple(given)


ROUTES = (
    Route("/completion", {"POST": completion}),
    Route("/completions", {"POST": completion}),
    Route("/infill", {"POST": infill}),
)


# Samplers that come before `infill`, which is a filter of the logits, and after it.
_BEFORE_INFILL, _BEHIND_INFILL = {"penalties", "top_k", "top_p", "min_p"}, {"temperature"}


def apply_samplers(fields: Fields, arguments: GenerationArguments) -> bool:
    """Put the listed samplers into `arguments`, in place; return whether `infill` is listed.

    Raises:
        RequestError: a name is unknown or has no sampler here, or `infill` is not where it can be.
    """
    if fields.get("samplers") is None:
        return False
    try:
        names = sampler_names(fields.get("samplers"))
    except ValueError as error:
        raise field_error("samplers", str(error)) from None
    if "adaptive_p" in names:
        raise field_error("samplers", "there is no adaptive_p here; leave it out")
    infills = "infill" in names
    if infills:
        at = names.index("infill")
        if not (
            _BEFORE_INFILL.issuperset(names[:at]) and _BEHIND_INFILL.issuperset(names[at + 1 :])
        ):
            raise field_error(
                "samplers",
                "before infill only penalties, top_k, top_p and min_p are allowed, and behind it "
                "only temperature",
            )
        names.remove("infill")
    arguments["samplers"] = names
    return infills
