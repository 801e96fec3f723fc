"""Adapters over HTTP: models of their own beside the one that they change."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import Running, running
from tiny_adapters import pairs_of, write_peft
from waiting import until

from edgellm.errors import OptionError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.serve import ModelPool, ServedModel, ServeOptions, served_model
from edgellm.serve.adapters import ServedAdapter
from edgellm.serve.http.fields import Fields
from edgellm.serve.openai.routes import load_adapter as add_adapter
from edgellm.serve.openai.routes import unload_adapter

GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
SIZES: dict[str, Any] = {"ctx_size": 8 * BLOCK, "cache_size": 32 * BLOCK}


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_peft(root / name, pairs_of(tiny_model, seed=seed, size=1.0))
        for seed, name in enumerate(("one", "two", "late"))
    }


@pytest.fixture(scope="module")
def llm(tiny_model: Path, folders: dict[str, Path]) -> LLM:
    adapters = {"one": folders["one"], "two": (folders["two"], 0.5)}
    return load(str(tiny_model), adapters=adapters, **SIZES)


def pool_of(llm: LLM, folders: dict[str, Path], **options: Any) -> ModelPool:
    adapters = {"one": folders["one"], "two": (folders["two"], 0.5)}
    model = ServedModel("tiny", lambda: LLM(llm.engine), adapters=adapters)
    return ModelPool([model], **options)


@pytest.fixture(name="adapted")
def adapted_server(llm: LLM, folders: dict[str, Path]) -> Iterator[Running]:
    pool = pool_of(llm, folders, manage_adapters=True)
    with running(pool, llm, ServeOptions(port=0, grace_s=1)) as one:
        yield one


def text_of(adapted: Running, model: str | None, prompt: str = "some text", **more: Any) -> str:
    reply = adapted.post("/v1/completions", {"model": model, "prompt": prompt, **GREEDY, **more})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == (model or "tiny").removesuffix(":latest")
    return str(reply.json()["choices"][0]["text"])


def test_an_adapter_is_a_model_of_its_own(adapted: Running) -> None:
    found = {model: text_of(adapted, model) for model in ("tiny", "one", "two")}
    assert len(set(found.values())) == 3
    assert text_of(adapted, None) == found["tiny"]
    assert text_of(adapted, "one:latest") == found["one"]
    for name in ("one", None):
        options = {"adapter": name, "max_tokens": 8, "temperature": 0}
        expected = adapted.llm.generate("some text", ignore_eos=True, **options)
        assert found[name or "tiny"] == expected.text


def test_models_are_listed_with_their_parent(adapted: Running) -> None:
    listed = {each["id"]: each for each in adapted.get("/v1/models").json()["data"]}
    assert list(listed) == ["tiny", "one", "two"]
    assert "parent" not in listed["tiny"]
    assert listed["one"]["parent"] == listed["two"]["parent"] == "tiny"
    assert adapted.get("/v1/models/one").json() == listed["one"]
    anthropic = adapted.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [each["id"] for each in anthropic["data"]] == ["tiny", "one", "two"]
    tags = adapted.get("/api/tags").json()["models"]
    parents = {each["name"]: each["details"]["parent_model"] for each in tags}
    assert parents == {"tiny:latest": "", "one:latest": "tiny", "two:latest": "tiny"}


def test_every_dialect_takes_an_adapter(adapted: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "abc"}], "model": "one", **GREEDY}
    with adapted.llm.chat(adapter="one", max_tokens=8, temperature=0, ignore_eos=True) as own:
        expected = own.send("abc").text
    reply = adapted.post("/v1/chat/completions", chat).json()
    assert reply["choices"][0]["message"]["content"] == expected
    assert reply["model"] == "one"
    ollama = {
        "model": "one",
        "messages": chat["messages"],
        "stream": False,
        "options": {"temperature": 0, "num_predict": 8},
    }
    assert adapted.post("/api/chat", ollama).json()["message"]["content"] == expected
    anthropic = {"model": "one", "max_tokens": 8, "temperature": 0, "messages": chat["messages"]}
    content = adapted.post("/v1/messages", anthropic).json()["content"]
    assert "".join(part["text"] for part in content) == expected
    completion = {"prompt": "some text", "n_predict": 8, "temperature": 0, "ignore_eos": True}
    llama = adapted.post("/completion", {**completion, "model": "one"}).json()["content"]
    assert llama == text_of(adapted, "one")


def test_streams_and_several_answers_take_an_adapter(adapted: Running) -> None:
    body = {"model": "one", "prompt": "some text", "stream": True, **GREEDY}
    lines = adapted.post("/v1/completions", body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"one"}
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == text_of(adapted, "one")
    several = adapted.post("/v1/completions", {**body, "stream": False, "n": 3}).json()
    assert [choice["text"] for choice in several["choices"]] == [text] * 3


def test_embeddings_take_an_adapter(adapted: Running) -> None:
    base, one = (
        adapted.post("/v1/embeddings", {"input": "abc", "model": model}).json()
        for model in ("tiny", "one")
    )
    assert one["model"] == "one"
    assert base["data"][0]["embedding"] != one["data"][0]["embedding"]


def test_llama_cpps_clients_name_adapters_by_number(adapted: Running) -> None:
    listed = adapted.get("/lora-adapters").json()
    assert listed == [
        {"id": 0, "path": "one", "scale": 1.0},
        {"id": 1, "path": "two", "scale": 0.5},
    ]
    body = {"prompt": "some text", "n_predict": 8, "temperature": 0, "ignore_eos": True}

    def answer(lora: Any) -> Any:
        return adapted.post("/completion", {**body, "lora": lora})

    one, two = [{"id": 0, "scale": 1.0}], [{"id": 0, "scale": 0}, {"id": 1, "scale": 0.5}]
    assert answer(one).json()["content"] == text_of(adapted, "one")
    assert answer(two).json()["content"] == text_of(adapted, "two")
    assert answer([]).json()["content"] == text_of(adapted, "tiny")
    for lora, text in (
        ([{"id": 0, "scale": 1}, {"id": 1, "scale": 0.5}], "asks for 2 adapters"),
        ([{"id": 7, "scale": 1}], "of 0 to 1"),
        ([{"id": 0, "scale": 0.25}], "served with 1"),
    ):
        reply = answer(lora)
        assert reply.status_code == 400
        assert text in reply.json()["error"]["message"]
    changed = adapted.post("/lora-adapters", [{"id": 0, "scale": 0.5}])
    assert "each names its own" in changed.json()["error"]["message"]


def test_an_unknown_adapter_is_an_unknown_model(adapted: Running) -> None:
    body = {"model": "three", "prompt": "a", **GREEDY}
    for path in ("/v1/completions", "/v1/embeddings"):
        reply = adapted.post(path, {**body, "input": "a"})
        assert reply.status_code == 404
        assert "served are tiny, one, two" in reply.json()["error"]["message"]
    assert adapted.get("/v1/models/three").status_code == 404


def test_adapters_come_and_go(adapted: Running, folders: dict[str, Path]) -> None:
    load_path, unload_path = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    late = {"lora_name": "late", "lora_path": str(folders["late"])}
    assert adapted.post("/v1/completions", {"model": "late", "prompt": "a"}).status_code == 404
    reply = adapted.post(load_path, late)
    assert reply.status_code == 200
    assert reply.text == "Success: LoRA adapter 'late' added successfully."
    assert text_of(adapted, "late") not in (text_of(adapted, None), text_of(adapted, "one"))
    for body, text in (
        (late, "'late' is taken"),
        ({**late, "lora_name": "tiny"}, "'tiny' is taken"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, "not an adapter"),
        ({"lora_path": "/nowhere"}, "lora_name"),
    ):
        reply = adapted.post(load_path, body)
        assert reply.status_code == 400
        assert text in reply.json()["error"]["message"]
    assert adapted.post(load_path, {**late, "base_model_name": "no"}).status_code == 404
    assert adapted.post(unload_path, {"lora_name": "late"}).status_code == 200
    assert adapted.post(unload_path, {"lora_name": "late"}).status_code == 404
    assert adapted.post("/v1/completions", {"model": "late", "prompt": "a"}).status_code == 404


def test_an_adapter_whose_client_goes_away_is_served(
    llm: LLM, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in memory alone: neither served, nor free to be added or dropped."""
    pool, loading, ready = pool_of(llm, folders), threading.Event(), threading.Event()
    load_adapter = LLM.load_adapter

    def slowly(self: LLM, name: str, path: Path) -> None:
        loading.set()
        assert ready.wait(60)
        load_adapter(self, name, path)

    async def run() -> tuple[list[str], list[str]]:
        monkeypatch.setattr(LLM, "load_adapter", slowly)
        call: Any = SimpleNamespace(
            answering=SimpleNamespace(pool=pool), fields=lambda: asyncio.sleep(0, fields)
        )
        client = asyncio.create_task(add_adapter(call))
        await asyncio.to_thread(loading.wait, 60)
        client.cancel()
        with suppress(asyncio.CancelledError):
            await client
        ready.set()
        await asyncio.to_thread(until, lambda: "late" in pool.adapters.all)
        names = list(pool.adapters.all), list(llm.adapters)
        await unload_adapter(call)
        return names

    monkeypatch.setattr(pool.adapters, "check_managed", lambda: None)
    fields = Fields({"lora_name": "late", "lora_path": str(folders["late"])})
    served, loaded = asyncio.run(run())
    assert served == loaded == ["one", "two", "late"]
    assert llm.adapters == ["one", "two"]


def test_answers_on_their_way_outlive_their_adapter(
    adapted: Running, folders: dict[str, Path]
) -> None:
    late = {"lora_name": "late", "lora_path": str(folders["late"])}
    adapted.post("/v1/load_lora_adapter", late)
    body = {"model": "late", "prompt": "some text", **GREEDY, "max_tokens": 300, "stream": True}
    whole = adapted.post("/v1/completions", {**body, "stream": False}).json()["choices"][0]["text"]
    with adapted.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        first = next(line for line in lines if line.startswith("data: {"))
        assert adapted.post("/v1/unload_lora_adapter", {"lora_name": "late"}).status_code == 200
        data = [first, *(line for line in lines if line.startswith("data: {"))]
    parts = [json.loads(line[6:])["choices"] for line in data]
    assert "".join(choice["text"] for choices in parts for choice in choices) == whole
    until(lambda: adapted.idle)


def test_clients_change_nothing_unless_they_may(llm: LLM, folders: dict[str, Path]) -> None:
    pool = pool_of(llm, folders)
    with running(pool, llm, ServeOptions(port=0, grace_s=1)) as server:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            reply = server.post(path, {"lora_name": "one", "lora_path": "/"})
            assert reply.status_code == 400
            assert "--manage-adapters" in reply.json()["error"]["message"]


def test_names_are_taken_once(llm: LLM, folders: dict[str, Path]) -> None:
    adapters = {"tiny": folders["one"]}
    with pytest.raises(OptionError, match="'tiny' of an adapter is taken"):
        ModelPool([ServedModel("tiny", lambda: llm, adapters=adapters)])
    with pytest.raises(OptionError, match="`manage_adapters`"):
        pool_of(llm, folders, manage_adapters="yes")


def test_a_model_that_is_loaded_again_has_the_same_adapters(
    tiny_model: Path, folders: dict[str, Path], edgellm_home: Path
) -> None:
    """Also those that clients have added, and without those that they have dropped."""
    adapters = {"one": folders["one"], "two": folders["two"]}
    model = served_model(str(tiny_model), {"adapters": adapters, **SIZES}, id="tiny")
    pool = ModelPool([model], manage_adapters=True)

    async def run() -> list[list[str]]:
        names = []
        async with pool.use("one") as llm:
            names.append(llm.adapters)
        pool.adapters.remove("two")
        pool.adapters.add("late", ServedAdapter("tiny", folders["late"]))
        pool.keep("tiny", 0)
        assert pool.loaded() == {}
        async with pool.use("late") as llm:
            names.append(llm.adapters)
        await pool.close()
        return names

    assert asyncio.run(run()) == [["one", "two"], ["one", "late"]]


def test_an_adapter_that_took_a_name_is_there_after_the_model_was_loaded_again(
    tiny_model: Path, folders: dict[str, Path], edgellm_home: Path
) -> None:
    model = served_model(str(tiny_model), {"adapters": {"one": folders["one"]}, **SIZES}, id="tiny")
    pool = ModelPool([model], manage_adapters=True)

    def digest(llm: LLM) -> str:
        loaded = llm.engine.adapters.get("one")
        assert loaded is not None
        return loaded.digest

    async def run() -> list[str]:
        found = []
        async with pool.use("one") as llm:
            found.append(digest(llm))
        pool.adapters.add("one", ServedAdapter("tiny", folders["two"]))
        pool.keep("tiny", 0)
        async with pool.use("one") as llm:
            found.append(digest(llm))
        pool.adapters.forget("tiny")
        assert not pool.adapters.all
        await pool.close()
        return found

    first, second = asyncio.run(run())
    assert first != second
