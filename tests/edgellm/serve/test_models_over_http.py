"""Models of a pool as clients see them: listed, looked at, pulled and deleted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loads import HUB, Loads
from serving import Running, running, served
from waiting import Clock

from edgellm import LLM, Progress
from edgellm.progress import ProgressCallback
from edgellm.serve import ModelPool, ServedModel, ServeOptions, served_model


def test_models_come_and_go_over_http(tiny: LLM, loads: Loads) -> None:
    """Ollama's and llama.cpp's routes."""

    def pull(name: str, progress: ProgressCallback) -> ServedModel:
        def needed() -> int:
            progress(Progress("exporting", 1, 2))
            return 100

        return replace(loads.model(name), needed_bytes=needed)

    pool = ModelPool([served(tiny), loads.model("b")], pull=pull)
    with running(pool, tiny, ServeOptions(port=0, grace_s=1)) as server:
        reply = server.post("/api/pull", {"model": HUB})
        lines = [json.loads(line) for line in reply.text.splitlines()]
        assert [line["status"] for line in lines] == ["pulling manifest", "exporting", "success"]
        assert (lines[1]["completed"], lines[1]["total"]) == (1, 2)
        assert server.post("/api/pull", {"model": HUB, "stream": False}).json() == {
            "status": "success"
        }
        refused = server.post("/api/pull", {"model": "/etc/passwd"})
        assert refused.status_code == 404
        assert server.post("/models/load", {"model": HUB}).json() == {"success": True}
        status = {m["id"]: m["status"]["value"] for m in server.get("/v1/models").json()["data"]}
        assert status == {"tiny": "loaded", "b": "unloaded", HUB: "loaded"}
        assert server.post("/models/unload", {"model": HUB}).json() == {"success": True}
        assert HUB not in pool.loaded()
        with server.client() as client:
            gone = client.request("DELETE", "/api/delete", json={"model": HUB})
        assert gone.status_code == 200
        assert pool.ids == ["tiny", "b"]
    closed = ModelPool([served(tiny)])
    with running(closed, tiny, ServeOptions(port=0, grace_s=1)) as server:
        reply = server.post("/api/pull", {"model": HUB})
        assert reply.status_code == 400
        assert "--manage-models" in reply.text


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
        assert loaded[3].pop("status") == {"value": "loaded"}
        assert unloaded[3].pop("status") == {"value": "unloaded"}
        assert unloaded[0].pop("is_sleeping") is True
        renamed = json.loads(json.dumps(unloaded).replace("m-two", "m-one"))
        assert renamed[:3] == loaded[:3]
        assert unloaded[0]["default_generation_settings"]["n_ctx"] == tiny.ctx_size
        assert server.post("/api/generate", {"model": "m-one", "keep_alive": 0}).status_code == 200
        assert pool.loaded() == {}
        again = known(server, "m-one")
        assert again[0].pop("is_sleeping") is True
        assert again[3].pop("status") == {"value": "unloaded"}
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
