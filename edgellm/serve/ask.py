"""Asks: requests for answers or embeddings, independent of any API dialect, and their prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from edgellm.engine.chat_prompt import ChatPrompt, ToolOptions, chat_prompt
from edgellm.engine.embedding import DEFAULT_INSTRUCTION, RerankMethod
from edgellm.generation_options import GenerationArguments
from edgellm.infill import InfillSampler, infill_options, infill_tokens
from edgellm.serve.request_error import RequestError
from edgellm.text.fim import Gap, Order, budget
from edgellm.text.grammar import Grammar
from edgellm.text.prompt import SYSTEM_ROLES, Message
from edgellm.text.template import Scalar
from edgellm.tool_use import Tool, ToolChoice

if TYPE_CHECKING:
    from edgellm.engine.answer import LogitFilter
    from edgellm.engine.engine import Engine
    from edgellm.generation_options import GenerationOptions
    from edgellm.llm import LLM
    from edgellm.options import Pooling


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for the model's chat template.

    Attributes:
        tools: tools that the model may call.
        tool_choice: whether the model has to call a tool, and which; see `edgellm/tool_use.py`.
        parallel_tool_calls: whether one answer may have several tool calls.
        template_arguments: further variables of the chat template, such as `enable_thinking`.
        template_hints: variables that are passed only to a template that reads them.
        reasoning_budget: maximum of tokens of reasoning; None: no limit.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template_arguments: Mapping[str, Scalar] = field(default_factory=dict)
    template_hints: Mapping[str, Scalar] = field(default_factory=dict)
    reasoning_budget: int | None = None


@dataclass(frozen=True, kw_only=True)
class Infill:
    """A gap to be filled with text.

    Attributes:
        order: order of prefix and suffix in the prompt; see `LLM.infill`.
        fitted: whether the text around the gap is cut to fit the context (see `fim.py`).
    """

    gap: Gap
    order: Order | None = None
    fitted: bool = False


# A text or token ids are continued. Special tokens that are written out in a text are those tokens.
AskedPrompt = Conversation | Infill | str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request for one or more answers to one prompt.

    Attributes:
        model: id of the model; None or "": the first served model.
        arguments: fields of `GenerationOptions`; the model's own defaults apply to the others.
        n: number of answers to the prompt, which is computed once.
        of: number of asks in the same request.
        grammar: form of the answer; None: free text.
        infill_sampler: whether tokens are chosen as by llama.cpp's sampler `infill` (see
            `sampling.py`).
        lora: numbers and scales of adapters, as llama.cpp's clients give them; None: `model` alone
            says whether an adapter is wanted.
        cache_reuse: tokens at the end of an earlier prompt that are worth copying to the end of
            this one; 0: none are.
    """

    model: str | None
    prompt: AskedPrompt
    arguments: GenerationArguments = field(default_factory=GenerationArguments)
    n: int = 1
    of: int = 1
    grammar: Grammar | None = None
    infill_sampler: bool = False
    lora: tuple[tuple[int, float], ...] | None = None
    cache_reuse: int = 0


@dataclass(frozen=True, kw_only=True)
class EmbeddingAsk:
    """A request for the embeddings of one or more prompts.

    Attributes:
        model: id of the model; None or "": the first served model.
        prompts: texts or token ids.
        truncates: whether a text that is too long for the context is cut; else it is an error.
        time_limit_ms: time for all embeddings, from their arrival; None: the server's limit.
    """

    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    truncates: bool = False
    time_limit_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class RerankAsk:
    """A request for the relevance of documents to a query; see `LLM.rerank`.

    Attributes:
        model: id of the model; None or "": the first served model.
        time_limit_ms: see `EmbeddingAsk`.
    """

    model: str | None
    query: str
    documents: tuple[str, ...]
    method: RerankMethod = "auto"
    instruction: str = DEFAULT_INSTRUCTION
    time_limit_ms: int | None = None


# Characters per token of the context. A text up to this size is not refused, so the tokenizer's
# longest token need not be looked up for it.
_USUAL_CHARACTERS = 8
# Log-probabilities of a prompt in one reply: 20 MB of JSON.
_MOST_SCORES = 1 << 19


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt in tokens, with the options of its answers.

    Attributes:
        logit_filter: filter of each answer's logits, such as a JSON schema's.
        chat: the conversation's form, by which answers are split into text, reasoning and tool
            calls; None: answers are plain text.
    """

    tokens: list[int]
    options: GenerationOptions
    logit_filter: LogitFilter | None
    chat: ChatPrompt | None = None


def asked_prompt(llm: LLM, model: str, ask: Ask) -> EncodedPrompt:
    """Encode an ask for a model: prompt tokens, generation options and logit filter.

    Args:
        model: id by which clients name the model.

    Raises:
        EdgeLLMError: the model cannot take such an ask, or an option, message or tool is wrong.
        RequestError: a part of the ask is wrong, such as a text that is too long.
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
            reasoning_budget=prompt.reasoning_budget,
        )
        chat = chat_prompt(
            engine,
            _with_system(llm, prompt.messages),
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


def _with_system(llm: LLM, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Begin with the system prompt of `load`, where it has one and the conversation has none."""
    if llm.system is None or any(message.role in SYSTEM_ROLES for message in messages):
        return messages
    return (Message("system", llm.system), *messages)


def _logit_filter(llm: LLM, ask: Ask, options: GenerationOptions) -> LogitFilter | None:
    """Return the filter that a grammar or the sampler `infill` puts on logits, or None.

    Raises:
        RequestError: the ask has both.
    """
    if ask.grammar is not None:
        if ask.infill_sampler:
            raise RequestError(
                "invalid_request",
                f"{ask.grammar.name} and the sampler `infill` cannot be used together; leave "
                "`infill` out of `samplers`",
                param="samplers",
            )
        return llm.grammar_filter(ask.grammar)
    if ask.infill_sampler:
        return InfillSampler(llm.engine.tokenizer, options)
    return None


def _continues(prompt: Conversation) -> bool:
    """Whether the answer continues a last assistant message, as llama-server's does.

    Raises:
        RequestError: the last two messages are the assistant's.
    """
    roles = [message.role for message in prompt.messages[-2:]]
    if roles == ["assistant", "assistant"]:
        raise RequestError(
            "invalid_request",
            "`messages` end with two of the assistant; one is continued",
            param="messages",
        )
    return roles[-1:] == ["assistant"] and not prompt.messages[-1].tool_calls


def _uncut(prompt: Infill) -> int:
    """Count the characters around a gap that are not cut to fit the context."""
    gap = prompt.gap
    if prompt.fitted:
        return len(gap.tail)
    return sum(map(len, (gap.prefix, gap.tail, gap.suffix, *chain.from_iterable(gap.extra))))


def check_size(engine: Engine, characters: int) -> None:
    """Refuse a text that is too long for the context even if all its tokens are the longest one.

    A tokenizer takes seconds for megabytes of text, and other requests wait for it meanwhile.

    Raises:
        RequestError: the text is too long.
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
    """Encode the prompt of an ask, and refuse one that no answer can begin with.

    The check comes before the reply has begun, so that the error has a status of its own.

    Raises:
        RequestError: the prompt is empty or too long, or a biased token is not in the vocabulary.
        EdgeLLMError: see `asked_prompt`.
    """
    engine, prompt = llm.engine, asked_prompt(llm, model, ask)
    count, options = len(prompt.tokens), prompt.options
    if not options.when_full.forgets and count > engine.ctx_size:
        raise too_long(count, engine.ctx_size)
    if not count:
        raise RequestError(
            "invalid_request", "the prompt is empty; give at least one token", param="prompt"
        )
    if options.prompt_logprobs is not None:
        scores, most = count * (options.prompt_logprobs + 1) * ask.n, _MOST_SCORES // ask.of
        if scores > most:
            raise RequestError(
                "invalid_request",
                f"the scores of this prompt are {scores} numbers, its tokens times `logprobs` and "
                f"one times `n`; at most {most} are told of each prompt in one answer",
                param="logprobs",
            )
    largest = max(options.logit_bias, default=0)
    if largest >= engine.config.vocab_size:
        raise _not_in_vocabulary(engine, largest, "logit_bias")
    return prompt


def continued(engine: Engine, prompt: str | tuple[int, ...], *, parse_special: bool) -> list[int]:
    """Return the tokens of a text, or the token ids that were given.

    Raises:
        RequestError: a token id is not in the vocabulary.
    """
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt, parse_special=parse_special)
    largest = max(prompt, default=0)
    if largest >= engine.config.vocab_size:
        raise _not_in_vocabulary(engine, largest, "prompt")
    return list(prompt)


def embedding_prompt(
    engine: Engine, prompt: str | tuple[int, ...], *, pooling: Pooling, truncates: bool
) -> list[int]:
    """Return the tokens of a text to be embedded.

    With `pooling` "last" an end token is appended, whose state is the embedding: models that were
    trained for this pooling end their texts so.

    Args:
        truncates: whether a text that is too long for the context is cut.

    Raises:
        RequestError: the prompt is too long, or a token id is not in the vocabulary.
    """
    end = [min(engine.tokenizer.eos_ids)] if pooling == "last" and engine.tokenizer.eos else []
    if isinstance(prompt, str) and truncates:
        # twice the characters that fit into a context if all tokens are the longest one
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
    """Return the template hints whose names the chat template reads."""
    known = engine.template.arguments if engine.template is not None else frozenset()
    return {name: value for name, value in prompt.template_hints.items() if name in known}


def too_long(tokens: int, ctx_size: int) -> RequestError:
    return RequestError(
        "context_length",
        # litellm, pydantic-ai and other clients recognize the error by these words
        f"the prompt is too long: it has {tokens} tokens, and this model's maximum context length "
        f"is {ctx_size} tokens; shorten it, or serve the model with a larger `ctx_size`",
        code="context_length_exceeded",
        details={"n_prompt_tokens": tokens, "n_ctx": ctx_size},
    )
