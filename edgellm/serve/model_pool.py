"""Pool of served models: each is loaded for its first request and unloaded when idle."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from edgellm.backends.selection import select
from edgellm.checks import check_flag, check_number
from edgellm.engine.loaded_model import planned_memory
from edgellm.errors import MemoryEstimateError, OptionError
from edgellm.llm import LLM, load
from edgellm.options import EngineArguments, EngineOptions
from edgellm.progress import ProgressCallback
from edgellm.serve.model_card import ModelCard, card_of, card_on_disk
from edgellm.serve.request_error import RequestError, load_error
from edgellm.store.prepare import prepare, prepared
from edgellm.store.sources import check_name

T = TypeVar("T")
_log = logging.getLogger(__name__)
_WITH_ID = re.compile(r"([\w.:-]+)=(?!=)")  # not the `==` of pypi:package==version
# Seconds after which a client may ask again for a model that has no room in memory now.
_RETRY_S = 5


@dataclass(frozen=True)
class ServedModel:
    """A model that clients may name.

    Attributes:
        id: id by which clients name the model.
        open: function that loads the model; takes seconds, or minutes where it is exported first.
        needed_bytes: function that estimates the model's memory; may take as long as `open`.
        card: function that reads the model's card without loading, downloading or exporting it;
            None where it would have to be downloaded or exported. May take a second.
        check: function that refuses at once a name that can never be loaded.
    """

    id: str
    open: Callable[[], LLM]
    needed_bytes: Callable[[], int] = lambda: 0
    card: Callable[[], ModelCard | None] = lambda: None
    check: Callable[[], None] = lambda: None


def served_model(
    name: str, arguments: EngineArguments, *, progress: ProgressCallback | None = None
) -> ServedModel:
    """Return the model that the command line names.

    Args:
        name: name as for `edgellm.load`, or `ID=NAME` to choose the id. Without `ID=` the id is
            the name without `hf:` and `.gguf`, and of a path the last part.
        progress: called with the progress of download and export whenever the model is loaded.

    Raises:
        OptionError: `ID=` without a name.
    """
    with_id = _WITH_ID.match(name)
    given, source = ("", name) if with_id is None else (with_id[1], name[with_id.end() :])
    if not source:
        raise OptionError(f"model {name!r}: write ID=NAME or NAME")
    options = EngineOptions(**arguments)

    def needed_bytes() -> int:
        bundle = prepare(source, precisions=select(options).precisions, progress=progress)
        precisions = select(options).precisions(bundle.config)
        estimate = planned_memory(bundle, options, precisions)
        return estimate.weights + estimate.kv_cache

    def card() -> ModelCard | None:
        bundle = prepared(source, precisions=select(options).precisions)
        return None if bundle is None else card_on_disk(bundle, options)

    return ServedModel(
        given or _public_id(source),
        lambda: load(source, progress=progress, **arguments),
        needed_bytes,
        card,
        partial(check_name, source),
    )


def _public_id(source: str) -> str:
    """Return the id of a model's source, without folders of this machine."""
    if source.startswith("hf:"):
        return source.removeprefix("hf:").partition("@")[0]
    last = Path(source.rpartition("!")[2]).name if "/" in source or "!" in source else source
    return last.removesuffix(".gguf") or source


@dataclass(eq=False)
class _Slot:
    """A served model and its state in the pool.

    Attributes:
        loading: task that loads the model for all requests that wait for it.
        bytes: estimated memory of the model.
        users: number of requests that use the model now.
        used_at: time of the last use, on the clock of `time.monotonic`.
        keep_s: seconds that a client wants the model to stay loaded when idle; None: the pool's
            `idle_unload_s`.
    """

    model: ServedModel
    llm: LLM | None = None
    card: ModelCard | None = None
    loading: asyncio.Task[LLM] | None = None
    bytes: int = 0
    users: int = 0
    used_at: float = 0.0
    keep_s: float | None = None


class ModelPool:
    """Served models by id.

    Everything but `ids` belongs to one event loop.

    Args:
        memory_limit_bytes: limit of the estimated memory of all loaded models together; None: the
            memory available when a model is loaded.
        idle_unload_s: seconds after which a model without requests is unloaded; None: a model is
            unloaded only to make room for another one.
        any_model: whether a name that no model has means the first one.

    Raises:
        OptionError: a limit is not allowed, there are no models, or two have the same id.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        memory_limit_bytes: int | None = None,
        idle_unload_s: float | None = None,
        any_model: bool = False,
    ) -> None:
        check_flag("any_model", any_model)
        if memory_limit_bytes is not None:
            check_number("memory_limit_bytes", memory_limit_bytes, 1, 1 << 60, whole=True)
        if idle_unload_s is not None:
            check_number("idle_unload_s", idle_unload_s, 0.05, 1 << 30)
        ids = [model.id for model in models]
        if not ids or len(set(ids)) < len(ids):
            raise OptionError(
                f"models to serve are {', '.join(ids) or 'none'}; at least one is needed, and each "
                "under an id of its own (`ID=NAME`)"
            )
        self.started_at = int(time.time())
        self._slots = {model.id: _Slot(model) for model in models}
        self._memory_limit_bytes = memory_limit_bytes
        self._idle_unload_s = idle_unload_s
        self._any_model = any_model
        self._threads = ThreadPoolExecutor(1, "edgellm-load")
        self._one_load = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    @property
    def ids(self) -> list[str]:
        """Ids of all served models, the default model first."""
        return list(self._slots)

    def loaded(self) -> dict[str, LLM]:
        """Return the models that are in memory now, by id."""
        return {id: slot.llm for id, slot in self._slots.items() if slot.llm is not None}

    def resolve(self, name: str | None) -> str:
        """Return the id of the model that a client names.

        No name means the first model. A suffix `:latest`, which Ollama's clients add, is ignored.

        Raises:
            RequestError: no model has this name.
        """
        if not name:
            return self.ids[0]
        for id in (name, name.removesuffix(":latest")):
            if id in self._slots:
                return id
        if self._any_model:
            return self.ids[0]
        raise RequestError(
            "not_found",
            f"there is no model {name[:100]!r} here; served are {', '.join(self.ids)} (with "
            "`any_model` other names mean the first one)",
            param="model",
            code="model_not_found",
        )

    def known(self, id: str) -> ModelCard | None:
        """Return the card of a model that was loaded or described before; None otherwise."""
        return self._slots[id].card

    async def card(self, name: str | None) -> ModelCard | None:
        """Return the card of a model, without loading it or keeping it loaded for longer.

        Returns:
            None where the model would have to be downloaded or exported first.

        Raises:
            RequestError: no model has this name, or its files cannot be read.
        """
        slot = self._slots[self.resolve(name)]
        if slot.llm is not None:
            slot.card = await asyncio.to_thread(card_of, slot.llm.engine)
        elif slot.card is None:
            try:
                slot.card = await asyncio.to_thread(slot.model.card)
            except Exception as error:
                raise load_error(slot.model.id, error) from None
        return slot.card

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[LLM]:
        """Yield a model, loaded if it was not, and keep it loaded while the context is open.

        Raises:
            RequestError: no model has this name, there is no room for it, or it cannot be loaded.
        """
        slot = self._slots[self.resolve(name)]
        slot.users += 1
        try:
            yield slot.llm if slot.llm is not None else await self._loaded(slot)
        finally:
            slot.users -= 1
            slot.used_at = time.monotonic()

    def put(self, id: str, llm: LLM) -> None:
        """Take over a model that was loaded outside the pool.

        Raises:
            OptionError: the model alone needs more than `memory_limit_bytes`.
        """
        slot, limit = self._slots[id], self._memory_limit_bytes
        if limit is not None:
            slot.bytes = slot.model.needed_bytes()
            if slot.bytes > limit:
                raise OptionError(
                    f"the model {id!r} needs about {_mib(slot.bytes)} MiB, and all models may "
                    f"take {limit >> 20}; raise `memory_limit_bytes` (--memory-limit-mib) or load "
                    "a smaller one"
                )
        slot.llm, slot.used_at = llm, time.monotonic()

    async def start(self) -> None:
        """Load the first model, and begin to unload idle models.

        Raises:
            EdgeLLMError: the model cannot be loaded.
            RequestError: the model needs more than `memory_limit_bytes`.
        """
        await self._load(self._slots[self.ids[0]])
        self._watch = asyncio.create_task(self._unload_idle())

    async def close(self) -> None:
        """Unload all models, after those being loaded."""
        tasks: list[asyncio.Task[LLM] | asyncio.Task[None]] = [
            slot.loading for slot in self._slots.values() if slot.loading is not None
        ]
        if self._watch is not None:
            self._watch.cancel()
            tasks.append(self._watch)
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot in self._slots.values():
            self._unload(slot)
        self._threads.shutdown(wait=False)

    async def _loaded(self, slot: _Slot) -> LLM:
        """Load a model once for all requests that wait for it, and return it.

        The load goes on when these requests are cancelled.
        """
        if slot.loading is None:
            slot.loading = asyncio.create_task(self._load(slot))
            slot.loading.add_done_callback(lambda task: _done(slot, task))
        try:
            return await asyncio.shield(slot.loading)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise load_error(slot.model.id, error) from None

    async def _load(self, slot: _Slot) -> LLM:
        async with self._one_load:
            if slot.llm is None:
                slot.bytes = await self._in_thread(slot.model.needed_bytes)
                self._make_room(slot)
                slot.llm = await self._opened(slot)
                slot.used_at = time.monotonic()
            if slot.card is None:
                slot.card = await asyncio.to_thread(card_of, slot.llm.engine)
            return slot.llm

    async def _opened(self, slot: _Slot) -> LLM:
        """Load a model; while there is not enough memory, unload the model idle for longest."""
        while True:
            try:
                return await self._in_thread(slot.model.open)
            except MemoryEstimateError:
                if not self._unload_oldest():
                    raise

    def _make_room(self, slot: _Slot) -> None:
        limit = self._memory_limit_bytes
        if limit is None:
            return
        if slot.bytes > limit:
            raise RequestError(
                "not_supported",
                f"the model {slot.model.id!r} needs about {_mib(slot.bytes)} MiB; this server has "
                f"{limit >> 20} for models",
            )
        while slot.bytes + sum(s.bytes for s in self._slots.values() if s.llm is not None) > limit:
            if not self._unload_oldest():
                raise RequestError(
                    "overloaded",
                    f"other models are in use, and beside them is no room for {slot.model.id!r}",
                    retry_after_s=_RETRY_S,
                )

    def _unload_oldest(self) -> bool:
        """Unload the model that has been idle for longest; False if no model is idle."""
        idle = [s for s in self._slots.values() if s.llm is not None and not s.users]
        if not idle:
            return False
        self._unload(min(idle, key=lambda slot: slot.used_at))
        return True

    def _unload(self, slot: _Slot) -> None:
        if slot.llm is not None:
            _log.info("unloading %s", slot.model.id)
            slot.llm = None  # not closed: that would wait for the disk
        slot.keep_s = None

    def keep(self, name: str | None, seconds: float | None) -> None:
        """Set the idle time after which a model is unloaded, instead of `idle_unload_s`.

        The setting holds until the model is unloaded. The model still makes room for others.

        Args:
            seconds: idle time; infinite: never unload; None: `idle_unload_s` again.

        Raises:
            RequestError: no model has this name.
        """
        slot = self._slots[self.resolve(name)]
        slot.keep_s = seconds
        if seconds == 0 and not slot.users and slot.loading is None:
            self._unload(slot)

    def unloads_in(self, id: str) -> float:
        """Return the seconds until an unused model is unloaded; infinite: never."""
        slot = self._slots[id]
        idle_s = 0.0 if slot.users else time.monotonic() - slot.used_at
        return max(0.0, self._stays_s(slot) - idle_s)

    def _stays_s(self, slot: _Slot) -> float:
        if slot.keep_s is not None:
            return slot.keep_s
        return math.inf if self._idle_unload_s is None else self._idle_unload_s

    async def _unload_idle(self) -> None:
        every_s = min(1.0, (self._idle_unload_s or 4.0) / 4)
        while True:
            await asyncio.sleep(every_s)
            for slot in self._slots.values():
                idle = not slot.users and slot.loading is None
                if idle and time.monotonic() - slot.used_at >= self._stays_s(slot):
                    self._unload(slot)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def _done(slot: _Slot, task: asyncio.Task[LLM]) -> None:
    slot.loading = None
    with suppress(asyncio.CancelledError):
        task.exception()  # retrieved, because the requests that waited for it may be gone


def _mib(count: int) -> int:
    """Convert bytes to MiB, rounded up."""
    return -(-count >> 20)
