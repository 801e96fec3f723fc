"""Replicas, hand-over and Ray Data on one machine, with the default model.

Ray is half a GB, so it is not among what the tests install: `pip install -e ".[test,ray]"`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from waiting import until

import edgellm.ray
from edgellm.engine.context import Context
from edgellm.engine.hand_over import block_names, cached_tokens, full_prefix, read_prefix
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.session import Session
from edgellm.store.bundle import Bundle

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
SYSTEM = " ".join(f"rule {i}: be brief." for i in range(100))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray at the loopback address: CPUs for two actors, and one for what feeds them."""
    # before it is imported: else its processes speak to each other over the machine's own address
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray = pytest.importorskip("ray", reason="needs Ray, half a GB: ray[data,serve]")
    pytest.importorskip("ray.serve", reason="needs Ray Serve: ray[serve]")
    ray.init(
        address="local",
        num_cpus=3,
        object_store_memory=300 << 20,
        include_dashboard=False,
        log_to_driver=False,
    )
    assert ray.nodes()[0]["NodeManagerAddress"] == "127.0.0.1"
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def alone(smollm2: Bundle) -> LLM:
    return load(str(smollm2.path), threads=1)


@dataclass
class Served:
    """An application that runs."""

    url: str

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, headers=headers)

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        asked = {"prompt": prompt, "max_tokens": 12, "seed": 5, "logprobs": 2, **fields}
        response = self.post("/v1/completions", asked)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@pytest.fixture
def start(ray: Any, smollm2: Bundle) -> Iterator[Callable[..., Served]]:
    """Starts an application: `start(replicas=2)`."""
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run(**arguments: Any) -> Served:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        chosen = {"model": f"smollm2={smollm2.path}", "threads": 1, **arguments}
        serve.run(edgellm.ray.application(edgellm.ray.Arguments(**chosen)))
        return Served(f"http://127.0.0.1:{port}")

    yield run
    serve.shutdown()


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def check_same(answer: dict[str, Any], llm: LLM, prompt: str) -> None:
    """The bits of the answer are those that it has alone."""
    expected = llm.generate(prompt, max_tokens=12, seed=5)
    (choice,) = answer["choices"]
    assert choice["text"] == expected.text
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.logprobs, abs=0)


def replicas(name: str) -> list[psutil.Process]:
    """The processes of a deployment."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if f":{name}" in " ".join(child.cmdline())]


def test_two_replicas_answer_as_one_alone(start: Callable[..., Served], alone: LLM) -> None:
    served = start(replicas=2)
    prompts = [f"{i} {SYSTEM}" for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        first = list(threads.map(served.complete, prompts))
    for prompt, answer in zip(prompts, first, strict=True):
        check_same(answer, alone, prompt)
        assert cached(answer) < BLOCK
    # each goes where its beginning is
    longer = [f"{prompt} And what now?" for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        second = list(threads.map(served.complete, longer))
    for prompt, answer in zip(longer, second, strict=True):
        check_same(answer, alone, prompt)
        assert cached(answer) > 4 * BLOCK


def test_streams_and_errors_are_the_server_s(start: Callable[..., Served]) -> None:
    served = start(server={"api_keys": ["key"], "max_body_bytes": 100_000})
    key = {"authorization": "Bearer key"}
    chat = {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 20}
    assert served.post("/v1/chat/completions", chat).status_code == 401
    assert served.post("/v1/chat/completions", {}, **key).status_code == 400
    assert served.post("/api/chat", {"messages": "x" * 200_000}, **key).status_code == 413
    assert served.post("/nothing", {}, **key).status_code == 404
    with served.client() as client:
        evil = client.get("/v1/models", headers={**key, "host": "evil.example"})
        assert evil.status_code == 403
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/metrics", headers=key).status_code >= 400
        streamed = {**chat, "stream": True, "temperature": 0}
        with client.stream("POST", "/v1/chat/completions", json=streamed, headers=key) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(p["choices"][0]["delta"].get("content") or "" for p in pieces if p["choices"])
    whole = served.post("/v1/chat/completions", {**chat, "temperature": 0}, **key).json()
    assert whole["choices"][0]["message"]["content"] == text


def test_who_goes_is_withdrawn_and_who_is_too_many_told_so(start: Callable[..., Served]) -> None:
    served = start(server={"max_waiting": 1})
    endless = {"prompt": "once", "seed": 1, "temperature": 2, "ignore_eos": True, "stream": True}
    short = {"prompt": "a", "max_tokens": 2}
    with served.client() as client, client.stream("POST", "/v1/completions", json=endless) as one:
        lines = one.iter_lines()
        next(lines)
        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(served.post, "/v1/completions", short) for _ in range(2)]
            first, others = wait(both, return_when=FIRST_COMPLETED)
            refused = first.pop().result()
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            next(lines)  # it is not at its end
            one.close()  # and its place is free
            assert others.pop().result().status_code == 200


def test_prompts_are_computed_by_one_and_answered_by_another(
    start: Callable[..., Served], alone: LLM
) -> None:
    served = start(replicas=1, prefill_replicas=1)
    prompts = [f"{i} {SYSTEM}" for i in range(3)]
    for prompt in prompts[:2]:
        tokens = alone.engine.tokenizer.encode(prompt)
        answer = served.complete(prompt)
        assert cached(answer) == len(full_prefix(tokens))
        check_same(answer, alone, prompt)
    assert cached(served.complete("a short one")) == 0
    (process,) = replicas("PrefillReplica")
    process.kill()
    answer = served.complete(prompts[2])
    check_same(answer, alone, prompts[2])


def test_a_prompt_that_nobody_computes_is_computed_here(ray: Any, alone: LLM) -> None:
    from edgellm.ray.prefill import RemotePrefill

    class Replicas:
        """A handle of a deployment that does not answer, or fails."""

        def __init__(self, seconds: float) -> None:
            self.compute = self
            self.asked = 0
            self._seconds = seconds

        async def remote(self, request: Any) -> None:
            self.asked += 1
            await asyncio.sleep(self._seconds)
            raise RuntimeError("out of order")

    prompt = alone.engine.tokenizer.encode(f"nobody {SYSTEM}")
    for replicas, min_tokens, asked in (
        (Replicas(60), 1, 1),
        (Replicas(0), 1, 1),
        (Replicas(0), 10_000, 0),
    ):
        bring = RemotePrefill(replicas, min_tokens=min_tokens, timeout_s=0.1)
        asyncio.run(bring(alone.engine, prompt, ""))
        assert replicas.asked == asked
        assert cached_tokens(alone.engine, prompt) < BLOCK


def test_a_model_that_cannot_be_loaded(start: Callable[..., Served]) -> None:
    with pytest.raises(RuntimeError):
        start(model="no-such-model")


@pytest.fixture
def store(ray: Any) -> Any:
    from edgellm.ray.prefill import ObjectStore

    return ObjectStore(budget=10_000)


def test_the_object_store_keeps_what_was_used_last(store: Any) -> None:
    names = [bytes([i]) * 32 for i in range(6)]
    for name in names[:4]:
        assert store.write(name, name * 100)
    assert [store.has(name) for name in names[:5]] == [False, True, True, True, False]
    block = store.read(names[1], size=3200)
    assert bytes(block) == names[1] * 100
    with store.pin(names[1:2]):
        for name in names[4:]:
            store.write(name, name * 100)
        assert store.has(names[1])
    assert sum(map(store.has, names)) == 3
    assert store.read(names[0], size=3200) is None


def test_what_is_damaged_or_lost_in_the_object_store_is_not_there(ray: Any, store: Any) -> None:
    from edgellm.ray.prefill import ObjectStore

    names = [bytes([i]) * 32 for i in range(3)]
    store.write(names[0], bytes(100))
    (good,) = store.references(names).values()
    flipped = ray.get(good).copy()
    flipped[-1] ^= 1
    references = {names[0]: good, names[1]: ray.put(ray.get(good)), names[2]: ray.put(flipped)}
    other = ObjectStore(references=references)
    other.fetch(timeout_s=5)
    assert other.read(names[0], size=101) is None
    assert not other.has(names[0])
    assert other.read(names[1], size=100) is None  # under a wrong name
    assert other.read(names[2], size=100) is None
    assert not any(map(other.has, names))


def test_blocks_whose_owner_died_are_computed_again(ray: Any, alone: LLM) -> None:
    from edgellm.ray.prefill import ObjectStore, PrefillReplica, PrefillRequest

    tokens = full_prefix(alone.engine.tokenizer.encode(SYSTEM))
    names = block_names(alone.engine, tokens)
    actor = ray.remote(num_cpus=1)(PrefillReplica).remote(
        str(alone.engine.bundle.path), {"threads": 1}, 1 << 28
    )
    request = PrefillRequest(tokens, "", 2 * BLOCK, names)
    references = ray.get(actor.compute.remote(request))
    assert list(references) == names[2:]
    other = load(str(alone.engine.bundle.path), threads=1)
    with Session(other.engine, Context(other.engine, tokens[: 2 * BLOCK + 1])) as session:
        session.generate(max_tokens=1)
    assert read_prefix(other.engine, tokens, ObjectStore(references=references)) == len(tokens)
    lost = ObjectStore(references=references)
    ray.kill(actor)

    def gone() -> bool:
        try:
            ray.get(next(iter(references.values())), timeout=1)
        except ray.exceptions.RayError:
            return True
        return False

    until(gone)
    fresh = load(str(alone.engine.bundle.path), threads=1)
    assert read_prefix(fresh.engine, tokens, lost) == 0


def test_ray_data_answers_rows(ray: Any, smollm2: Bundle, alone: LLM) -> None:
    pytest.importorskip("ray.data")

    ray.data.DataContext.get_current().enable_progress_bars = False
    prompts = [f"The number {i} is" for i in range(40)]
    answers = ray.data.from_items([{"id": i, "prompt": p} for i, p in enumerate(prompts)])
    answers = answers.repartition(4).map_batches(
        edgellm.ray.BatchInference,
        fn_constructor_kwargs={
            "model": str(smollm2.path),
            "threads": 1,
            "generation": {"max_tokens": 6, "seed": 2},
        },
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
        batch_size=10,
    )
    rows = sorted(answers.take_all(), key=lambda row: row["id"])
    assert [row["prompt"] for row in rows] == prompts
    for row in rows:
        assert row["answer"] == alone.generate(row["prompt"], max_tokens=6, seed=2).text
        assert 0 < row["answer_tokens"] <= 6
