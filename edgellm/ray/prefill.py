"""Prefill of prompts by one replica for another one that answers.

A prefill replica computes a prompt, writes its KV blocks to Ray's object store and returns
references to them. The replica that answers reads the blocks and goes on from there. The answer has
the same bits as without a prefill replica, as blocks are named by their content (see
`hand_over.py`). The replica that answers computes blocks that do not arrive.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

from edgellm.cache.block_store import enclosed, opened
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.hand_over import (
    block_names,
    cached_tokens,
    full_prefix,
    read_prefix,
    write_prefix,
)
from edgellm.llm import LLM, LoadArguments
from edgellm.options import EngineArguments
from edgellm.serve.served import served_model
from edgellm.session import Session

# Seconds to wait for a block that another node sends.
_READ_TIMEOUT_S = 10
_log = logging.getLogger(__name__)


class ObjectStore:
    """A block store of the blocks that this process has references to.

    A block exists as long as some process has a reference to it, and the process that wrote it
    lives. References that `references` returns keep blocks for the process that they are sent to.

    Args:
        budget: maximum of bytes of written blocks; the last used are kept.
        references: references by name to blocks that another process has written.
    """

    def __init__(
        self, *, budget: int = 0, references: Mapping[bytes, ray.ObjectRef] | None = None
    ) -> None:
        self._budget = budget
        self._references = OrderedDict(references or {})
        self._sizes: dict[bytes, int] = {}
        self._pinned: Counter[bytes] = Counter()
        self._lock = threading.RLock()

    def has(self, name: bytes) -> bool:
        with self._lock:
            return name in self._references

    def read(self, name: bytes, *, size: int) -> memoryview | None:
        """Read a block, see `BlockStore`; the view is of the object's own memory, not a copy."""
        with self._lock:
            reference = self._references.get(name)
        if reference is None:
            return None
        try:
            data = ray.get(reference, timeout=_READ_TIMEOUT_S)
        except RayError as error:  # its process or node is gone
            _log.warning("a KV block was lost on its way: %s", type(error).__name__)
            block = None
        else:
            block = opened(name, memoryview(data), size=size)
            if block is None:
                _log.warning("a KV block came damaged, or under a wrong name")
        with self._lock:
            if block is None:
                self._drop(name)
            elif name in self._references:
                self._references.move_to_end(name)
        return block

    def write(self, name: bytes, data: bytes) -> bool:
        """Store a block, see `BlockStore`; False if the object store is full."""
        # numpy arrays are read without a copy
        block = np.frombuffer(enclosed(name, data), np.uint8)
        try:
            reference = ray.put(block)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            _log.warning("Ray's object store took no KV block: %s", type(error).__name__)
            return False
        with self._lock:
            self._references[name] = reference
            self._references.move_to_end(name)
            self._sizes[name] = block.nbytes
            self._make_room()
        return True

    @contextmanager
    def pin(self, names: Iterable[bytes]) -> Iterator[None]:
        """Pin blocks, see `BlockStore`; written blocks may exceed the budget meanwhile."""
        pinned = Counter(names)
        with self._lock:
            self._pinned += pinned
        try:
            yield
        finally:
            with self._lock:
                self._pinned -= pinned
                self._make_room()

    def references(self, names: Iterable[bytes]) -> dict[bytes, ray.ObjectRef]:
        """Return the references by name of those blocks that exist, to send to another process."""
        with self._lock:
            return {name: self._references[name] for name in names if name in self._references}

    def fetch(self, *, timeout_s: float) -> None:
        """Wait until all blocks are in this machine's memory, so that reading takes no time.

        Blocks that have not arrived after `timeout_s` are dropped.
        """
        with self._lock:
            names = {reference: name for name, reference in self._references.items()}
        if not names:
            return
        _, late = ray.wait(list(names), num_returns=len(names), timeout=timeout_s)
        with self._lock:
            for reference in late:
                self._drop(names[reference])

    def _make_room(self) -> None:
        total = sum(self._sizes.values())
        for name in list(self._references):
            if total <= self._budget:
                return
            if name in self._sizes and name not in self._pinned:
                total -= self._sizes[name]
                self._drop(name)

    def _drop(self, name: bytes) -> None:
        self._references.pop(name, None)
        self._sizes.pop(name, None)


@dataclass(frozen=True)
class PrefillRequest:
    """A prompt for a prefill replica to compute.

    Attributes:
        tokens: token ids of the prompt's full blocks.
        salt: salt of the blocks' names.
        cached: number of leading tokens whose blocks the requesting replica has already.
        prefix: names of the prompt's blocks, by which the request is routed.
    """

    tokens: Sequence[int]
    salt: str
    cached: int
    prefix: list[bytes]


class PrefillReplica:
    """A replica that computes prompts, many at once, and keeps their blocks in Ray's object store.

    Args:
        model: model name, as in `edgellm serve MODEL`.
        engine: fields of `EngineOptions`.
        hand_over_bytes: maximum of bytes of blocks kept for further requests.
    """

    def __init__(self, model: str, engine: EngineArguments, hand_over_bytes: int) -> None:
        arguments = cast(LoadArguments, {**engine, "draft": None})  # it answers nothing
        self._llm: LLM = served_model(model, arguments).open()
        self._store = ObjectStore(budget=hand_over_bytes)

    async def compute(self, request: PrefillRequest) -> dict[bytes, ray.ObjectRef]:
        """Compute a prompt, and return references by name to its blocks after the cached tokens.

        The blocks are enclosed (see `block_store.py`).
        """
        engine, tokens, salt = self._llm.engine, request.tokens, request.salt
        names = block_names(engine, tokens, salt=salt)
        wanted = block_names(engine, tokens[: request.cached], salt=salt)
        with self._store.pin(names):
            if await asyncio.to_thread(cached_tokens, engine, tokens, salt=salt) < len(tokens):
                with Session(engine, Context(engine, tokens, salt=salt)) as session:
                    await session.agenerate(max_tokens=0)
            await asyncio.to_thread(write_prefix, engine, tokens, self._store, salt=salt)
            return self._store.references(names[len(wanted) :])


class RemotePrefill:
    """A `BringPrefix` of an `Answering` that has prompts computed by prefill replicas.

    Args:
        replicas: handle of the deployment of prefill replicas.
        min_tokens, timeout_s: see `Arguments`.
    """

    def __init__(self, replicas: Any, *, min_tokens: int, timeout_s: float) -> None:
        self._replicas = replicas
        self._min_tokens = min_tokens
        self._timeout_s = timeout_s

    async def __call__(self, engine: Engine, prompt: Sequence[int], salt: str) -> None:
        tokens = full_prefix(prompt)
        cached = await asyncio.to_thread(cached_tokens, engine, tokens, salt=salt)
        if len(tokens) - cached < self._min_tokens:
            return
        names = block_names(engine, tokens, salt=salt)
        try:
            async with asyncio.timeout(self._timeout_s):
                references = await self._replicas.compute.remote(
                    PrefillRequest(tokens, salt, cached, names)
                )
        except Exception as error:
            _log.warning("no prefill replica computed a prompt (%r); it is computed here", error)
            return
        store = ObjectStore(references=references)
        await asyncio.to_thread(store.fetch, timeout_s=self._timeout_s)
        there = await asyncio.to_thread(read_prefix, engine, tokens, store, salt=salt)
        if there < len(tokens):
            _log.warning(
                "of %d tokens that were computed elsewhere %d arrived; the rest is computed here",
                len(tokens), there,
            )  # fmt: skip
