"""Sessions composed of texts that were computed alone, and are copied to their places.

K and V of a document are those that it has behind a begin token, and keys are turned to their new
positions. The first tokens of each are computed again in place, as EPIC does (Hu et al.,
arXiv:2410.15332): in the copy they drew the attention that any context's first tokens draw. The
begin token takes most of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

from edgellm.cache.groups import CacheGroup
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence
from edgellm.checks import check_flag, check_number
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.errors import (
    CacheFullError,
    CancelledError,
    ContextOverflowError,
    OptionError,
    UnsupportedModelError,
)
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.kv_shift import move
from edgellm.results import Composition
from edgellm.session import Session

# Attempts to copy a document, whose blocks others may need between two steps.
_ATTEMPTS = 3


def append_turned(sequence: Sequence, source: Sequence, start: int, cache: KVCache) -> None:
    """Append the tokens of another sequence from `start` on, with their K and V, keys turned.

    Later tokens that attend to them are not what they would be behind plain tokens, so that no
    other sequence begins with any of these.

    Raises:
        CacheFullError: no block is free; nothing has changed.
    """
    inv_freq, before = cache.rope_frequencies, len(sequence)
    assert inv_freq is not None
    count = len(source) - start
    with sequence.reserved(count):
        sequence.use_host()
        for table, other in zip(sequence.tables, source.tables, strict=True):
            store = table.store
            store.on_host(other.ids)
            move(
                store.kv,
                other.ids,
                start,
                count,
                targets=table.ids[before // BLOCK :],
                row=before % BLOCK,
                distance=start - before,
                inv_freq=[inv_freq[layer] for layer in store.group.layers],
            )
        if sequence.shareable is None:
            sequence.shareable = before
        sequence.commit(source.tokens[start:])


def check_composable(engine: Engine, adapter: str | None) -> None:
    """Refuse a model whose K and V cannot stand at other positions.

    Raises:
        UnsupportedModelError: its layers have states or windows, or blocks are sealed or evicted.
        OptionError: the adapter begins at tokens of the prompt, or prompts read a part.
    """
    cache, loaded = engine.cache, engine.adapters.get(adapter)
    movable = all(isinstance(g.group, CacheGroup) and g.group.keeps_all for g in cache.groups)
    if engine.options.prefill_mass is not None:
        raise OptionError(
            "`prefill_mass` and `compose`: ends of documents whose rows read a part are not kept; "
            "leave it out, or take `recompute` 1, which computes all parts in place"
        )
    if cache.rope_frequencies is None or not movable:
        raise UnsupportedModelError(
            f"{engine.bundle.manifest.name} with KV cache {engine.options.kv_format}: K and V can "
            "be copied to other positions only where all layers attend to all positions, keys "
            "have no norm behind RoPE, and there is neither `kv_budget` nor a format that seals "
            "blocks (k4v4 ...); take `recompute` 1, which computes all parts in place"
        )
    if loaded is not None and loaded.invocation:
        raise OptionError(
            f"adapter {adapter!r} begins at tokens of the prompt, so documents alone have no K and "
            "V of it; take `recompute` 1, which computes all parts in place"
        )


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
        check_composable(engine, adapter)
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
        context, cache = self._context, self._engine.cache
        context.wake(self)  # what it needs more may not be made of its own blocks
        try:
            context.take_back()
            if context.cached < len(context.tokens):
                return False
            source = cache.sequence(tokens, root=context.sequence.root)
            try:
                if len(source) < len(tokens):
                    return False
                append_turned(context.sequence, source, start, cache)
            finally:
                source.close()
            context.tokens += tokens[start:]
            return True
        finally:
            context.rest(self)


def _compute(session: Session) -> int:
    """Compute a session's tokens; returns how many were not found in the KV cache."""
    answer = session.generate(max_tokens=0, time_limit_ms=None)
    if answer.finish_reason != "length":
        raise CancelledError(f"compose: {answer.finish_reason}")
    return answer.stats.prompt_tokens - answer.stats.cached_tokens
