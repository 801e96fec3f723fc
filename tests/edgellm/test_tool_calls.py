"""Chats with tools and reasoning: random models held to calls, and answers that are dictated."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Dictated

from edgellm import (
    LLM,
    BatchRequest,
    Message,
    OptionError,
    TemplateError,
    Tool,
    ToolCall,
    load,
)
from edgellm.engine.answer import LogitFilter
from edgellm.engine.chat_prompt import ReasoningBudget, ToolOptions, chat_prompt
from edgellm.text.grammar import MatcherFilter
from edgellm.text.template import ChatTemplate

TOOLS = [
    Tool(
        "turn",
        "Turn the light",
        {"properties": {"on": {"type": "boolean"}, "n": {"enum": [1, 2]}}, "required": ["on"]},
    ),
    {"type": "function", "function": {"name": "name", "parameters": {
        "type": "object", "properties": {"to": {"type": "string", "enum": ["x", "y"]}},
        "required": ["to"]}}},
]  # fmt: skip
CHECKED: dict[str, dict[str, set[Any]]] = {
    "turn": {"on": {True, False}, "n": {1, 2}},
    "name": {"to": {"x", "y"}},
}

_TURNS = """\
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for m in messages %}<|user|>{{ m.role[0] }}:
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}CALL{% endfor %}{{ '\n' }}{% endfor %}<|user|>a:
{%- if thinking is defined and thinking %}<think>{% endif %}"""
TEMPLATES = {
    "object": '<call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</call>",
    "json": "<|user|>{{ c.function.name }}={{ c.function.arguments | tojson }};",
    "tagged": "<fn={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}<k={{ k }}>"
    "{{ v if v is string else v | tojson }}</k>{% endfor %}</fn>",
    "python": "<calls>[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v | tojson | replace('\"', \"'\") }}{{ ', ' if not loop.last }}{% endfor %})]"
    "</calls>",
}


def template(kind: str) -> ChatTemplate:
    return ChatTemplate(_TURNS.replace("CALL", TEMPLATES[kind]))


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    return load(str(tiny_model))


@pytest.fixture(params=TEMPLATES)
def calling(tiny: LLM, request: pytest.FixtureRequest) -> Iterator[LLM]:
    before, tiny.engine.template = tiny.engine.template, template(request.param)
    yield tiny
    tiny.engine.template = before


@pytest.fixture
def hermes(tiny: LLM) -> Iterator[LLM]:
    before, tiny.engine.template = tiny.engine.template, template("object")
    yield tiny
    tiny.engine.template = before


def check(calls: Sequence[ToolCall]) -> None:
    for call in calls:
        allowed, arguments = CHECKED[call.name], json.loads(call.arguments)
        assert arguments.keys() <= allowed.keys()
        assert all(value in allowed[key] for key, value in arguments.items())
        assert arguments.keys() & {"on", "to"}


@pytest.mark.parametrize("seed", range(4))
def test_a_random_model_makes_valid_calls(calling: LLM, seed: int) -> None:
    chat = calling.chat(tools=TOOLS, temperature=1.5, seed=seed, max_tokens=120)
    answer = chat.send("Go", tool_choice="required", parallel_tool_calls=False)
    assert (answer.finish_reason, answer.text, answer.reasoning) == ("tool_calls", "", None)
    assert len(answer.tool_calls) == 1
    check(answer.tool_calls)
    named = calling.chat(tools=TOOLS, temperature=1.5, seed=seed, max_tokens=120)
    several = named.send("Go", tool_choice={"name": "name"})
    assert several.tool_calls
    assert {call.name for call in several.tool_calls} == {"name"}
    check([call for call in several.tool_calls if call.complete])


def test_calls_and_their_results_are_a_conversation(hermes: LLM) -> None:
    chat = hermes.chat(tools=TOOLS, max_tokens=200)
    text = 'So.<call>{"name": "turn", "arguments": {"on": true}}</call>'
    answer = chat.send("Turn it on", logit_filter=Dictated(hermes, text))
    assert (answer.text, answer.finish_reason) == ("So.", "tool_calls")
    (call,) = answer.tool_calls
    assert (call.name, call.arguments) == ("turn", '{"on": true}')
    with pytest.raises(OptionError, match="wait for their results"):
        chat.send("And?")
    with pytest.raises(OptionError, match="calls without a result"):
        chat.add_tool_result("other", "ok")
    chat.add_tool_result(call.id, "ok")
    with pytest.raises(OptionError, match="calls without a result: none"):
        chat.add_tool_result(call.id, "ok")
    final = chat.send(logit_filter=Dictated(hermes, "It is on."))
    assert (final.text, final.finish_reason, final.tool_calls) == ("It is on.", "stop", ())
    assert final.stats.cached_tokens > len(text)  # the call is where it was
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[2] == Message("tool", "ok", tool_call_id=call.id, name="turn")
    with pytest.raises(OptionError, match="`text` is None"):
        chat.send()
    again = list(chat.regenerate(logit_filter=Dictated(hermes, "It is.")))
    assert "".join(piece.text for piece in again) == "It is."
    assert len(chat.messages) == 4


def test_a_stream_of_calls(hermes: LLM) -> None:
    text = (
        '<think>Both.</think>\n<call>{"name": "turn", "arguments": {"on": false}}</call>\n'
        '<call>{"name": "name", "arguments": {"to": "x"}}</call>'
    )
    chat = hermes.chat(tools=TOOLS)
    pieces = list(chat.stream("Go", logit_filter=Dictated(hermes, text), max_tokens=300))
    assert "".join(piece.reasoning for piece in pieces) == "Both."
    assert "".join(piece.text for piece in pieces) == ""
    deltas = [delta for piece in pieces for delta in piece.tool_calls]
    assert [(d.index, d.name) for d in deltas if d.name] == [(0, "turn"), (1, "name")]
    assert "".join(d.arguments for d in deltas if d.index == 0) == '{"on": false}'
    assert len([d for d in deltas if d.index == 1]) > 5
    assert chat.messages[-1].reasoning == "Both."
    assert chat.messages[-1].tokens is not None


def test_reasoning_that_the_prompt_begins(hermes: LLM) -> None:
    chat = hermes.chat(template_arguments={"thinking": True})
    answer = chat.send("Why?", logit_filter=Dictated(hermes, "Hm.</think>So."), max_tokens=50)
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("Hm.", "So.", "stop")
    plain = hermes.chat()
    answer = plain.send("Why?", logit_filter=Dictated(hermes, "So <think>"), max_tokens=50)
    assert (answer.reasoning, answer.text) == (None, "So <think>")
    with pytest.raises(OptionError, match="template_arguments"):
        hermes.chat(template_arguments={"deep": True}).send("Why?")


def test_a_call_that_is_cut_off(hermes: LLM) -> None:
    text = '<call>{"name": "turn", "arguments": {"on": true}}</call>'
    chat = hermes.chat(tools=TOOLS)
    dictated = Dictated(hermes, text)
    answer = chat.send("Go", logit_filter=dictated, max_tokens=text.index("rue"))
    assert answer.finish_reason == "length"
    assert [(c.name, c.arguments, c.complete) for c in answer.tool_calls] == [
        ("turn", '{"on": t', False)
    ]
    assert chat.messages[-1].tool_calls == ()
    assert chat.send("And?", logit_filter=Dictated(hermes, "Well.")).text == "Well."


def test_tool_choice_none_and_the_grammar(hermes: LLM) -> None:
    text = '<call>{"name": "turn", "arguments": {"on": true}}</call>'
    chat = hermes.chat(tools=TOOLS, tool_choice="none")
    answer = chat.send("Go", logit_filter=Dictated(hermes, text), max_tokens=100)
    assert (answer.text, answer.tool_calls, answer.finish_reason) == (text, (), "stop")
    for wrong in ('<call>{"name": "off"', '<call>{"name": "turn", "arguments": {"on": 1'):
        with pytest.raises(OptionError, match=r"ruled out every token|allows nothing"):
            hermes.chat(tools=TOOLS).send("Go", logit_filter=Dictated(hermes, wrong))


def test_asyncio_gives_the_same(hermes: LLM) -> None:
    text = '<think>Hm.</think>So.<call>{"name": "name", "arguments": {"to": "y"}}</call>'
    chats = [hermes.chat(tools=TOOLS, max_tokens=200) for _ in range(2)]
    found = asyncio.run(chats[0].asend("Go", logit_filter=Dictated(hermes, text)))
    expected = chats[1].send("Go", logit_filter=Dictated(hermes, text))
    assert (found.text, found.reasoning) == (expected.text, expected.reasoning) == ("So.", "Hm.")
    assert [c.arguments for c in found.tool_calls] == [c.arguments for c in expected.tool_calls]


@pytest.mark.parametrize(
    "arguments",
    [
        {"tools": "f"},
        {"tools": [{"name": ""}]},
        {"tools": TOOLS, "tool_choice": "any"},
        {"tools": TOOLS, "tool_choice": {"name": "none"}},
        {"tool_choice": "required"},
        {"parallel_tool_calls": 1},
        {"template_arguments": "thinking"},
    ],
)
def test_wrong_arguments(tiny: LLM, arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        tiny.chat(**arguments)


def test_a_schema_that_no_grammar_holds_is_loosened_and_said(
    hermes: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    tools = [
        Tool("f", "", {"properties": {"a": {"type": "nothing"}, "b": {"enum": ["x"]}}}),
        Tool("g", "", {"properties": {"a": {"enum": [5]}}, "required": ["a"]}),
    ]
    options = ToolOptions().changed({"tools": tools, "tool_choice": "required"})
    prompt = chat_prompt(hermes.engine, [Message("user", "Go")], options)
    assert "not all arguments of f are held to it" in caplog.text
    assert "nothing" in caplog.text
    assert "%json" not in caplog.text
    calls = prompt.format.calls
    assert calls is not None
    held = {
        call: follows(prompt.logit_filter, hermes, f'{calls.begin}{{"name": {call}}}{calls.close}')
        for call in (
            '"f", "arguments": {"a": [1]}',
            '"f", "arguments": {"b": "x"}',
            '"f", "arguments": {"b": "y"}',
            '"g", "arguments": {"a": 5}',
            '"g", "arguments": {"a": 6}',
        )
    }
    assert list(held.values()) == [True, True, False, True, False]


def follows(logit_filter: LogitFilter | None, llm: LLM, text: str) -> bool:
    """Whether a filter allows all tokens of a text."""
    assert isinstance(logit_filter, MatcherFilter)
    answer, read = logit_filter.for_answer(), list[int]()
    for token in llm.engine.tokenizer.encode(text):
        scores = np.zeros(llm.engine.config.vocab_size, np.float32)
        answer(scores, read)
        if scores[token] < 0:
            return False
        read.append(token)
    return True


@pytest.mark.slow
def test_a_model_without_tools_calls_where_it_must(llm: LLM) -> None:
    chat = llm.chat(tools=TOOLS, temperature=0, max_tokens=100)
    with pytest.raises(TemplateError, match="no place for tools"):
        chat.send("Turn on the light.")
    answer = chat.send("Turn on the light.", tool_choice="required", parallel_tool_calls=False)
    assert answer.finish_reason == "tool_calls"
    check(answer.tool_calls)
    chat.add_tool_result(answer.tool_calls[0].id, "The light is on.")
    final = chat.send(tool_choice="none")
    assert final.text
    assert final.stats.cached_tokens > 50


def test_tools_that_must_not_be_called_are_not_told_a_model_without_tools(llm: LLM) -> None:
    messages = [Message("user", "Hi")]
    plain = chat_prompt(llm.engine, messages, ToolOptions())
    none = ToolOptions().changed({"tools": TOOLS, "tool_choice": "none"})
    assert chat_prompt(llm.engine, messages, none).tokens == plain.tokens


def test_a_schema_holds_what_is_behind_the_reasoning(hermes: LLM) -> None:
    engine, schema = hermes.engine, '{"type": "object"}'
    options = ToolOptions(template_arguments={"thinking": True})
    asked = {"messages": [Message("user", "Why?")], "logit_filter": hermes.json_filter(schema)}
    prompt = chat_prompt(engine, options=options, **asked)
    assert prompt.in_reasoning
    x, brace = (engine.tokenizer.encode(text, add_bos=False)[-1] for text in ("x", "{"))

    def allowed(text: str) -> tuple[bool, bool]:
        logits = np.zeros(engine.config.vocab_size, np.float32)
        tokens = engine.tokenizer.encode(text, add_bos=False, parse_special=True)
        prompt.logit_filter(logits, tokens)
        return bool(logits[x] == 0), bool(logits[brace] == 0)

    assert allowed("Hm.") == (True, True)
    assert allowed("Hm.</think>") == (False, True)
    assert chat_prompt(engine, options=ToolOptions(), **asked).logit_filter is asked["logit_filter"]


def test_a_schema_and_tools(hermes: LLM) -> None:
    chat = hermes.chat(tools=TOOLS, max_tokens=5, seed=1)
    schema = hermes.json_filter('{"type": "object"}')
    with pytest.raises(OptionError, match=r"`response_format`.*`tools`"):
        chat.send("Go", logit_filter=schema)
    answer = chat.send("Go", logit_filter=schema, tool_choice="none")
    assert answer.text.lstrip().startswith("{")


@pytest.mark.slow
def test_tools_without_the_grammar_engine() -> None:
    code = (
        "import sys; sys.modules['llguidance'] = None; sys.modules['transformers'] = None\n"
        "import edgellm\n"
        "chat = edgellm.load().chat(tools=[edgellm.Tool('f')], tool_choice='required')\n"
        "try: chat.send('Hi')\n"
        "except edgellm.OptionError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install llguidance" in done.stdout
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import edgellm\n"
        "chat = edgellm.load().chat(tools=[edgellm.Tool('f')], tool_choice='required')\n"
        "one = {'parallel_tool_calls': False, 'temperature': 0, 'max_tokens': 60}\n"
        "print(chat.send('Hi', **one).tool_calls[0].name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "f"


def test_conversations_of_a_batch_are_read_likewise(hermes: LLM) -> None:
    text = '<think>Hm.</think>So.<call>{"name": "name", "arguments": {"to": "y"}}</call>'
    options = ToolOptions().changed({"tools": TOOLS})
    hello, dictated = [Message("user", "Hi")], Dictated(hermes, text)
    requests = [
        BatchRequest(prompt=hello, logit_filter=dictated, tool_options=options),
        BatchRequest(prompt=hello, logit_filter=dictated),
    ]
    answers = sorted(hermes.batch(requests, max_tokens=200), key=lambda a: a.index)
    first, second = (answer.result() for answer in answers)
    assert (first.reasoning, first.text, first.finish_reason) == ("Hm.", "So.", "tool_calls")
    assert [call.name for call in first.tool_calls] == ["name"]
    assert (second.reasoning, second.text) == ("Hm.", text.removeprefix("<think>Hm.</think>"))


THINKING: Any = {"template_arguments": {"thinking": True}}


@pytest.mark.parametrize("budget", [0, 1, 10])
def test_reasoning_ends_with_its_budget(hermes: LLM, budget: int) -> None:
    """What follows is what the model says after such thoughts, to the token."""
    options = ToolOptions().changed({**THINKING, "reasoning_budget": budget})
    messages = [Message("user", "Why?")]
    prompt = chat_prompt(hermes.engine, messages, options).tokens
    endless: Any = {"temperature": 0, "ignore_eos": True, "repetition_limit": 0}
    chat = hermes.chat(max_tokens=40, **endless, **THINKING)
    answer = chat.send("Why?", reasoning_budget=budget)
    close = hermes.tokenize("</think>", parse_special=True)
    end = budget + len(close)
    assert list(answer.tokens[budget:end]) == close
    begun = [*prompt, *answer.tokens[:end]]
    rest = hermes.generate(begun, max_tokens=40 - end, **endless)
    assert answer.tokens[end:] == rest.tokens
    assert answer.text.strip() == rest.text.strip()


def test_a_form_follows_reasoning_of_a_budget(hermes: LLM) -> None:
    chat = hermes.chat(temperature=0.9, seed=2, max_tokens=60, **THINKING)
    answer = chat.send("Why?", reasoning_budget=7, grammar='root ::= "yes" | "no"')
    assert answer.text in ("yes", "no")
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("begun", "written", "allowed"),
    [
        (True, [], None),
        (True, [5, 5], None),
        (True, [5, 5, 5], 8),
        (True, [5, 5, 8], 9),
        (True, [5, 5, 5, 8], 9),
        (True, [5, 8, 9, 5, 5], None),
        (True, [5, 5, 5, 8, 9], None),
        (False, [5, 5, 5, 5, 5, 5], None),
        (False, [6, 7, 5, 5], None),
        (False, [6, 7, 5, 5, 5], 8),
        (False, [3, 6, 7, 5, 5, 5], 8),
        (False, [6, 7, 5, 5, 8, 9, 5], None),
    ],
)
def test_where_a_budget_ends_reasoning(
    begun: bool, written: list[int], allowed: int | None
) -> None:
    """6 7 begins it, and 8 9 ends it."""
    budget = ReasoningBudget(3, open=[6, 7], close=[8, 9], begun=begun)
    scores = np.zeros(12, np.float32)
    budget.for_answer()(scores, written)
    expected = np.arange(12) if allowed is None else [allowed]
    assert np.flatnonzero(scores > -np.inf).tolist() == list(expected)


@pytest.mark.parametrize("budget", [-1, 1.5, "3"])
def test_wrong_budgets(tiny: LLM, budget: Any) -> None:
    with pytest.raises(OptionError, match="reasoning_budget"):
        tiny.chat(reasoning_budget=budget)
