"""Thirty requests of all kinds in a pool that is too small for them: each answer has the bits of
its single run, whichever was preempted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import inspection
import pytest
from serving import Running, running, served, words

from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.serve import ModelPool, ServeOptions

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}},
    "required": ["a", "b"],
}
# What differs from run to run of the same answer.
_OF_THE_RUN = {
    "cache_n", "cached_tokens", "created", "created_at", "eval_duration", "id", "load_duration",
    "placement", "prompt_eval_duration", "prompt_tokens_details", "timings", "total_duration",
    "usage",
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tiny_fim: LLM) -> Iterator[Running]:
    """A server of the same model, with room for one full context."""
    llm = load(str(tiny_fim.engine.bundle.path), ctx_size=8 * BLOCK, cache_size=8 * BLOCK)
    options = ServeOptions(port=0, grace_s=1)
    with running(ModelPool([served(llm, "fim")]), llm, options) as one:
        yield one


def openai_text(text: str, tokens: int, options: dict[str, Any]) -> tuple[str, Any]:
    more = {"n": 2, "logprobs": 3, "ignore_eos": True}
    return "/v1/completions", {"prompt": text, "max_tokens": tokens, **more, **options}


def openai_chat(text: str, tokens: int, options: dict[str, Any]) -> tuple[str, Any]:
    messages = [{"role": "user", "content": text}]
    more = {"logprobs": True, "top_logprobs": 4, "ignore_eos": True}
    return "/v1/chat/completions", {"messages": messages, "max_tokens": tokens, **more, **options}


def openai_json(text: str, tokens: int, options: dict[str, Any]) -> tuple[str, Any]:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    path, body = openai_chat(text, tokens, options)
    return path, {**body, "response_format": format}


def llama_text(text: str, tokens: int, options: dict[str, Any]) -> tuple[str, Any]:
    more = {"return_tokens": True, "n_probs": 3, "ignore_eos": True}
    return "/completion", {"prompt": text, "n_predict": tokens, **more, **options}


def llama_infill(text: str, tokens: int, options: dict[str, Any]) -> tuple[str, Any]:
    half = len(text) // 2
    gap = {"input_prefix": text[:half], "input_suffix": text[half:]}
    more = {"return_tokens": True, "n_probs": 3, "ignore_eos": True}
    return "/infill", {**gap, "n_predict": tokens, **more, **options}


def ollama_text(text: str, tokens: int, options: dict[str, Any]) -> tuple[str, Any]:
    body = {"model": "fim", "prompt": text, "raw": True, "stream": False, "logprobs": True}
    return "/api/generate", {**body, "options": {"num_predict": tokens, **options}}


KINDS = (openai_text, openai_chat, openai_json, llama_text, llama_infill, ollama_text)


def requests() -> list[tuple[str, Any]]:
    """Thirty: greedy ones and sampled ones, and many that grow out of their first block."""
    lengths, asked = (5, 118, 240, 100, 111, 500, 109), []
    for i in range(30):
        sampled = {"temperature": 0.9, "top_k": 50 * (i % 3)}
        options = {**(sampled if i % 2 else {"temperature": 0.0}), "seed": i}
        kind = KINDS[(i + i // len(KINDS)) % len(KINDS)]  # each kind both greedy and sampled
        asked.append(kind(words(i, lengths[i % 7]), 25 + 5 * (i % 5), options))
    return asked


def answer(server: Running, asked: tuple[str, Any]) -> Any:
    path, body = asked
    reply = server.post(path, body, headers={"x-api-key": "any"})
    assert reply.status_code == 200, reply.text
    return told(reply.json())


def streamed(server: Running, asked: tuple[str, Any]) -> Any:
    """The same, told in chunks: texts and log-probabilities of each choice, put together."""
    path, body = asked
    reply = server.post(path, {**body, "stream": True})
    assert reply.status_code == 200, reply.text
    data = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    parts: dict[int, list[Any]] = {}
    for chunk in map(json.loads, data):
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return {
        index: (
            "".join(each["text"] for each in choices),
            [
                logprob
                for each in choices
                if each["logprobs"]
                for logprob in each["logprobs"]["token_logprobs"]
            ],
        )
        for index, choices in parts.items()
    }


def told(value: Any) -> Any:
    """What an answer says, without when and how it was computed."""
    if isinstance(value, dict):
        return {key: told(each) for key, each in value.items() if key not in _OF_THE_RUN}
    return [told(each) for each in value] if isinstance(value, list) else value


def preemptions(server: Running) -> int:
    (count,) = re.findall(r"^vllm:num_preemptions_total (\d+)$", server.get("/metrics").text, re.M)
    return int(count)


@pytest.mark.slow
def test_thirty_together_are_as_alone(fim_server: Running, small: Running) -> None:
    asked = requests()
    expected = [answer(fim_server, each) for each in asked]
    assert preemptions(fim_server) == 0
    assert len({json.dumps(each) for each in expected}) == 30
    with ThreadPoolExecutor(30) as threads:
        with inspection.all_submitted(small.llm, 30):
            replies = [threads.submit(answer, small, each) for each in asked]
        answers = inspection.results(replies)
    for (path, _), ours, alone in zip(asked, answers, expected, strict=True):
        assert ours == alone, path
    assert preemptions(small) > 0


def test_streams_together_are_as_answers_alone(fim_server: Running, small: Running) -> None:
    asked = [
        openai_text(words(50 + i, 100 + 4 * i), 30, {"seed": i, "temperature": 0.7 * (i % 2)})
        for i in range(4)
    ]
    expected = [
        {
            choice["index"]: (choice["text"], choice["logprobs"]["token_logprobs"])
            for choice in answer(fim_server, each)["choices"]
        }
        for each in asked
    ]
    before = preemptions(small)
    with ThreadPoolExecutor(4) as threads:
        with inspection.all_submitted(small.llm, 4):
            replies = [threads.submit(streamed, small, each) for each in asked]
        assert inspection.results(replies) == expected
    assert preemptions(small) > before
