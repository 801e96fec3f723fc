"""Prefill of prompts by one replica for another one that answers.

A prefill replica computes a prompt, writes its KV blocks to Ray's object store and returns
references to them. The replica that answers reads the blocks and goes on from there. The answer has
the same bits as without a prefill replica, as blocks are named by their content (see
`hand_over.py`). The replica that answers computes blocks that do not arrive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray

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
from edgellm.ray.object_store import ObjectStore
from edgellm.serve.served import served_model
from edgellm.session import Session

_log = logging.getLogger(__name__)


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

        The blocks are sealed (see `block_store.py`).
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
