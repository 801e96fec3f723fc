"""Released chat templates: what they render of calls and reasoning is read back exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance
import pytest

from edgellm import LLM, Message, TemplateError, ToolCall
from edgellm.text.answer_parser import AnswerParser
from edgellm.text.call_shapes import common_end, common_head
from edgellm.text.prompt import encode_conversation
from edgellm.text.template import ChatTemplate
from edgellm.text.tool_grammar import tool_grammar
from edgellm.tool_use import Tool, joined_calls

pytestmark = pytest.mark.clients

# Templates that have no tool format, and why.
NO_FORMAT = {
    "HuggingFaceTB-SmolLM3-3B": "does not render tool calls",
    "Kimi-K2-Instruct": "does not render tool calls",  # it changes a list, which no sandbox allows
    "Kimi-K2-Thinking": "does not render tool calls",  # likewise
    "Kimi-K3": "do not read back",  # a call begins with the end of the content
    "LFM2-8B-A1B": "does not render tool calls",
    "LFM2.5-Instruct": "does not render tool calls",
    "fireworks-ai-llama-3-firefunction-v2": "does not render an answer's content",
    "google-gemma-2-2b-it": "does not render tool calls",
    "ibm-granite-granite-3.3-2B-Instruct": "does not render tool calls",
    "llama-cpp-deepseek-r1": "does not render tool calls",
    "llama-cpp-rwkv-world": "does not render tool calls",
    "meetkai-functionary-medium-v3.2": "nothing marks the beginning",
    "microsoft-Phi-3.5-mini-instruct": "does not render tool calls",
    "muse-glimmer": "nothing marks the beginning",
    "openai-gpt-oss-120b": "begins with the plain text",
}
# The template writes arguments that are objects as tags in tags.
NO_OBJECTS = {"MiniMax-M3"}
# The template puts content behind the call, into a message of its own.
CONTENT_APART = {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"}

OBJECT = {"type": "object", "additionalProperties": True}
PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where"},
        "days": {"type": "integer", "description": "How long"},
        "wet": {"type": "boolean", "description": "Rain"},
        "where": {**OBJECT, "description": "Where"},
        "zip": {"type": "string", "description": "Code"},
    },
    "required": ["city"],
}
TOOLS = (
    Tool("get_weather", "Tell the weather", PARAMETERS),
    Tool("add", "Add", {"properties": {"a": {"type": "number", "description": "What"}}}),
)
WEATHER: Mapping[str, Any] = {
    "city": 'Zürich "x"\nline <b>, {y}',
    "days": 3,
    "wet": True,
    "where": {"a": [1, 2.5, "q"]},
    "zip": "8001",
}
USER = {"role": "user", "content": "What is the weather?"}
Calls = Sequence[tuple[str, Mapping[str, Any]]]
REASONING = "\u03c9Hm, I think\n\nso."


def answers(name: str, *, parallel: bool) -> Iterator[tuple[Calls, str, str | None]]:
    """Calls, content and reasoning in all mixtures."""
    weather = dict(WEATHER)
    if name in NO_OBJECTS:
        del weather["where"]
    two = [("get_weather", weather), ("add", {"a": -1.5})]
    for calls in ([two[0]], [two[1]], [("add", {})], *([two] if parallel else []), []):
        for content in ("", "Let me look.\nSo:"):
            if (not calls and not content) or (calls and content and name in CONTENT_APART):
                continue
            for reasoning in (None, REASONING):
                yield calls, content, reasoning


def rendered(
    template: ChatTemplate, calls: Calls, content: str, reasoning: str | None
) -> tuple[str, bool] | None:
    """What the model writes, and whether it begins in its reasoning; None: it writes no such."""
    tools = [tool.to_json() for tool in TOOLS]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        made = [
            {"id": f"edgeId00{i}", "name": name, "arguments": arguments}
            for i, (name, arguments) in enumerate(calls)
        ]
        message = template.traits.call_message(content, made)
    if reasoning is not None and template.traits.reasoning_field is not None:
        message[template.traits.reasoning_field] = reasoning
    prompt = template.render([USER], tools=tools)
    text, other = (
        template.render([USER, m], tools=tools, add_generation_prompt=False)
        for m in (message, {"role": "assistant", "content": "\u03a9other"})
    )
    head, end = common_head(prompt, text), common_end(other, text)
    role = "<|CHATBOT_TOKEN|>"  # where a prompt says something before it that no answer keeps
    if prompt.endswith(role) and text.startswith(role, len(head)):
        head += role
    marks = template.answer_format.reasoning
    opened = marks is not None and (
        head.rstrip().endswith(marks.open) or prompt.rstrip().endswith(marks.open)
    )
    if opened and not (reasoning is not None and reasoning in text):
        return None  # the prompt asks for reasoning
    return text[len(head) : len(text) - len(end)], opened


@pytest.fixture(scope="module")
def templates(llama_cpp_templates: Path) -> dict[str, ChatTemplate]:
    return {
        path.stem: ChatTemplate(path.read_text(encoding="utf-8"), bos="<BOS>", eos="<EOS>")
        for path in sorted(llama_cpp_templates.glob("*.jinja"))
    }


def test_which_templates_have_a_format(templates: dict[str, ChatTemplate]) -> None:
    assert len(templates) == 70
    without = {
        name: template.answer_format.no_calls
        for name, template in templates.items()
        if template.answer_format.calls is None
    }
    assert without.keys() == NO_FORMAT.keys()
    assert {name for name, reason in without.items() if NO_FORMAT[name] not in reason} == set()


def test_calls_of_all_templates_read_back(templates: dict[str, ChatTemplate]) -> None:
    wrong, right = [], 0
    for name in sorted(templates.keys() - NO_FORMAT.keys()):
        template = templates[name]
        form = template.answer_format
        assert form.calls is not None
        for calls, content, reasoning in answers(name, parallel=form.calls.parallel):
            written = rendered(template, calls, content, reasoning)
            if written is None:
                continue
            text, opened = written
            shown = content if content in text else ""
            thought = reasoning if reasoning is not None and reasoning in text else ""
            expected = (list(calls), shown, thought)
            for size in (1, 2, 3, 7, len(text)):
                parser = AnswerParser(form, tools=TOOLS, in_reasoning=opened)
                cuts = [text[i : i + size] for i in range(0, len(text), size)]
                deltas = [*map(parser.add, cuts), parser.finish()]
                made = joined_calls([call for delta in deltas for call in delta.tool_calls])
                found = (
                    [(call.name, json.loads(call.arguments)) for call in made],
                    "".join(delta.content for delta in deltas).strip(),
                    "".join(delta.reasoning for delta in deltas).strip(),
                )
                right += found == expected
                if found != expected:
                    wrong.append((name, size, text, found))
    assert wrong == []
    assert right > 3000


def test_reasoning_of_templates(templates: dict[str, ChatTemplate]) -> None:
    def marks(name: str) -> tuple[str, str] | None:
        found = templates[name].answer_format.reasoning
        return None if found is None else (found.open, found.close)

    assert marks("Qwen-Qwen3-0.6B") == ("<think>", "</think>")
    assert marks("deepseek-ai-DeepSeek-R1-Distill-Llama-8B") == ("<think>", "</think>")
    assert marks("ByteDance-Seed-OSS") == ("<seed:think>", "</seed:think>")
    assert marks("google-gemma-4-31B-it") == ("<|channel>thought", "<channel|>")
    assert marks("mistralai-Ministral-3-14B-Reasoning-2512") == ("[THINK]", "[/THINK]")
    assert marks("Qwen-Qwen2.5-7B-Instruct") is None
    assert marks("meta-llama-Llama-3.2-3B-Instruct") is None


def test_kinds_of_formats(templates: dict[str, ChatTemplate]) -> None:
    kinds = {
        name: template.answer_format.calls.kind
        for name, template in templates.items()
        if template.answer_format.calls is not None
    }
    assert kinds["Qwen-Qwen3-0.6B"] == kinds["meta-llama-Llama-3.1-8B-Instruct"] == "object"
    assert kinds["mistralai-Mistral-Nemo-Instruct-2407"] == "object"
    assert kinds["Mistral-Small-3.2-24B-Instruct-2506"] == kinds["moonshotai-Kimi-K2"] == "json"
    assert kinds["Qwen3-Coder"] == kinds["GLM-4.6"] == kinds["MiniMax-M2"] == "tagged"
    assert kinds["LFM2.5-8B-A1B"] == "python"
    assert kinds["google-gemma-4-31B-it"] == "braces"


def test_identifiers_of_the_model(templates: dict[str, ChatTemplate]) -> None:
    for name, text in (
        ("Mistral-Small-3.2-24B-Instruct-2506", "[TOOL_CALLS]add[CALL_ID]abcdef123[ARGS]{}"),
        (
            "mistralai-Mistral-Nemo-Instruct-2407",
            '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "abcdef123"}]',
        ),
    ):
        parser = AnswerParser(templates[name].answer_format, tools=TOOLS)
        deltas = [*map(parser.add, text), parser.finish()]
        (call,) = joined_calls([call for delta in deltas for call in delta.tool_calls])
        assert (call.id, call.name, call.arguments) == ("abcdef123", "add", "{}")


def test_grammars_allow_what_templates_render(templates: dict[str, ChatTemplate]) -> None:
    # \u escapes, indented JSON, objects in Python's notation and an empty line in the place of
    # arguments are read, but not asked for
    otherwise = {
        "ByteDance-Seed-OSS",
        "CohereForAI-c4ai-command-r-plus-tool_use",
        "Reka-Edge",
        "deepseek-ai-DeepSeek-V4",
        "deepseek-ai-DeepSeek-V4-Flash-0731",
        "openbmb-MiniCPM5-1B",
    }
    vocabulary = llguidance.LLTokenizer("byte")
    refused = []
    for name in sorted(templates.keys() - NO_FORMAT.keys() - otherwise):
        template = templates[name]
        form = template.answer_format
        assert form.calls is not None
        for calls, content, reasoning in answers(name, parallel=form.calls.parallel):
            written = rendered(template, calls, content, reasoning)
            if written is None or not calls or reasoning is not None or written[1]:
                continue
            text = written[0].lstrip()
            for end in form.ends:
                text = text.removesuffix(end)
            for marks in (form.reasoning,) if form.reasoning else ():  # an empty one
                text = text.removeprefix(marks.open).lstrip().removeprefix(marks.close).lstrip()
            parallel, required = len(calls) > 1, content not in text or not content
            grammar = tool_grammar(
                form, TOOLS, required=required, parallel=parallel, in_reasoning=False, added={}
            )
            matcher = llguidance.LLMatcher(vocabulary, grammar)
            count = matcher.try_consume_tokens(vocabulary.tokenize_str(text.rstrip()))
            if count < len(text.rstrip().encode()):
                refused.append((name, required, text, text.encode()[count:], grammar))
    assert refused == []


@pytest.mark.parametrize("last", ["system", "user", "tool"])
def test_a_later_system_message_is_in_every_prompt(
    templates: dict[str, ChatTemplate], llm: LLM, last: str
) -> None:
    """Of its own, or as a part of a message of the user; agents send it behind the last message."""
    call = ToolCall("edgeId001", "add", '{"a": 1}')
    end = {
        "system": [Message("user", "second question"), Message("system", "late words")],
        "user": [Message("system", "late words"), Message("user", "second question")],
        "tool": [
            Message("user", "second question"),
            Message("assistant", "", tool_calls=(call,)),
            Message("tool", "result", tool_call_id="edgeId001", name="add"),
            Message("system", "late words"),
        ],
    }[last]
    messages = [Message("user", "first question"), Message("assistant", "first answer"), *end]
    for name, template in templates.items():
        tools = TOOLS if template.traits.takes_tools else ()
        if name == "fireworks-ai-llama-3-firefunction-v2" or (
            last == "tool" and (template.traits.renders_calls or not tools)
        ):
            continue  # the first one needs a variable that no client gives
        ids = encode_conversation(messages, template, llm.engine.tokenizer, tools=tools)
        text = llm.engine.tokenizer.decode(ids, skip_special=False)
        assert "late words" in text, name
        first = [Message("system", "first words"), *messages[:2]]
        try:
            without = [*first, *(m for m in end if m.role != "system")]
            ids = encode_conversation(without, template, llm.engine.tokenizer, tools=tools)
        except TemplateError:
            continue  # it takes no system message at all
        if "first words" not in llm.engine.tokenizer.decode(ids):
            continue
        ids = encode_conversation([*first, *end], template, llm.engine.tokenizer, tools=tools)
        text = llm.engine.tokenizer.decode(ids)
        assert "first words" in text, name
        assert "late words" in text, name
