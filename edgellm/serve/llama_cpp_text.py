"""llama.cpp's `/tokenize`, `/detokenize` and `/apply-template`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from edgellm.llm import LLM
from edgellm.serve.ask import Ask
from edgellm.serve.asked_prompt import asked_prompt
from edgellm.serve.body import Fields, shown
from edgellm.serve.endpoint import Call, Route
from edgellm.serve.llama_cpp_fields import INT32_MAX, field_error
from edgellm.serve.openai_messages import read_conversation
from edgellm.serve.streaming import Reply, json_reply
from edgellm.text.tokenizer import Tokenizer


def model_id(call: Call, fields: Fields) -> str:
    """The model that a client means. Where there is only one, it is that one: editors send names
    that their users have made up.

    Raises:
        RequestError: there are several, and none of that name.
    """
    name = fields.text("model")
    pool = call.answering.pool
    return pool.ids[0] if len(pool.ids) == 1 else pool.resolve(name)


async def encode(
    call: Call, model: str, text: str, *, add_bos: bool | None, parse_special: bool = True
) -> list[int]:
    """The tokens of a text, not computed in the event loop."""
    async with call.answering.pool.use(model) as llm:
        tokenizer = llm.engine.tokenizer
        return await asyncio.to_thread(
            tokenizer.encode, text, add_bos=add_bos, parse_special=parse_special
        )


async def tokenize(call: Call) -> Reply:
    fields = await call.fields()
    model = model_id(call, fields)
    add_special = fields.flag("add_special")
    special = fields.flag("parse_special")
    tokens = await encode(
        call,
        model,
        fields.required_text("content"),
        # where a model wants no begin token there is none to add
        add_bos=None if add_special else False,
        parse_special=special is None or special,
    )
    if not fields.flag("with_pieces"):
        return json_reply({"tokens": tokens})
    async with call.answering.pool.use(model) as llm:
        pieces = await asyncio.to_thread(_pieces, llm.engine.tokenizer, tokens)
    return json_reply({"tokens": pieces})


def _pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens with their texts, or with their bytes where those are part of a character."""
    pieces = []
    for token in tokens:
        data = tokenizer.bytes_of(token)
        try:
            piece: str | list[int] = data.decode()
        except UnicodeDecodeError:
            piece = list(data)
        pieces.append({"id": token, "piece": piece})
    return pieces


async def detokenize(call: Call) -> Reply:
    fields = await call.fields()
    tokens = fields.get("tokens")
    if not isinstance(tokens, list):
        raise field_error("tokens", f"a list of token ids is expected, but got {shown(tokens)}")
    async with call.answering.pool.use(model_id(call, fields)) as llm:
        _check_ids(llm, tokens)
        decode = llm.engine.tokenizer.decode
        return json_reply({"content": await asyncio.to_thread(decode, tokens, skip_special=False)})


def _check_ids(llm: LLM, tokens: Sequence[Any]) -> None:
    most = min(llm.engine.config.vocab_size - 1, INT32_MAX)
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= most:
            raise field_error(
                "tokens", f"token ids from 0 to {most} are expected, but got {shown(token)}"
            )


async def apply_template(call: Call) -> Reply:
    fields = await call.fields()
    model = model_id(call, fields)
    ask = Ask(model=model, prompt=read_conversation(fields))
    async with call.answering.pool.use(model) as llm:
        prompt = await asyncio.to_thread(asked_prompt, llm, model, ask)
        decode = llm.engine.tokenizer.decode
        text = await asyncio.to_thread(decode, prompt.tokens, skip_special=False)
    return json_reply({"prompt": text})


ROUTES = (
    Route("/tokenize", {"POST": tokenize}),
    Route("/detokenize", {"POST": detokenize}),
    Route("/apply-template", {"POST": apply_template}),
)
