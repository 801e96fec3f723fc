from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tokenizer
from tokenizers import Tokenizer as HFTokenizer

from edgellm.errors import OptionError
from edgellm.store.manifest import TokenizerEntry
from edgellm.text.answer_parser import AnswerParser
from edgellm.text.grammar import Grammar, Grammars
from edgellm.text.tokenizer import Tokenizer
from edgellm.text.tool_format import (
    AnswerFormat,
    CallFormat,
    Kind,
    Marks,
    ObjectKeys,
    ParameterTags,
)
from edgellm.text.tool_grammar import after_reasoning, loosened, tool_grammar
from edgellm.tool_use import MAX_TOOLS, Tool

FORMAT = AnswerFormat(
    calls=CallFormat(
        kind="object",
        open="<call>\n",
        close="\n</call>",
        between="\n",
        keys=ObjectKeys(name="name", arguments="arguments"),
    ),
    reasoning=Marks("<think>", "</think>"),
)
TOOL = Tool("f", "", {"properties": {"n": {"type": "integer"}}, "required": ["n"]})
CALL = '<call>\n{"name": "f", "arguments": {"n": 1}}\n</call>'


@pytest.fixture(params=["text", "added", "special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """Whose markers are text, added tokens as those of Qwen, or special ones as Mistral's."""
    save_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    whole = HFTokenizer.from_file(path)
    markers = ["<call>", "</call>", "<think>", "</think>"]
    if request.param == "added":
        whole.add_tokens(markers)
    elif request.param == "special":
        whole.add_special_tokens(markers)
    whole.save(path)
    return Tokenizer(tmp_path, TokenizerEntry("<s>", False, ("</s>",)))


def matcher_of(
    tokenizer: Tokenizer,
    *tools: Tool,
    required: bool = False,
    parallel: bool = True,
    in_reasoning: bool = False,
) -> Any:
    grammar = tool_grammar(
        FORMAT,
        tools,
        required=required,
        parallel=parallel,
        in_reasoning=in_reasoning,
        added=tokenizer.added_tokens,
    )
    return Grammars(tokenizer).matcher(grammar, "the grammar")


def ends_behind(matcher: Any, tokenizer: Tokenizer, text: str) -> bool | None:
    """Return whether an answer may end behind a text, or None if it may not have it at all."""
    tokens = tokenizer.encode(text, add_bos=False, parse_special=True)
    fits = matcher.try_consume_tokens(tokens) == len(tokens)
    return matcher.is_accepting() if fits else None


@pytest.mark.parametrize(
    ("text", "required", "in_reasoning", "ends"),
    [
        (CALL, True, False, True),
        (CALL, False, False, True),
        (f"{CALL}\n{CALL}", True, False, True),
        (f"So. {CALL}", False, False, True),
        ("So.", False, False, True),
        (f"<think>Hm.</think>\n{CALL}", False, False, True),
        (f"Hm.</think>\n{CALL}", True, True, True),
        ("<think>Hm.</think>So.", False, False, True),
        ("So.", True, False, None),
        (f"<think>Hm.</think>{CALL}", True, False, None),
        ('<call>\n{"name": "g"', False, False, None),
        ('<call>\n{"name": "f", "arguments": {"n": "', False, False, None),
        ('<call>\n{"name": "f", "arguments": {"m"', True, False, None),
        ('<call>\n{"name": "f", "arguments": {', True, False, False),
    ],
)
def test_what_an_answer_may_be(
    tokenizer: Tokenizer, text: str, required: bool, in_reasoning: bool, ends: bool | None
) -> None:
    matcher = matcher_of(tokenizer, TOOL, required=required, in_reasoning=in_reasoning)
    assert ends_behind(matcher, tokenizer, text) == ends


@pytest.mark.parametrize("parallel", [True, False])
def test_one_call_or_several(tokenizer: Tokenizer, parallel: bool) -> None:
    for required in (True, False):
        matcher = matcher_of(tokenizer, TOOL, required=required, parallel=parallel)
        fits = ends_behind(matcher, tokenizer, f"{CALL}\n<call>") is not None
        # what follows the only call may be any text, but no marker that is a token
        assert fits == (parallel or (not required and not tokenizer.added_tokens.get("<call>")))


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ('Hm.</think>{"n": 1}', True),
        ('Hm. {"n": "x"}</think>\n\n{ "n": 1}', True),
        ('</think>{"n":1', False),
        ("Hm.", False),
        ('Hm.</think>{"n": "', None),
        ("Hm.</think>So", None),
    ],
)
def test_json_behind_the_reasoning(tokenizer: Tokenizer, text: str, ends: bool | None) -> None:
    schema = {"type": "object", **TOOL.schema, "additionalProperties": False}
    held = Grammar("json_schema", json.dumps(schema))
    grammar = after_reasoning(FORMAT, held, added=tokenizer.added_tokens)
    matcher = Grammars(tokenizer).matcher(grammar, "the schema")
    assert ends_behind(matcher, tokenizer, text) == ends


@pytest.mark.parametrize(
    "held",
    [
        Grammar("gbnf", 'root ::= "a" b # {\nb ::= "}" | "\\x62"'),
        Grammar("lark", '%llguidance {}\nstart: "a" ("}" | "b")'),
        Grammar("regex", "a[}b]"),
        Grammar.one_of(["a}", "ab"]),
    ],
)
def test_a_grammar_behind_the_reasoning(tokenizer: Tokenizer, held: Grammar) -> None:
    grammar = after_reasoning(FORMAT, held, added=tokenizer.added_tokens)
    matcher = Grammars(tokenizer).matcher(grammar, held.name)
    for text, ends in (("Hm.</think>\nab", True), ("</think>a}", True), ("Hm.</think>ac", None)):
        assert ends_behind(matcher, tokenizer, text) == ends
        matcher.reset()


HARD: dict[str, dict[str, object]] = {
    "propertyNames": {"type": "object", "propertyNames": {"type": "string"}},
    "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "not": {"not": {"type": "string"}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "format": {"type": "string", "format": "int64"},
    "look-ahead": {"type": "string", "pattern": "^(?=a).*$"},
    "type": {"type": "nonsense"},
    "reference": {"$ref": "#/nowhere"},
    "remote": {"$ref": "https://example.org/schema.json"},
    "nothing": {"type": "string", "minLength": 5, "maxLength": 2},
}
# Schemas that say something wrong where they are read as a whole.
ODD: list[dict[str, Any]] = [
    {"required": None},
    {"required": True},
    {"required": ["n", "gone"]},
    {"additionalProperties": None},
    {"patternProperties": {"(?=a)": {}}},
    {"properties": {"n": {"type": "integer"}, "s": {"enum": None}}},
    {"properties": {"n": {"type": "integer"}, "s": {"type": "string", "enum": 5}}},
    {"properties": {"n": {"type": "integer"}, "s": {"type": [{}]}}},
    {"properties": {f"p{i}": {"type": "nonsense"} for i in range(300)}},
]
LEFT_OUT = {"propertyNames", "uniqueItems", "not", "if", "contains", "format"}


KINDS = ["object", "json", "tagged", "python", "braces"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keyword", HARD)
def test_no_schema_refuses_a_tool(tmp_path: Path, kind: Kind, keyword: str) -> None:
    """What llguidance can do without is left out; else the one parameter may be any JSON."""
    whole: dict[str, Any] = {"n": {"type": "integer"}, "hard": HARD[keyword]}
    tool = Tool("f", "", {"properties": whole, "required": ["n", "hard"]})
    compiles = compiler(tmp_path, kind)
    loose = loosened(tool, compiles)
    assert compiles(loose)
    if keyword in LEFT_OUT or loose == tool:
        assert loose == tool
    else:
        expected = {"properties": {"n": {"type": "integer"}, "hard": {}}}
        assert loose.parameters == {**expected, "required": ["n", "hard"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: json.dumps(odd)[:50])
def test_the_rest_of_an_odd_schema_is_held(tmp_path: Path, kind: Kind, odd: dict[str, Any]) -> None:
    whole = {"properties": {"n": {"type": "integer"}}, **odd}
    compiles = compiler(tmp_path, kind)
    loose = loosened(Tool("f", "", whole), compiles)
    assert compiles(loose)
    assert loose.schema["properties"].get("n", {"type": "integer"}) == {"type": "integer"}
    required = loose.schema.get("required")
    assert not isinstance(required, list) or "n" in required or not required


def compiler(tmp_path: Path, kind: Kind) -> Callable[[Tool], bool]:
    """Whether a grammar can be made for a tool that is called in some form."""
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path, TokenizerEntry("<s>", False, ("</s>",)))
    grammars = Grammars(tokenizer)
    assert FORMAT.calls is not None
    tags = (
        ParameterTags(key_open="<p=", texts=(), values=("> ",), value_close="</p>")
        if kind == "tagged"
        else None
    )
    quote = "'" if kind == "braces" else ""
    format = replace(FORMAT, calls=replace(FORMAT.calls, kind=kind, tags=tags, quote=quote))

    def compiles(tool: Tool) -> bool:
        grammar = tool_grammar(
            format,
            [tool],
            required=True,
            parallel=False,
            in_reasoning=False,
            added=tokenizer.added_tokens,
        )
        try:
            grammars.matcher(grammar, "tools")
        except OptionError:
            return False
        return True

    return compiles


BARE = '{"name": "f", "arguments": {"n": 1}}'


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (BARE, True),
        (f"\n```json\n{BARE}\n```", True),
        (f"```\n{BARE}\n```\nDone.", True),
        ('{\n  "name" : "f",\n  "arguments": {"n": 1}\n}', True),
        (f"{BARE} Then {CALL}", True),
        (f"{BARE}\n{BARE}", True),
        (f"```json\n{BARE}\n```\n```json\n{BARE}\n```", True),
        (f"{{{BARE}}}\n{{{BARE}}}", True),
        (f"```json\n{{\n{BARE}\n}}\n```", True),
        ('{{"name": "f", "arguments": {"n": "', None),
        ('{"name": "f"', True),  # as an object of any text
        ('{"name": "fg", "x": 1}', True),
        ('{"name": 3, "x": 1}', True),
        (f"So: {BARE[:-3]}", True),  # not at the beginning: any text
        ('{"name": "f", "arguments": {"m"', None),
        ('{"name": "f", "arguments": {"n": "', None),
        ('```json\n{"name": "f", "x"', True),
        ('{"name": "f"}', True),
        ('{"name": "f", "description": "A tool", "arguments": {}}', True),
        ('{"name": "f", "parameters": {"n": 1}}', True),
        ('{"name": "f", "parameters": {"m"', None),
        ('<think>Hm.</think>\n{"name": "f", "arguments": {"m"', None),
        ('</think>\n{"name": "f", "arguments": {"m"', None),
        ('{"name": "f", "id": "x", "arguments": {"m"', None),
        ('{"name": "f", "arguments": {"n": 1}, "id": "x"', False),
        ('{"name": "f", "arguments": {"n": 1}, "x"', None),
    ],
)
def test_calls_without_markers_are_held_as_well(
    tokenizer: Tokenizer, text: str, ends: bool | None
) -> None:
    matcher = matcher_of(tokenizer, replace(TOOL, name="g"), TOOL)
    assert ends_behind(matcher, tokenizer, text) == ends


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        BARE,
        f"{BARE} and {BARE}",
        f"```\n{BARE}\n```\nDone.",
        "Done.",
        BARE + "}",
        BARE + "}\n" + BARE,
        f"{BARE}\n```\n{BARE}",
        f"```json\n{{{BARE}}}\n```\n```json\n{BARE}\n```",
        f"}} {BARE}",
        f"```\n```json\n{BARE}\n```",
        f"{BARE}\n{CALL}",
        f"{CALL}\n{CALL}",
        '{"name": "f", "parameters": {"n": 1}}',
        '{"name": "f", "type": "function", "arguments": {"n": 1}}',
        '{"name": "f", "arguments": {"n": 1}, "id": "1", "type": "function"}',
        '{"name": "f", "description": "A tool", "arguments": {}}',
        f"<think>Hm.</think>{BARE}",
    ],
)
def test_what_is_held_is_read_as_a_call(tokenizer: Tokenizer, text: str, parallel: bool) -> None:
    """Arguments that are against the schema are no call's, and one call is wanted at most."""
    for said in (text, text.replace('"n"', '"m"')):
        matcher = matcher_of(tokenizer, TOOL, parallel=parallel)
        ends = ends_behind(matcher, tokenizer, said)
        if ends is None:
            assert said != text or not parallel
            continue
        assert ends
        parser = AnswerParser(FORMAT, tools=[TOOL], parallel=parallel)
        parts = [*(parser.add(piece) for piece in said), parser.finish()]
        calls: dict[int, str] = {}
        for delta in (delta for part in parts for delta in part.tool_calls):
            calls[delta.index] = calls.get(delta.index, "") + delta.arguments
        assert set(calls.values()) <= {'{"n": 1}'}
        assert len(calls) <= (2 if parallel else 1)
        if said == text and parallel and " and " not in text:
            assert len(calls) == text.count('"n": 1')
            assert "".join(part.content for part in parts).strip() in ("", "Done.", text)


@pytest.mark.parametrize(
    "text",
    [
        f'{{"name": "f",{" " * 13}"arguments": {{"n": 1}}}}',
        '{"name": "f", "arguments": {"n": 1}, "x": "1"}',
        '{"name": "f", "id": 1, "arguments": {"n": 1}}',
        f"```json```\n{BARE}",
        '{"name": ["f"], "arguments": {}}',
    ],
)
def test_what_no_grammar_holds_is_no_call(text: str) -> None:
    parser = AnswerParser(FORMAT, tools=[TOOL])
    parts = [*(parser.add(piece) for piece in text), parser.finish()]
    assert parser.calls == 0
    assert "".join(part.content for part in parts) == text


def test_as_many_tools_as_may_be(tokenizer: Tokenizer) -> None:
    """What may be a call without markers has to be told from other text for all of them."""
    tools = [replace(TOOL, name=f"mcp__server_{i}__{'do_it_' * 12}{i}") for i in range(MAX_TOOLS)]
    for text in (
        "```python\nprint()\n```",
        "\n```json\n{{",
        BARE.replace('"f"', f'"{tools[-1].name}"'),
    ):
        matcher = matcher_of(tokenizer, *tools)
        for token in tokenizer.encode(text, add_bos=False):
            matcher.compute_bitmask()
            assert matcher.consume_token(token), matcher.get_error()
