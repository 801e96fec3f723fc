"""Asks: requests for answers or embeddings, independent of any API dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgellm.engine.embedding import DEFAULT_INSTRUCTION, RerankMethod
from edgellm.generation_options import GenerationArguments
from edgellm.text.fim import Gap, Order
from edgellm.text.grammar import Grammar
from edgellm.text.prompt import Message
from edgellm.text.template import Scalar
from edgellm.tool_use import Tool, ToolChoice


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
    """

    model: str | None
    prompt: AskedPrompt
    arguments: GenerationArguments = field(default_factory=GenerationArguments)
    n: int = 1
    of: int = 1
    grammar: Grammar | None = None
    infill_sampler: bool = False
    lora: tuple[tuple[int, float], ...] | None = None


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
