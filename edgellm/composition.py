"""Sessions composed of texts that were computed alone, and are copied to their places.

K and V of a document are those that it has behind a begin token, and keys are turned to their new
positions. The first tokens of each are computed again in place, as EPIC does (Hu et al.,
arXiv:2410.15332): in the copy they drew the attention that any context's first tokens draw. The
begin token takes most of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

from edgellm.checks import check_flag, check_number
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.turned import append_turned, awake, check_turnable
from edgellm.errors import (
    CacheFullError,
    CancelledError,
    ContextOverflowError,
    OptionError,
)
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
) -> Session:
    """Return a session whose context is all parts, see `TextGeneration.compose`."""
    check_number("recompute", recompute, 0, 1)
    check_flag("parse_special", parse_special)
    if isinstance(parts, str) or not parts:
        raise OptionError("`parts` is a list of texts or token ids, the last one a question")
    if recompute < 1:
        check_turnable(engine, engine.adapters.get(adapter))
    composer = _Composer(engine, adapter=adapter)
    encoded = composer.encoded(parts, parse_special=parse_special)
    return composer.session(encoded, recompute=recompute)


class _Composer:
    def __init__(self, engine: Engine, *, adapter: str | None) -> None:
        self._engine = engine
        self._adapter = adapter
        self._context = Context(engine, adapter=engine.adapters.get(adapter))
        self._session = Session(engine, self._context, adapter=adapter)

    def encoded(
        self, parts: SequenceOf[str | SequenceOf[int]], *, parse_special: bool
    ) -> list[list[int]]:
        """Encode the parts, of which the first alone may have a begin token."""
        tokenizer, encoded = self._engine.tokenizer, []
        for number, part in enumerate(parts):
            if isinstance(part, str):
                add_bos = False if number else None
                part = tokenizer.encode(part, add_bos=add_bos, parse_special=parse_special)
            encoded.append(self._context.checked("parts", part))
        length, most = sum(map(len, encoded)), self._engine.ctx_size
        if length > most:
            raise ContextOverflowError(
                f"the parts have {length} tokens, but the context holds {most}; leave some out, "
                "or raise `ctx_size`"
            )
        return encoded

    def session(self, parts: list[list[int]], *, recompute: float) -> Session:
        """Return the session of encoded parts."""
        session = self._session
        copied = alone = 0
        for number, part in enumerate(parts):
            first = math.ceil(recompute * len(part))
            if number in (0, len(parts) - 1) or first >= len(part):
                session.append(part)
                continue
            session.append(part[:first])
            alone += self._copy(part, first)
            copied += len(part) - first
        session.composed = Composition(
            copied_tokens=copied,
            computed_tokens=sum(map(len, parts)) - copied,
            alone_tokens=alone,
        )
        return session

    def _copy(self, part: list[int], first: int) -> int:
        """Copy a document but its first tokens; returns how many tokens were computed alone."""
        engine, alone, begin = self._engine, 0, self._engine.tokenizer.bos_id
        tokens = [*(self._context.tokens[:1] if begin is None else [begin]), *part]
        start = len(tokens) - len(part) + first
        for _ in range(_ATTEMPTS):
            if self._session.cached < len(self._session.tokens):
                _compute(self._session)
            if engine.thread.call(lambda: self._copied(tokens, start)):
                return alone
            with Session(engine, adapter=self._adapter) as document:
                document.replace(tokens)
                alone += _compute(document)
        raise CacheFullError("answers on their way hold the whole cache; compose again later")

    def _copied(self, tokens: list[int], start: int) -> bool:
        """Copy tokens from `start` on, in the engine's thread; False if others took the blocks."""
        context = self._context
        with awake(context):  # what it needs more may not be made of its own blocks
            if context.cached < len(context.tokens):
                return False
            source = self._engine.cache.sequence(tokens, root=context.sequence.root)
            try:
                if len(source) < len(tokens):
                    return False
                append_turned(context, source, start)
                return True
            finally:
                source.close()


def _compute(session: Session) -> int:
    """Compute a session's tokens; returns how many were not found in the KV cache."""
    answer = session.generate(max_tokens=0, time_limit_ms=None)
    if answer.finish_reason != "length":
        raise CancelledError(f"compose: {answer.finish_reason}")
    return answer.stats.prompt_tokens - answer.stats.cached_tokens
