"""What an ask becomes for the engine: tokens, and the options of their answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from edgellm.engine.chat_prompt import ChatPrompt, ToolOptions, chat_prompt
from edgellm.engine.infill_sampler import InfillSampler
from edgellm.infill import infill_options, infill_tokens
from edgellm.serve.ask import Ask, Conversation, Infill
from edgellm.serve.request_error import RequestError
from edgellm.text.fim_budget import budget
from edgellm.text.template import Scalar

if TYPE_CHECKING:
    from edgellm.engine.embedding import Pooling
    from edgellm.engine.engine import Engine
    from edgellm.engine.request import LogitFilter
    from edgellm.generation_options import GenerationOptions
    from edgellm.llm import LLM

# Of a token; up to so many there is nothing to be looked up.
_USUAL_CHARACTERS = 8


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt, and how it is answered.

    Attributes:
        logit_filter: of each answer.
        chat: how answers are taken apart; None: they are text.
    """

    tokens: list[int]
    options: GenerationOptions
    logit_filter: LogitFilter | None
    chat: ChatPrompt | None = None


def asked_prompt(llm: LLM, model: str, ask: Ask) -> EncodedPrompt:
    """What an ask means for a model.

    Args:
        model: what clients call it.

    Raises:
        EdgeLLMError: the model is not for such asks, or a part of it is wrong.
    """
    engine, prompt = llm.engine, ask.prompt
    options = llm.generation_options(**ask.arguments)
    logit_filter = _logit_filter(llm, ask, options)
    if isinstance(prompt, Conversation):
        tools = ToolOptions(
            tools=prompt.tools,
            tool_choice=prompt.tool_choice,
            parallel_tool_calls=prompt.parallel_tool_calls,
            template_arguments={**_hints(engine, prompt), **prompt.template_arguments},
        )
        chat = chat_prompt(
            engine,
            prompt.messages,
            tools,
            logit_filter=logit_filter,
            continue_last=_continues(prompt),
            check_size=partial(check_size, engine),
        )
        return EncodedPrompt(
            tokens=chat.tokens, options=options, logit_filter=chat.logit_filter, chat=chat
        )
    if isinstance(prompt, Infill):
        check_size(engine, _uncut(prompt))
        fitted = budget(engine.ctx_size, max_tokens=options.max_tokens)
        tokens = infill_tokens(
            engine.tokenizer,
            prompt.gap,
            model=model,
            order=prompt.order,
            budget=fitted if prompt.fitted else None,
        )
        options = infill_options(engine, options)
    else:
        check_size(engine, len(prompt) if isinstance(prompt, str) else 0)
        tokens = continued(engine, prompt, parse_special=True)
    return EncodedPrompt(tokens=tokens, options=options, logit_filter=logit_filter)


def _logit_filter(llm: LLM, ask: Ask, options: GenerationOptions) -> LogitFilter | None:
    """What answers may consist of."""
    if ask.json_schema is not None:
        if ask.infill_sampler:
            raise RequestError(
                "invalid_request",
                "a JSON schema and the sampler `infill` cannot be used together; leave `infill` "
                "out of `samplers`",
                param="samplers",
            )
        return llm.json_filter(ask.json_schema)
    if ask.infill_sampler:
        return InfillSampler(llm.engine.tokenizer, options)
    return None


def _continues(prompt: Conversation) -> bool:
    """Whether the answer goes on with an assistant's text at the end, as llama-server's does."""
    roles = [message.role for message in prompt.messages[-2:]]
    if roles == ["assistant", "assistant"]:
        raise RequestError(
            "invalid_request",
            "`messages` end with two of the assistant; one is continued",
            param="messages",
        )
    return roles[-1:] == ["assistant"] and not prompt.messages[-1].tool_calls


def _uncut(prompt: Infill) -> int:
    """Count the characters around a gap that no budget cuts."""
    gap = prompt.gap
    if prompt.fitted:
        return len(gap.tail)
    return sum(map(len, (gap.prefix, gap.tail, gap.suffix, *chain.from_iterable(gap.extra))))


def check_size(engine: Engine, characters: int) -> None:
    """Refuse a text that is too long for the context whatever its tokens are: a tokenizer takes
    seconds for megabytes, while others wait for it.

    Raises:
        RequestError: it is.
    """
    if characters <= _USUAL_CHARACTERS * engine.ctx_size:
        return
    if characters > engine.tokenizer.longest * engine.ctx_size:
        raise RequestError(
            "context_length",
            f"the prompt is too long: it has {characters} characters, and this model's maximum "
            f"context length is {engine.ctx_size} tokens; shorten it",
            code="context_length_exceeded",
            details={"n_ctx": engine.ctx_size},
        )


def answerable_prompt(llm: LLM, model: str, ask: Ask) -> EncodedPrompt:
    """Encode a prompt, and refuse while there is no reply yet what no answer can begin with.

    Raises:
        RequestError: the prompt is empty or too long, or a biased token is not in the vocabulary.
        EdgeLLMError: see `asked_prompt`.
    """
    engine, prompt = llm.engine, asked_prompt(llm, model, ask)
    count, options = len(prompt.tokens), prompt.options
    if options.context_policy == "error" and count > engine.ctx_size:
        raise too_long(count, engine.ctx_size)
    if not count:
        raise RequestError(
            "invalid_request", "the prompt is empty; give at least one token", param="prompt"
        )
    largest = max(options.logit_bias, default=0)
    if largest >= engine.config.vocab_size:
        raise _not_in_vocabulary(engine, largest, "logit_bias")
    return prompt


def continued(engine: Engine, prompt: str | tuple[int, ...], *, parse_special: bool) -> list[int]:
    """The tokens of a text, or token ids that are in the vocabulary."""
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt, parse_special=parse_special)
    largest = max(prompt, default=0)
    if largest >= engine.config.vocab_size:
        raise _not_in_vocabulary(engine, largest, "prompt")
    return list(prompt)


def embedding_prompt(
    engine: Engine, prompt: str | tuple[int, ...], *, pooling: Pooling, truncates: bool
) -> list[int]:
    """The tokens of a text to be embedded, with an end token where its state is the embedding:
    models that were trained for it end their texts so.

    Args:
        truncates: a text that is too long for the context is cut.

    Raises:
        RequestError: it is too long.
    """
    end = [min(engine.tokenizer.eos_ids)] if pooling == "last" and engine.tokenizer.eos else []
    if isinstance(prompt, str) and truncates:
        # twice as much as a context holds if all tokens are the longest one
        text = prompt[: 2 * engine.ctx_size * engine.tokenizer.longest]
        return continued(engine, text, parse_special=False)[: engine.ctx_size - len(end)] + end
    check_size(engine, len(prompt) if isinstance(prompt, str) else 0)
    tokens = continued(engine, prompt, parse_special=False) + end
    if len(tokens) > engine.ctx_size:
        raise too_long(len(tokens), engine.ctx_size)
    return tokens


def _not_in_vocabulary(engine: Engine, token: int, name: str) -> RequestError:
    return RequestError(
        "invalid_request",
        f"`{name}`: token {token} is not in the vocabulary; allowed are whole numbers from 0 to "
        f"{engine.config.vocab_size - 1}",
        param=name,
    )


def _hints(engine: Engine, prompt: Conversation) -> dict[str, Scalar]:
    """Those that the template reads."""
    known = engine.template.arguments if engine.template is not None else frozenset()
    return {name: value for name, value in prompt.template_hints.items() if name in known}


def too_long(tokens: int, ctx_size: int) -> RequestError:
    return RequestError(
        "context_length",
        # litellm, pydantic-ai and others know the error by these words
        f"the prompt is too long: it has {tokens} tokens, and this model's maximum context length "
        f"is {ctx_size} tokens; shorten it, or serve the model with a larger `ctx_size`",
        code="context_length_exceeded",
        details={"n_prompt_tokens": tokens, "n_ctx": ctx_size},
    )
