"""A prompt that one model computed, and another one goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inspection import used_blocks

from edgellm.cache.block_store import BlockStore, enclosed, opened
from edgellm.cache.disk_cache import DiskCache
from edgellm.engine.context import Context
from edgellm.engine.hand_over import (
    block_names,
    cached_tokens,
    full_prefix,
    read_prefix,
    write_prefix,
)
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.results import Completion
from edgellm.session import Session

PROMPT = [(7 * i) % 50 + 3 for i in range(3 * BLOCK + 20)]
FULL = 3 * BLOCK


class MemoryStore:
    """Sealed blocks in a dict, at most `room` of them."""

    def __init__(self, room: int = 1000) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.room = room
        self.reads = 0

    def has(self, name: bytes) -> bool:
        return name in self.blocks

    def read(self, name: bytes, *, size: int) -> memoryview | None:
        self.reads += 1
        block = opened(name, self.blocks.get(name, b""), size=size)
        if block is None:
            self.blocks.pop(name, None)
        return block

    def write(self, name: bytes, data: bytes) -> bool:
        if len(self.blocks) == self.room:
            return False
        self.blocks[name] = enclosed(name, data)
        return True

    @contextmanager
    def pin(self, names: Iterable[bytes]) -> Iterator[None]:
        yield


@pytest.fixture
def start(tiny_model: Path) -> Callable[..., LLM]:
    """Loads the model anew, as another process would."""

    def run(**options: object) -> LLM:
        chosen = {"ctx_size": 6 * BLOCK, "cache_size": 16 * BLOCK, **options}
        return load(str(tiny_model), **chosen)  # type: ignore[arg-type]

    return run


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlockStore:
    if request.param == "memory":
        return MemoryStore()
    return DiskCache(tmp_path / "kv", budget=1 << 30)


def ask(llm: LLM, tokens: list[int] = PROMPT, *, salt: str = "", count: int = 40) -> Completion:
    with Session(llm.engine, Context(llm.engine, tokens, salt=salt)) as session:
        return session.generate(max_tokens=count, seed=3, logprobs=3, ignore_eos=True)


def prefill(llm: LLM, store: BlockStore, tokens: list[int] = PROMPT, *, salt: str = "") -> int:
    ask(llm, tokens, salt=salt, count=0)
    return write_prefix(llm.engine, full_prefix(tokens), store, salt=salt)


def read(llm: LLM, store: BlockStore, tokens: list[int] = PROMPT, *, salt: str = "") -> int:
    count = read_prefix(llm.engine, full_prefix(tokens), store, salt=salt)
    assert used_blocks(llm) == 0
    return count


def check_same(a: Completion, b: Completion) -> None:
    """The same bits."""
    assert (a.tokens, a.text, a.logprobs) == (b.tokens, b.text, b.logprobs)


def test_the_answer_has_the_bits_that_it_has_alone(
    start: Callable[..., LLM], store: BlockStore
) -> None:
    alone = ask(start())
    assert prefill(start(), store) == FULL
    other = start()
    assert read(other, store) == FULL
    answer = ask(other)
    assert answer.stats.cached_tokens == FULL
    check_same(answer, alone)


def test_only_what_is_not_there_is_read(start: Callable[..., LLM]) -> None:
    store, other = MemoryStore(), start()
    prefill(start(), store)
    ask(other, PROMPT[:BLOCK])
    assert cached_tokens(other.engine, PROMPT) == BLOCK
    assert read(other, store) == FULL
    assert store.reads == 2
    assert read(other, store) == FULL
    assert store.reads == 2


def test_a_prompt_of_whole_blocks_keeps_its_last_token(start: Callable[..., LLM]) -> None:
    store, prompt = MemoryStore(), PROMPT[: 2 * BLOCK]
    assert prefill(start(), store, prompt) == BLOCK
    other = start()
    assert read(other, store, prompt) == BLOCK
    check_same(ask(other, prompt), ask(start(), prompt))
    assert not full_prefix(PROMPT[:BLOCK])


@pytest.mark.parametrize("lost", range(3))
@pytest.mark.parametrize("how", ["missing", "flipped", "cut", "another"])
def test_what_is_lost_or_damaged_is_computed(
    start: Callable[..., LLM], lost: int, how: str
) -> None:
    store, other = MemoryStore(), start()
    prefill(start(), store)
    name = block_names(other.engine, PROMPT)[lost]
    block = store.blocks[name]
    if how == "missing":
        del store.blocks[name]
    elif how == "flipped":
        store.blocks[name] = block[:-9] + bytes([block[-9] ^ 1]) + block[-8:]
    elif how == "cut":
        store.blocks[name] = block[:-1]
    else:
        store.blocks[name] = store.blocks[block_names(other.engine, PROMPT)[(lost + 1) % 3]]
    assert read(other, store) == lost * BLOCK
    check_same(ask(other), ask(start()))


def test_another_arithmetic_has_other_names(start: Callable[..., LLM]) -> None:
    store = MemoryStore()
    usual = start()
    prefill(usual, store)
    # portable is what a user gets without the native kernels
    decode = "reference" if usual.decode.startswith("portable") else "portable"
    for options in ({"kv_format": "f16"}, {"prefill": "cpu", "decode": decode}):
        assert read(start(**options), store) == 0


def test_salts_keep_clients_apart(start: Callable[..., LLM]) -> None:
    store, other = MemoryStore(), start()
    prefill(start(), store, salt="a")
    assert read(other, store) == 0
    assert read(other, store, salt="b") == 0
    assert read(other, store, salt="a") == FULL
    assert cached_tokens(other.engine, PROMPT) == 0
    assert cached_tokens(other.engine, PROMPT, salt="a") == FULL


def test_a_store_without_room(start: Callable[..., LLM]) -> None:
    store, other = MemoryStore(room=2), start()
    prefill(start(), store)
    assert len(store.blocks) == 2
    assert read(other, store) == 2 * BLOCK
    check_same(ask(other), ask(start()))


def test_a_pool_without_room(start: Callable[..., LLM]) -> None:
    store, other = MemoryStore(), start(ctx_size=5 * BLOCK, cache_size=5 * BLOCK)
    prefill(start(), store)
    with Session(other.engine, Context(other.engine, [5, 6, 7] * BLOCK)) as held:
        held.generate(max_tokens=1)
        free = other.engine.cache.groups[0].pool.available
        count = read_prefix(other.engine, full_prefix(PROMPT), store)
        assert count == min(3, free) * BLOCK
    check_same(ask(other), ask(start()))
