"""What an ask becomes for the engine: tokens, and the options of their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.infill import infill_options, infill_tokens
from edgellm.serve.ask import Ask, Conversation, Infill
from edgellm.serve.request_error import RequestError
from edgellm.text.prompt import encode_conversation
from edgellm.text.template import Scalar

if TYPE_CHECKING:
    from edgellm.engine.engine import Engine
    from edgellm.generation_options import GenerationOptions
    from edgellm.llm import LLM


def asked_prompt(llm: LLM, ask: Ask) -> tuple[list[int], GenerationOptions]:
    """The tokens of a prompt, and how it is answered."""
    engine, prompt = llm.engine, ask.prompt
    options = llm.generation_options(**ask.arguments)
    if isinstance(prompt, Infill):
        tokens = infill_tokens(
            engine.tokenizer, prompt.gap, model=engine.bundle.manifest.name, order=prompt.order
        )
        return tokens, infill_options(engine, options)
    if isinstance(prompt, Conversation):
        tokens = encode_conversation(
            prompt.messages,
            engine.template,
            engine.tokenizer,
            tools=() if prompt.tool_choice == "none" else prompt.tools,
            template_arguments={**_hints(engine, prompt), **prompt.template_arguments},
        )
        return tokens, options
    return continued(engine, prompt, parse_special=True), options


def continued(engine: Engine, prompt: str | tuple[int, ...], *, parse_special: bool) -> list[int]:
    """The tokens of a text, or token ids that are in the vocabulary."""
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt, parse_special=parse_special)
    largest = max(prompt, default=0)
    if largest >= engine.config.vocab_size:
        raise RequestError(
            "invalid_request",
            f"token {largest} is not in the vocabulary; allowed are whole numbers from 0 to "
            f"{engine.config.vocab_size - 1}",
            param="prompt",
        )
    return list(prompt)


def _hints(engine: Engine, prompt: Conversation) -> dict[str, Scalar]:
    """Those that the template reads."""
    known = engine.template.arguments if engine.template is not None else frozenset()
    return {name: value for name, value in prompt.template_hints.items() if name in known}


def too_long(tokens: int, ctx_size: int) -> RequestError:
    return RequestError(
        "context_length",
        f"the prompt has {tokens} tokens, but the context holds {ctx_size}; shorten it",
        code="context_length_exceeded",
        details={"n_prompt_tokens": tokens, "n_ctx": ctx_size},
    )
