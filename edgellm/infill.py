"""Infill: the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edgellm.engine.call import Call
from edgellm.engine.engine import Engine
from edgellm.engine.loop import iterate
from edgellm.errors import OptionError, UnsupportedModelError
from edgellm.generation_options import GenerationOptions
from edgellm.results import Piece
from edgellm.session import Session
from edgellm.text.fim import ORDERS, Budget, Gap, Order, assemble, require_family
from edgellm.text.prompt import Message, encode_conversation
from edgellm.text.tokenizer import Tokenizer

__all__ = ["ORDERS", "Gap", "Order", "infill_options", "infill_tokens", "stream_infill"]

_REQUEST = (
    "Text is missing at the mark <gap/>. Answer with the missing text alone: no explanation, no "
    "quotation marks, nothing of what stands around it.\n\n{prefix}<gap/>{suffix}"
)


def infill_tokens(
    tokenizer: Tokenizer,
    gap: Gap,
    *,
    model: str,
    order: Order | None = None,
    budget: Budget | None = None,
) -> list[int]:
    """Return the prompt for a gap, in the infill tokens of the model's family (see `fim.py`).

    Args:
        model: name of the model, for the error.
        order: order of the parts; None: the family's own.
        budget: number of tokens for each part; None: all of them.

    Raises:
        UnsupportedModelError: the model has no infill tokens.
        OptionError: an unknown order.
    """
    if order not in (None, *ORDERS):
        raise OptionError(f"`order` is {order!r}; allowed are {', '.join(ORDERS)}")
    family = require_family(tokenizer.vocabulary, tokenizer.fim, model=model)
    return assemble(
        family,
        gap,
        encode=lambda text: tokenizer.encode(text, add_bos=False),
        vocabulary=tokenizer.vocabulary,
        bos=tokenizer.bos_id if tokenizer.adds_bos else None,
        order=order,
        budget=budget,
    )


def infill_options(engine: Engine, options: GenerationOptions) -> GenerationOptions:
    """Return the options with the stop texts and tokens that end an infill of the family."""
    tokenizer = engine.tokenizer
    family = require_family(tokenizer.vocabulary, tokenizer.fim, model=engine.bundle.manifest.name)
    known = (tokenizer.vocabulary.get(text) for text in family.stop_tokens)
    return replace(
        options,
        stop=[*options.stop, *family.stop_texts],
        stop_tokens=[*options.stop_tokens, *(token for token in known if token is not None)],
    )


def stream_infill(
    engine: Engine,
    gap: Gap,
    call: Call,
    *,
    order: Order | None = None,
    template: bool = False,
) -> Iterator[Piece]:
    """Stream the text for a gap, piece by piece.

    Tokens at the beginning that an earlier prompt had as well come from the KV cache.

    Args:
        order: order of the parts; None: the family's own.
        template: whether to ask in words, through the chat template, instead of with the family's
            tokens.

    Raises:
        UnsupportedModelError: the model has no infill tokens, and `template` is not set.
    """
    if template:
        tokens = _in_words(engine, gap)
    else:
        model = engine.bundle.manifest.name
        try:
            tokens = infill_tokens(engine.tokenizer, gap, model=model, order=order)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}, or ask it in words with `template`") from error
        call = replace(call, options=infill_options(engine, call.options))
    with Session(engine, closes=True) as session:
        session.replace(tokens)
        yield from iterate(engine.loop, session._pending(call))


def _in_words(engine: Engine, gap: Gap) -> list[int]:
    files = "".join(f"{path}:\n{text}\n\n" for path, text in gap.extra)
    request = files + _REQUEST.format(prefix=gap.prefix, suffix=gap.suffix)
    return encode_conversation([Message("user", request)], engine.template, engine.tokenizer)
