"""What a client wants, in no dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgellm.generation_options import GenerationArguments
from edgellm.text.fim import Gap, Order
from edgellm.text.prompt import Message
from edgellm.text.template import Scalar
from edgellm.tool_use import Tool, ToolChoice


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for the model's chat template.

    Attributes:
        tools: what the model may call.
        tool_choice: whether it has to; see `edgellm/tool_use.py`.
        parallel_tool_calls: whether it may make several calls in one answer.
        template_arguments: what the template is told beside them, such as `enable_thinking`.
        template_hints: likewise, where the template reads it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template_arguments: Mapping[str, Scalar] = field(default_factory=dict)
    template_hints: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Infill:
    """A gap to be filled.

    Attributes:
        order: see `LLM.infill`.
        fitted: whether what is around the gap is cut so that it fits (see `fim_budget.py`).
    """

    gap: Gap
    order: Order | None = None
    fitted: bool = False


# A text (special tokens that are written out are those tokens) or token ids are continued.
AskedPrompt = Conversation | Infill | str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """An answer that is asked for.

    Attributes:
        model: None or "": the first one that is served.
        arguments: fields of `GenerationOptions`; others are the model's own.
        n: answers to the same prompt, which is computed once.
        json_schema: as text; the answer is JSON of this schema. `{}`: any JSON.
        infill_sampler: choose tokens as llama.cpp's sampler of this name does (see
            `infill_sampler.py`).
    """

    model: str | None
    prompt: AskedPrompt
    arguments: GenerationArguments = field(default_factory=GenerationArguments)
    n: int = 1
    json_schema: str | None = None
    infill_sampler: bool = False


@dataclass(frozen=True, kw_only=True)
class EmbeddingAsk:
    """Embeddings that are asked for.

    Attributes:
        model: None or "": the first one that is served.
        prompts: texts or token ids.
        truncates: whether a text that is too long for the context is cut; else it is an error.
        time_limit_ms: for all of them, from their arrival; None: the server's.
    """

    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    truncates: bool = False
    time_limit_ms: int | None = None
