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
# Prompts of a key that are remembered, such as those of several files, and keys. A list of 4,096
# tokens takes 32 kB, and is compared with a prompt in about a millisecond.
_PROMPTS, _KEYS = 4, 16


class KeptEnds:
    """Prompts that were computed as a whole, a few for each model, client and adapter."""

    def __init__(self) -> None:
        self._prompts: dict[_Key, list[list[int]]] = {}
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
        half of what has to be computed could be copied; this one is then remembered.
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
            self._replace(key, earlier, tokens)
        return context

    def _earlier(self, key: _Key, tokens: list[int], *, least: int) -> list[int]:
        """Return the prompt whose end is to be copied, and remember it; it may be this one."""
        with self._lock:
            prompts = self._prompts.pop(key, [])
            earlier = max(prompts, key=lambda each: common_end(each, tokens), default=[])
            end = common_end(earlier, tokens)
            if end < least or 2 * end < len(tokens) - common_prefix(earlier, tokens):
                earlier = tokens
            others = [each for each in prompts if each is not earlier and each != tokens]
            # behind those not used for longer
            self._prompts[key] = [*others, earlier][-_PROMPTS:]
            if len(self._prompts) > _KEYS:
                del self._prompts[next(iter(self._prompts))]
            return earlier

    def _replace(self, key: _Key, earlier: list[int], tokens: list[int]) -> None:
        with self._lock:
            prompts = self._prompts.get(key, [])
            self._prompts[key] = [tokens if each is earlier else each for each in prompts]


def _turnable(engine: Engine, adapter: LoadedAdapter | None) -> bool:
    try:
        check_turnable(engine, adapter)
    except (OptionError, UnsupportedModelError):
        return False
    return True
