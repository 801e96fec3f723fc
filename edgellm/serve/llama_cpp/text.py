"""llama.cpp's `/tokenize`, `/detokenize` and `/apply-template`.

The first two are also in vLLM's form, with the text in `prompt`. lm-eval's `remote` tokenizer sends
that, and reads vLLM's `/tokenizer_info`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from edgellm.llm import LLM
from edgellm.serve.ask import Ask, asked_prompt
from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.fields import Fields, shown
from edgellm.serve.http.streaming import Reply, json_reply
from edgellm.serve.llama_cpp.fields import INT32_MAX, field_error
from edgellm.serve.openai.messages import read_conversation
from edgellm.serve.queue_limits import MOST_CHARACTERS, MOST_TOKENS
from edgellm.serve.request_error import RequestError
from edgellm.text.tokenizer import Tokenizer


def model_id(call: Call, fields: Fields) -> str:
    """Return the id of the model that a client means, or the name of an adapter.

    A server of one model ignores the name: editors send names that their users have made up.

    Raises:
        RequestError: the server has several models, and none of this name.
    """
    name = fields.text("model")
    pool = call.answering.pool
    if name is not None and pool.adapters.get(name) is not None:
        return name
    return pool.ids[0] if len(pool.ids) == 1 else pool.resolve(name)


async def encode(
    call: Call, model: str, text: str, *, add_bos: bool | None, parse_special: bool = True
) -> list[int]:
    """Return the tokens of a text.

    Raises:
        RequestError: the text is too long, or too many texts wait.
    """
    _check_length(text)
    async with call.answering.pool.use(model) as llm:
        tokenizer = llm.engine.tokenizer
        return await call.answering.text_work.call(
            partial(tokenizer.encode, text, add_bos=add_bos, parse_special=parse_special)
        )


def _check_length(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise RequestError(
            "invalid_request",
            f"a text has {len(text)} characters; at most {MOST_CHARACTERS} are read at once",
        )


async def tokenize(call: Call) -> Reply:
    fields = await call.fields()
    model = model_id(call, fields)
    of_vllm = "content" not in fields and "prompt" in fields
    text = fields.required_text("prompt" if of_vllm else "content")
    _check_length(text)
    special = fields.flag("parse_special")
    begins = (
        fields.flag("add_special_tokens") is not False if of_vllm else fields.flag("add_special")
    )
    async with call.answering.pool.use(model) as llm:
        return await call.answering.text_work.call(
            partial(
                _tokenized,
                llm.engine.tokenizer,
                text,
                # None: a begin token only where the model wants one
                add_bos=None if begins else False,
                parse_special=special is None or special,
                with_pieces=bool(fields.flag("with_pieces")),
            )
        )


def _tokenized(
    tokenizer: Tokenizer, text: str, *, add_bos: bool | None, parse_special: bool, with_pieces: bool
) -> Reply:
    tokens = tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)
    return json_reply({"tokens": _pieces(tokenizer, tokens) if with_pieces else tokens})


def _pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Return tokens with their texts, or with their bytes where these are part of a character."""
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
    if not isinstance(tokens, list) or len(tokens) > MOST_TOKENS:
        raise field_error(
            "tokens",
            f"a list of at most {MOST_TOKENS} token ids is expected, but got {shown(tokens)}",
        )
    async with call.answering.pool.use(model_id(call, fields)) as llm:
        text = await call.answering.text_work.call(partial(_text, llm, tokens))
    return json_reply({"content": text, "prompt": text})


async def tokenizer_info(call: Call) -> Reply:
    """vLLM's description of a tokenizer, in the words of Hugging Face's."""
    model = call.answering.pool.resolve(None)
    async with call.answering.pool.use(model) as llm:
        engine = llm.engine
        template = await call.answering.text_work.call(lambda: engine.template)
    ends = [engine.tokenizer.text_of(token) for token in sorted(engine.tokenizer.eos_ids)]
    return json_reply(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": engine.tokenizer.bos,
            "eos_token": ends[0] if ends else None,
            "pad_token": None,
            "chat_template": None if template is None else template.source,
        }
    )


def _text(llm: LLM, tokens: Sequence[Any]) -> str:
    _check_ids(llm, tokens)
    return llm.engine.tokenizer.decode(tokens, skip_special=False)


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
        text = await call.answering.text_work.call(partial(_rendered, llm, ask))
    return json_reply({"prompt": text})


def _rendered(llm: LLM, ask: Ask) -> str:
    tokens = asked_prompt(llm, ask.model or "", ask).tokens
    return llm.engine.tokenizer.decode(tokens, skip_special=False)


ROUTES = (
    Route("/tokenize", {"POST": tokenize}),
    Route("/detokenize", {"POST": detokenize}),
    Route("/tokenizer_info", {"GET": tokenizer_info}),
    Route("/apply-template", {"POST": apply_template}),
)
