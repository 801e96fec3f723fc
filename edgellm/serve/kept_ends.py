"""Ends of earlier prompts, which later ones have behind a change, as editors send them."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeAlias

from edgellm.cache.prefix_index import common_prefix
from edgellm.engine.adapters import LoadedAdapter
from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.loop import Wait
from edgellm.engine.turned import RECOMPUTE, check_turnable, common_end, keep_end
from edgellm.errors import OptionError, UnsupportedModelError
from edgellm.serve.ask import Ask
from edgellm.serve.events import Client

if TYPE_CHECKING:
    from edgellm.engine.engine import Engine

# Model, salt of the client's blocks, and adapter.
_Key: TypeAlias = tuple[str, str, str | None]
# Prompts that are remembered at most; a list of 4,096 tokens takes 32 kB.
_MOST_PROMPTS = 64


class KeptEnds:
    """Prompts that were computed as a whole, one for each model, client and adapter."""

    def __init__(self) -> None:
        self._prompts: dict[_Key, list[int]] = {}
        self._lock = threading.Lock()

    def begun(
        self,
        engine: Engine,
        tokens: list[int],
        call: Call,
        *,
        model: str,
        ask: Ask,
        client: Client,
    ) -> Generator[Wait, None, Context | None]:
        """Return a context of a prompt in which the end of an earlier one was copied.

        None: the ask wants none, the model's K and V cannot stand at other positions, or less than
        half of what has to be computed could be copied; the earlier prompt is then this one.
        """
        if not ask.cache_reuse or ask.n > 1:
            return None
        key = (model, client.salt, call.options.adapter)
        earlier = self._earlier(key, tokens, least=ask.cache_reuse)
        adapter = engine.adapters.get(call.options.adapter)
        if earlier is tokens or not _turnable(engine, adapter):
            return None
        source = Context(engine, earlier, salt=client.salt, adapter=adapter)
        context = Context(engine, salt=client.salt, adapter=adapter)
        try:
            copied = yield from keep_end(
                engine, context, tokens, source=source, call=call, recompute=RECOMPUTE
            )
        except BaseException:
            context.close()
            raise
        finally:
            source.close()
        if not copied:  # this one is computed as a whole then
            with self._lock:
                self._prompts[key] = tokens
        return context

    def _earlier(self, key: _Key, tokens: list[int], *, least: int) -> list[int]:
        """Return the prompt whose end is to be copied, and remember it; it may be this one."""
        with self._lock:
            earlier = self._prompts.pop(key, [])
            end = common_end(earlier, tokens)
            if end < least or 2 * end < len(tokens) - common_prefix(earlier, tokens):
                earlier = tokens
            self._prompts[key] = earlier  # behind those not used for longer
            if len(self._prompts) > _MOST_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            return earlier


def _turnable(engine: Engine, adapter: LoadedAdapter | None) -> bool:
    try:
        check_turnable(engine, adapter)
    except (OptionError, UnsupportedModelError):
        return False
    return True
