"""A prompt handed over from the replica that computed it, beside computing it again.

    pip install -e ".[ray]"
    python tests/bench/ray_hand_over.py             # the default model, a prefix of 3,000 tokens

Two processes of Ray on this machine, with one thread each, and Ray's object store between them. In
each round two new texts are taken: the second replica computes the first one itself; the second one
is computed by the first replica, which writes its KV blocks to the object store, and the second
replica reads them and goes on. Each of these is timed alone, in turns, on a machine that does
nothing else. Then a stream of the second replica, behind Ray Serve, is watched while five such
prompts arrive: the largest gap between two of its pieces, with and without a replica for prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

# Before Ray is imported: its processes speak over the loopback address.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import httpx
import ray
from ray import serve

import edgellm.ray
from edgellm import load
from edgellm.engine.context import Context
from edgellm.engine.hand_over import block_names, full_prefix, read_prefix
from edgellm.models import DEFAULT_MODEL
from edgellm.options import EngineArguments
from edgellm.ray.prefill import ObjectStore, PrefillReplica, PrefillRequest
from edgellm.session import Session

WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "by", "at")
PORT = 8739


class Prefiller(PrefillReplica):
    """Computes a prompt, and hands it over, in two calls."""

    async def prefill(self, tokens: Sequence[int]) -> None:
        """Only compute."""
        engine = self._llm.engine
        with Session(engine, Context(engine, tokens)) as session:
            await session.agenerate(max_tokens=0)

    def names(self, tokens: Sequence[int]) -> list[bytes]:
        return block_names(self._llm.engine, tokens)


class Answerer:
    """Goes on where a prompt was computed, or computes it."""

    def __init__(self, model: str, engine: EngineArguments) -> None:
        self._llm = load(model, **engine)

    def encode(self, text: str) -> list[int]:
        return self._llm.engine.tokenizer.encode(text)

    def read(self, tokens: Sequence[int], references: dict[bytes, ray.ObjectRef]) -> float:
        """Seconds to have the blocks in the KV cache."""
        begin = time.perf_counter()
        store = ObjectStore(references=references)
        store.fetch(timeout_s=30)
        there = read_prefix(self._llm.engine, full_prefix(tokens), store)
        assert there == len(full_prefix(tokens)), there
        return time.perf_counter() - begin

    def answer(self, tokens: Sequence[int]) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
        """Seconds to the first token; tokens and log-probabilities."""
        with Session(self._llm.engine, Context(self._llm.engine, tokens)) as session:
            done = session.generate(max_tokens=16, seed=1, ignore_eos=True)
        return done.stats.ttft_s, done.tokens, done.logprobs


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def timed(reference: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    value = ray.get(reference)
    return time.perf_counter() - begin, value


def hand_overs(model: str, *, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each part, in each round."""
    engine: EngineArguments = {"threads": 1}
    prefiller = ray.remote(num_cpus=1)(Prefiller).remote(model, engine, 1 << 28)
    answerer = ray.remote(num_cpus=1)(Answerer).remote(model, engine)
    alone = ray.remote(num_cpus=0)(Answerer).remote(model, engine)
    draw = random.Random(0)
    parts: dict[str, list[float]] = {}
    for _ in range(rounds + 1):  # the first one warms up
        own, handed = (
            ray.get(answerer.encode.remote(text(draw, tokens + 200)))[:tokens] for _ in range(2)
        )
        whole = full_prefix(handed)
        names = ray.get(prefiller.names.remote(whole))
        computed, _, _ = ray.get(answerer.answer.remote(own))
        elsewhere, _ = timed(prefiller.prefill.remote(whole))
        request = PrefillRequest(whole, "", 0, names)
        written, references = timed(prefiller.compute.remote(request))
        again, _ = timed(prefiller.compute.remote(request))
        read, _ = timed(answerer.read.remote(handed, references))
        first, *answer = ray.get(answerer.answer.remote(handed))
        _, *expected = ray.get(alone.answer.remote(handed))
        assert answer == expected, "an answer that was handed over is another one"
        values = {
            "computed by whoever answers, to the first token": computed,
            "computed by the other replica": elsewhere,
            "written to the object store, references given": written,
            "references given again": again,
            "read into the KV cache": read,
            "then, to the first token": first,
            "handed over, to the first token": written + read + first,
        }
        for name, value in values.items():
            parts.setdefault(name, []).append(value)
    size = sum(len(ray.get(reference)) for reference in references.values())
    print(f"{len(handed)} tokens, {len(references)} blocks, {size / 1e6:.1f} MB")
    for actor in (prefiller, answerer, alone):
        ray.kill(actor)
    return {name: values[1:] for name, values in parts.items()}


@contextmanager
def application(model: str, prefill_replicas: int) -> Iterator[httpx.Client]:
    """One replica that answers, behind Ray Serve."""
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
    arguments = edgellm.ray.Arguments(model=model, threads=1, prefill_replicas=prefill_replicas)
    serve.run(edgellm.ray.application(arguments))
    url = f"http://127.0.0.1:{PORT}"
    try:
        with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
            yield client
    finally:
        serve.shutdown()


def largest_gap(client: httpx.Client, prompts: Sequence[str]) -> tuple[float, float]:
    """Of a stream while prompts arrive, and the median one, in seconds."""
    asked = {"prompt": "Once upon a time", "stream": True, "seed": 1, "temperature": 1.5}
    times: list[float] = []

    def read() -> None:
        with client.stream("POST", "/v1/completions", json={**asked, "ignore_eos": True}) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if done.is_set() or not json.loads(line[6:])["choices"]:
                    return
                times.append(time.perf_counter())

    done = threading.Event()
    stream = threading.Thread(target=read)
    stream.start()
    try:
        time.sleep(2)
        for prompt in prompts:
            answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            answer.raise_for_status()
        ended = not stream.is_alive()
    finally:
        done.set()
        stream.join()
    assert not ended, "the stream ended before the prompts"
    gaps = [b - a for a, b in pairwise(times)]
    return max(gaps), statistics.median(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    load(arguments.model, threads=1).close()  # exported once, before two want it
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=1 << 29,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        seconds = hand_overs(arguments.model, tokens=arguments.tokens, rounds=arguments.rounds)
        print(f"\n| seconds, median of {arguments.rounds} (least to most) | |\n|---|---|")
        for name, values in seconds.items():
            middle = statistics.median(values)
            print(f"| {name} | {middle:.3f} ({min(values):.3f} to {max(values):.3f}) |")
        print("\n| a stream while prompts arrive, ms | largest gap | median |\n|---|---|---|")
        draw = random.Random(1)
        for count, name in enumerate(("one replica", "and one that computes prompts")):
            with application(arguments.model, count) as client:
                prompts = [text(draw, arguments.tokens) for _ in range(5)]
                largest, middle = largest_gap(client, prompts)
            print(f"| {name} | {largest * 1000:.0f} | {middle * 1000:.1f} |")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
