"""litellm, llm, lm-eval, llama-index, pydantic-ai, instructor, aider, mistralai, unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calling import TEMPLATE, Dictated
from pypi_clients import CLIENTS
from requirements import unavailable
from serving import Running, running, served

from edgellm.engine.chat_prompt import ChatPrompt, chat_prompt
from edgellm.llm import LLM, load
from edgellm.serve import ModelPool, ServeOptions
from edgellm.text.prompt import Message
from edgellm.text.template import ChatTemplate

pytestmark = pytest.mark.clients

GREETING = 'def greet(name):\n    return "hello " + name\n'
ADDED = f"{GREETING}\n\ndef add(a, b):\n    return a + b\n"
TOWER = '{"unit": "m", "tall": true}'


def call(name: str, arguments: str) -> str:
    return f'<call>{{"name": "{name}", "arguments": {arguments}}}</call>'


# What the model says, turn by turn, where a user says so.
SAID: Mapping[str, Sequence[str]] = {
    "Turn on the light.": (call("turn", '{"on": true}'), "It is on."),
    "Turn it on and measure.": (call("turn", '{"on": true}'), call("final_result", TOWER)),
    "JSON: a tower": (TOWER,),
    "JSON_SCHEMA: a tower": (TOWER,),
    "TOOLS: a tower": (call("Size", TOWER),),
    "TOOLS_STRICT: a tower": (call("Size", TOWER),),
    "Add a function": (f"greet.py\n```\n{ADDED}```\n",),
}


@pytest.fixture(scope="module")
def long_tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model with a context for aider's instructions, in which a letter is a token."""
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 16384
    (folder / "config.json").write_text(json.dumps(config))
    llm = load(str(folder), ctx_size=16384)
    if not llm.engine.decoder.exact_rows:
        unavailable("native", "needs the native kernels")
    llm.engine.template = ChatTemplate(TEMPLATE)
    return llm


@pytest.fixture
def url(long_tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    def dictated(engine: Any, messages: Sequence[Message], *args: Any, **more: Any) -> ChatPrompt:
        prompt = chat_prompt(engine, messages, *args, **more)
        users = "\n".join(message.content for message in messages if message.role == "user")
        texts = next((texts for said, texts in SAID.items() if said in users), None)
        if texts is None:
            return prompt
        turn = sum(message.role == "assistant" for message in messages)
        text = texts[min(turn, len(texts) - 1)]
        return replace(prompt, logit_filter=Dictated(long_tiny, text))

    monkeypatch.setattr("edgellm.serve.ask.chat_prompt", dictated)
    pool = ModelPool([served(long_tiny, "m")])
    with running(pool, long_tiny, ServeOptions(port=0, grace_s=1)) as server:
        yield server.url


@pytest.fixture(scope="module")
def greeting(long_tiny: LLM) -> str:
    """What all of them ask for first."""
    return long_tiny.chat(max_tokens=12, temperature=0).send("hello there").text


def test_litellm(url: str, greeting: str, long_tiny: LLM, tmp_path: Path) -> None:
    told = CLIENTS["litellm"].run(tmp_path, url, "m")
    for name in ("openai", "hosted_vllm", "ollama", "anthropic"):
        assert told[name] == {
            "text": greeting,
            "streamed": greeting,
            "reason": "length",
            "tokens": 12,
        }
    assert told["asyncio"] == greeting
    assert told["call"]["arguments"]["on"] in (True, False)
    assert told["after the call"] == 5
    assert told["schema"]["on"] in (True, False)
    assert told["embeddings"] == [96, 96]
    assert told["text"] == long_tiny.generate("once upon", max_tokens=5, temperature=0).text
    assert told["unknown model"] == {"class": "NotFoundError", "status": 404}
    assert told["wrong field"] == {"class": "BadRequestError", "status": 400}
    assert told["too long"] == {"class": "ContextWindowExceededError", "status": 400}


def test_llm(url: str, greeting: str, long_tiny: LLM, tmp_path: Path) -> None:
    told = CLIENTS["llm"].run(tmp_path, url, "m")
    assert told["chat"] == told["stream"] == greeting
    assert told["usage"] == 12
    assert told["schema"]["on"] in (True, False)
    assert told["tools"] == "It is on."
    chat = long_tiny.chat(max_tokens=12, temperature=0)
    chat.messages += [Message("user", "hello there"), Message("assistant", greeting)]
    assert told["next turn"] == chat.send("again").text
    assert told["text"] == long_tiny.generate("once upon", max_tokens=12, temperature=0).text
    assert told["responses"] == long_tiny.chat(seed=1).send("hello there").text


def test_lm_eval(url: str, long_tiny: LLM, tmp_path: Path) -> None:
    """Its scores are sums of the library's own, of the tokens of each choice."""
    told = CLIENTS["lm_eval"].run(tmp_path, url, "m")
    items = [
        ("What barks? Answer:", [" a dog", " a tree", " a stone"], 0),
        ("What is two plus two? Answer:", [" three", " four"], 1),
    ]
    expected, right = [], 0
    for question, choices, answer in items:
        sums = []
        for choice in choices:
            tokens = long_tiny.tokenize(question + choice)
            scored = long_tiny.generate(tokens, max_tokens=0, prompt_logprobs=0).prompt_logprobs
            behind = scored[len(long_tiny.tokenize(question)) :]
            sums.append(sum(each.logprob for each in behind if each.logprob is not None))
        expected.append(pytest.approx(sums, abs=1e-4))
        right += sums.index(max(sums)) == answer
    assert told["scores"] == expected
    assert told["accuracy"] == right / len(items)


def test_llama_index(url: str, greeting: str, long_tiny: LLM, tmp_path: Path) -> None:
    told = CLIENTS["llama_index"].run(tmp_path, url, "m")
    assert told["chat"] == told["stream"] == told["asyncio"] == greeting
    assert told["text"] == long_tiny.generate("once upon", max_tokens=5, temperature=0).text
    assert told["call"]["name"] == "turn"
    assert told["call"]["arguments"]["on"] in (True, False)
    assert told["after the call"]
    assert told["schema"]["on"] in (True, False)


def test_pydantic_ai(url: str, greeting: str, tmp_path: Path) -> None:
    told = CLIENTS["pydantic_ai"].run(tmp_path, url, "m")
    assert told["chat"] == {"text": greeting, "requests": 1, "output_tokens": 12}
    assert told["stream"] == greeting
    assert told["schema"]["unit"] in ("cm", "m")
    tools = told["tools"]
    assert tools["output"] == {"unit": "m", "tall": True}
    assert (tools["calls"], tools["requests"]) == ([True], 2)
    assert told["responses"] == {"text": greeting, "requests": 1, "output_tokens": 12}
    assert told["unknown model"] == 404


def test_instructor(url: str, tmp_path: Path) -> None:
    told = CLIENTS["instructor"].run(tmp_path, url, "m")
    modes = ("JSON_SCHEMA", "TOOLS", "TOOLS_STRICT", "JSON")
    assert told == {mode: {"unit": "m", "tall": True} for mode in modes}


def test_aider(url: str, tmp_path: Path) -> None:
    """A coding turn: it sends a file and writes the answer into it."""
    (tmp_path / "greet.py").write_text(GREETING)
    prices = tmp_path / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True)
    prices.write_text('{"none": {}}')  # else it asks GitHub
    flags = "--no-git --yes-always --no-check-update --analytics-disable --no-auto-lint --no-pretty"
    told = CLIENTS["aider"].process(
        tmp_path,
        *("-m", "aider", "--model", "openai/m", "--openai-api-base", f"{url}/v1"),
        *("--openai-api-key", "none", "--edit-format", "whole", *flags.split()),
        *("--message", "Add a function add(a, b).", "greet.py"),
    )
    assert "Applied edit to greet.py" in told
    assert (tmp_path / "greet.py").read_text() == ADDED


def test_mistralai(fim_server: Running, tmp_path: Path) -> None:
    told = CLIENTS["mistralai"].run(tmp_path, fim_server.url, "fim")
    expected = fim_server.llm.infill("def f(", "):\n", max_tokens=9, min_tokens=2)
    answer = {"text": expected.text, "tokens": len(expected.tokens)}
    assert told["whole"] == told["stream"] == answer
    chat = fim_server.llm.chat(max_tokens=9, temperature=0)
    assert told["chat"] == chat.send("hello there").text
    assert told["models"] == [["BaseModelCard", id] for id in ("fim", "m", "qwen2.5-coder")]
    can = {name for name, has in told["model"]["capabilities"].items() if has}
    assert can == {"completion_fim", "completion_chat"}
    assert told["model"]["max_context_length"] == fim_server.llm.ctx_size
    assert told["unknown model"] == 404
