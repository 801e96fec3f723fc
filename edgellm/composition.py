"""Sessions composed of texts that were computed alone, and are copied to their places.

K and V of a document are those that it has behind a begin token, and keys are turned to their new
positions. The first tokens of each are computed again in place, as EPIC does (Hu et al.,
arXiv:2410.15332): in the copy they drew the attention that any context's first tokens draw. The
begin token takes most of it.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from functools import partial

from edgellm.checks import check_flag, check_number
from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.loop import WORKING, Wait
from edgellm.engine.turned import check_turnable, compute, copy_end, find_again
from edgellm.errors import CacheFullError, ContextOverflowError, OptionError
from edgellm.results import Composition
from edgellm.session import Session

# Attempts to copy a document, whose blocks others may need between two steps.
_ATTEMPTS = 3


def compose(
    engine: Engine,
    parts: SequenceOf[str | SequenceOf[int]],
    *,
    recompute: float,
    parse_special: bool,
    adapter: str | None,
) -> Generator[Wait, None, Session]:
    """Open a session whose context is all parts, see `TextGeneration.compose`."""
    check_number("recompute", recompute, 0, 1)
    check_flag("parse_special", parse_special)
    if isinstance(parts, str) or not parts:
        raise OptionError("`parts` is a list of texts or token ids, the last one a question")
    if recompute < 1:
        check_turnable(engine, engine.adapters.get(adapter))
    session = Session(engine, adapter=adapter)
    context, call = session._context, session._unlimited_call()
    try:
        encoded = _encoded(engine, context, parts, parse_special=parse_special)
        session.composed = yield from _composed(
            engine, context, encoded, recompute=recompute, call=call
        )
    except BaseException:
        session.close()
        raise
    return session


def _encoded(
    engine: Engine,
    context: Context,
    parts: SequenceOf[str | SequenceOf[int]],
    *,
    parse_special: bool,
) -> list[list[int]]:
    """Encode the parts, of which the first alone may have a begin token."""
    encoded = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            add_bos = False if number else None
            part = engine.tokenizer.encode(part, add_bos=add_bos, parse_special=parse_special)
        encoded.append(context.checked("parts", part))
    length, most = sum(map(len, encoded)), engine.ctx_size
    if length > most:
        raise ContextOverflowError(
            f"the parts have {length} tokens, but the context holds {most}; leave some out, "
            "or raise `ctx_size`"
        )
    return encoded


def _composed(
    engine: Engine, context: Context, parts: list[list[int]], *, recompute: float, call: Call
) -> Generator[Wait, None, Composition]:
    """Append encoded parts to an empty context."""
    begin, copies, alone = engine.tokenizer.bos_id, 0, 0
    for number, part in enumerate(parts):
        first = math.ceil(recompute * len(part))
        if number in (0, len(parts) - 1) or first >= len(part):
            context.set([*context.tokens, *part])
            continue
        context.set([*context.tokens, *part[:first]])
        tokens = [*(context.tokens[:1] if begin is None else [begin]), *part]
        start = len(tokens) - len(part) + first
        alone += yield from _copy(engine, context, tokens, start, call)
        copies += len(part) - first
    return Composition(
        copied_tokens=copies, computed_tokens=sum(map(len, parts)) - copies, alone_tokens=alone
    )


def _copy(
    engine: Engine, context: Context, tokens: list[int], start: int, call: Call
) -> Generator[Wait, None, int]:
    """Copy a document from `start` on; returns how many tokens were computed alone."""
    source, alone = Context(engine, tokens, adapter=context.adapter), 0
    try:
        for _ in range(_ATTEMPTS):
            yield from compute(engine, context, call)
            yield WORKING
            alone += len(tokens) - engine.thread.call(partial(find_again, source))
            yield from compute(engine, source, call)
            yield WORKING
            if engine.thread.call(partial(_copy_whole, context, source, start)):
                return alone
    finally:
        source.close()
    raise CacheFullError("answers on their way hold the whole cache; compose again later")


def _copy_whole(context: Context, source: Context, start: int) -> bool:
    """Copy tokens from `start` on, in the engine's thread; False if others took the blocks."""
    return find_again(source) == len(source.tokens) and copy_end(context, source, start) > 0
