"""`/props`, `/slots`, `/metrics`, `/tokenize`, `/embedding` and the like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from serving import Running

from edgellm.results import Stats
from edgellm.serve.metrics import Metrics

STATS = Stats(0.0, 1, 0, 0.0, 1, 0.0, 0, {}, "int8", "native", 0)


def refused(reply: Any, status: int, kind: str) -> str:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["type"]) == (status, kind)
    return str(error["message"])


@pytest.mark.parametrize("text", ["hello", "", "é🙂 日本", "a<s>b", "\r\n\t\0"])
def test_tokens_and_back(server: Running, text: str) -> None:
    tokens = server.post("/tokenize", {"content": text}).json()["tokens"]
    assert tokens == server.llm.engine.tokenizer.encode(text, add_bos=False, parse_special=True)
    assert server.post("/detokenize", {"tokens": tokens}).json()["content"] == text


def test_options_of_tokenize(server: Running) -> None:
    plain = server.post("/tokenize", {"content": "<s>", "parse_special": False}).json()["tokens"]
    assert len(plain) == 3
    assert len(server.post("/tokenize", {"content": "<s>"}).json()["tokens"]) == 1
    added = server.post("/tokenize", {"content": "a", "add_special": True}).json()["tokens"]
    assert added == server.llm.engine.tokenizer.encode("a")
    pieces = server.post("/tokenize", {"content": "hé", "with_pieces": True}).json()["tokens"]
    assert [each["piece"] for each in pieces] == ["h", [0xC3], [0xA9]]


@pytest.mark.parametrize("name", ["content", "input"])
def test_embeddings_are_openais(server: Running, name: str) -> None:
    texts = ["a cat", "the quick brown fox", "x"]
    data = server.post("/v1/embeddings", {"input": texts}).json()["data"]
    expected = [{"index": i, "embedding": [one["embedding"]]} for i, one in enumerate(data)]
    asked = {name: texts, "embd_normalize": 2, "model": "made up"}
    assert server.post("/embedding", asked).json() == expected
    tokens = server.post("/tokenize", {"content": texts[0], "add_special": True}).json()["tokens"]
    for one in (texts[0], tokens):
        assert server.post("/embedding", {name: one}).json() == expected[:1]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({}, 400, "invalid_request_error"),
        ({"content": ""}, 400, "invalid_request_error"),
        ({"content": []}, 400, "invalid_request_error"),
        ({"input": ["a", 5]}, 400, "invalid_request_error"),
        ({"content": "a", "embd_normalize": -2}, 400, "invalid_request_error"),
        ({"content": "a", "embd_normalize": -1}, 501, "not_supported_error"),
        ({"content": "a" * 2000}, 400, "exceed_context_size_error"),
    ],
)
def test_wrong_embeddings(server: Running, body: dict[str, Any], status: int, kind: str) -> None:
    assert refused(server.post("/embedding", body), status, kind)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"content": 5}),
        ("/tokenize", {"content": ["a"]}),
        ("/tokenize", {"content": "a", "with_pieces": 1}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [320]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {"tokens": [1.5]}),
        ("/apply-template", {}),
        ("/apply-template", {"messages": []}),
        ("/apply-template", {"messages": [{"role": "nobody", "content": "a"}]}),
    ],
)
def test_wrong_fields(server: Running, path: str, body: dict[str, Any]) -> None:
    refused(server.post(path, body), 400, "invalid_request_error")


def test_apply_template(server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": "<s>"}]
    body = server.post("/apply-template", {"messages": messages}).json()
    assert body == {"prompt": "<|user|>hi<|user|><s>"}


def test_props(server: Running) -> None:
    props = server.get("/props").json()
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == server.llm.ctx_size
    assert settings["params"]["top_k"] == 40
    assert props["total_slots"] == 8
    assert props["chat_template"].startswith("{% for m")
    assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
    assert "/" not in props["model_path"]
    refused(server.post("/props", {"chat_template": "x"}), 501, "not_supported_error")
    refused(server.get("/props", params={"model": "no"}), 404, "not_found_error")


def test_slots(server: Running) -> None:
    slots = server.get("/slots").json()
    assert [slot["id"] for slot in slots] == list(range(8))
    assert not any(slot["is_processing"] for slot in slots)
    assert server.get("/slots", params={"fail_on_no_slot": "1"}).status_code == 200
    for action in ("save", "restore", "erase"):
        reply = server.post(f"/slots/0?action={action}", {"filename": "../x"})
        assert action in refused(reply, 501, "not_supported_error")


def test_no_slot_is_free(server: Running) -> None:
    seen = server.answering.metrics
    seen.running += 8
    try:
        assert all(slot["is_processing"] for slot in server.get("/slots").json())
        full = server.get("/slots", params={"fail_on_no_slot": "1"})
        refused(full, 503, "unavailable_error")
    finally:
        seen.running -= 8


def test_adapters(server: Running) -> None:
    assert server.get("/lora-adapters").json() == []
    changed = server.post("/lora-adapters", [{"id": 0, "scale": 1}])
    refused(changed, 501, "not_supported_error")


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health(server: Running, path: str) -> None:
    assert server.get(path).json() == {"status": "ok"}


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics(server: Running) -> None:
    asked = {"prompt": "@count" * 10, "n_predict": 5, "ignore_eos": True}
    before = samples(server.get("/metrics").text)
    timings = [server.post("/completion", asked).json()["timings"] for _ in range(2)]
    reply = server.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    after = samples(reply.text)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["llamacpp:prompt_tokens_total"] == 61
    assert grown["llamacpp:tokens_predicted_total"] == 10
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:prefix_cache_queries_total"] == 120
    assert grown["vllm:prefix_cache_hits_total"] == 59
    assert grown['vllm:request_success_total{finished_reason="length"}'] == 2
    for name, key in (("draft", "draft_n"), ("accepted", "draft_n_accepted")):
        drafted = sum(each.get(key, 0) for each in timings)
        assert grown[f"vllm:spec_decode_num_{name}_tokens_total"] == drafted
    assert grown["vllm:time_to_first_token_seconds_count"] == 2
    assert grown['vllm:time_to_first_token_seconds_bucket{le="+Inf"}'] == 2
    assert after["llamacpp:requests_processing"] == after["vllm:num_requests_waiting"] == 0
    for line in reply.text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ", "llamacpp:", "vllm:")), line


def test_drafts_are_counted() -> None:
    seen = Metrics()
    for drafted, accepted in ((7, 3), (2, 0)):
        stats = replace(STATS, drafted_tokens=drafted, accepted_tokens=accepted)
        seen.answered(stats, "stop", seconds=1.0, first=True)
    assert (seen.drafted_tokens, seen.accepted_tokens) == (9, 3)


def test_without_metrics(serving: Callable[..., Running]) -> None:
    refused(serving(metrics=False).get("/metrics"), 501, "not_supported_error")


def test_all_but_health_and_the_page_need_the_key(serving: Callable[..., Running]) -> None:
    server = serving(api_keys=("secret",))
    for path in ("/props", "/slots", "/metrics", "/lora-adapters"):
        refused(server.get(path), 401, "authentication_error")
        with_key = server.get(path, headers={"Authorization": "Bearer secret"})
        assert with_key.status_code == 200
    for path in ("/completion", "/infill", "/tokenize", "/detokenize", "/apply-template"):
        refused(server.post(path, {}), 401, "authentication_error")
    assert server.get("/health").status_code == 200
    assert server.get("/").status_code == 200
