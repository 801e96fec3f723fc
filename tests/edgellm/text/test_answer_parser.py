from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.text.answer_parser import AnswerDelta, AnswerParser
from edgellm.text.call_values import JsonScanner
from edgellm.text.tool_format import (
    AnswerFormat,
    CallFormat,
    Marks,
    ObjectKeys,
    ParameterTags,
)
from edgellm.tool_use import Tool, ToolCallDelta, joined_calls

KEYS = ObjectKeys(name="name", arguments="arguments")
THINK = Marks("<think>", "</think>")
HERMES = AnswerFormat(
    calls=CallFormat(kind="object", open="<call>\n", close="\n</call>", between="\n", keys=KEYS),
    reasoning=THINK,
)
BARE = AnswerFormat(calls=CallFormat(kind="object", keys=KEYS))
TAGGED = AnswerFormat(
    calls=CallFormat(
        kind="tagged",
        open="<call>",
        close="</call>",
        tags=ParameterTags(
            key_open="<key>", texts=("</key><value>",), values=("</key><value>",),
            value_close="</value>",
        ),
    ),
    reasoning=THINK,
)  # fmt: skip
LIST = AnswerFormat(
    calls=CallFormat(kind="object", section="[CALLS][", between=", ", section_close="]", keys=KEYS)
)
PYTHON = AnswerFormat(
    calls=CallFormat(kind="python", section="<calls>[", between=", ", section_close="]</calls>")
)
BRACES = AnswerFormat(
    calls=CallFormat(kind="braces", open="<call>call:", close="</call>", quote='<|"|>')
)
FORMATS = (HERMES, BARE, TAGGED, LIST, PYTHON, BRACES)
TOOLS = (Tool("f", "", {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}),)


def read(
    form: AnswerFormat, text: str, *, size: int = 1, in_reasoning: bool = False
) -> list[AnswerDelta]:
    parser = AnswerParser(form, tools=TOOLS, in_reasoning=in_reasoning)
    cuts = [text[i : i + size] for i in range(0, len(text), size)]
    return [*map(parser.add, cuts), parser.finish()]


def joined(deltas: list[AnswerDelta]) -> tuple[str, str, list[tuple[str, str]]]:
    calls = joined_calls([call for delta in deltas for call in delta.tool_calls])
    return (
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [(call.name, call.arguments) for call in calls],
    )


def test_arguments_come_as_they_are_written() -> None:
    parser = AnswerParser(HERMES, tools=TOOLS)
    assert parser.add('Hi <call>\n{"name": "f", "arg') == AnswerDelta("Hi")
    (begun, first) = parser.add('uments": {"s": "a').tool_calls
    assert (begun.index, begun.name, begun.arguments) == (0, "f", "")
    assert begun.id is not None
    assert begun.id.startswith("call_")
    assert first == ToolCallDelta(0, arguments='{"s": "a')
    assert parser.add('b"}').tool_calls == (ToolCallDelta(0, arguments='b"}'),)
    assert parser.add("}\n</call>") == AnswerDelta()
    assert parser.finish() == AnswerDelta()
    assert parser.calls == 1


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    parser = AnswerParser(HERMES, tools=TOOLS)
    shown = [parser.add(text).content for text in ("a", " ", "<", "b", "<call", "er>", " x", "\n")]
    assert shown == ["a", "", "", " <b", "", "<caller>", " x", ""]
    assert parser.finish().content == "\n"


def test_reasoning_with_and_without_its_begin() -> None:
    expected = ("So.", "Hm.", [])
    assert joined(read(HERMES, "<think>\nHm.\n</think>\n\nSo.")) == expected
    assert joined(read(HERMES, "\nHm.\n</think>\n\nSo.", in_reasoning=True)) == expected
    assert joined(read(HERMES, "<think>Hm.</think>So.", in_reasoning=True)) == expected
    assert joined(read(HERMES, "</think>So.")) == ("So.", "", [])
    assert joined(read(HERMES, "So <think>")) == ("So <think>", "", [])
    assert joined(read(HERMES, "Hm. </thi", in_reasoning=True)) == ("", "Hm. </thi", [])
    assert joined(read(BARE, "<think>Hm.")) == ("<think>Hm.", "", [])


def test_a_call_in_the_reasoning_ends_it() -> None:
    text = 'Hm.\n<call>{"name": "f", "arguments": {}}</call>'
    assert joined(read(HERMES, text, in_reasoning=True)) == ("", "Hm.", [("f", "{}")])


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        (HERMES, '<call>{"name":"f"}</call>', [("f", "{}")]),
        (HERMES, '<call>{"arguments": {"n": 1}, "name": "f"}</call>', [("f", '{"n": 1}')]),
        (HERMES, '<call>{"name": "f", "arguments": "{\\"n\\": 1}"}</call>', [("f", '{"n": 1}')]),
        (HERMES, '<call> {"x": [1], "name": "f", "arguments": {}} </call>', [("f", "{}")]),
        (HERMES, '<call>{"name": "f", "parameters": {"n": 1}}</call>', [("f", '{"n": 1}')]),
        (HERMES, '<call>{"parameters": {"n": 1}, "name": "f"}</call>', [("f", '{"n": 1}')]),
        (HERMES, '<call>{"name": "f", "arguments": null}</call>', [("f", "{}")]),
        (HERMES, '<call>{"name": "f", "arguments": {}, "parameters": {"n": 1}}</call>',
         [("f", "{}")]),
        (BARE, ' {"name": "f", "arguments": {}}', [("f", "{}")]),
        (BARE, '{"name": "f", "arguments": {}}; {"name": "g"}', [("f", "{}"), ("g", "{}")]),
        (LIST, '[CALLS] [ {"name": "f"} ,{"name": "g"} ]', [("f", "{}"), ("g", "{}")]),
        (LIST, '[CALLS][{"name": "f"}', [("f", "{}")]),
        (TAGGED, "<call>f</call>", [("f", "{}")]),
        (TAGGED, "<call>f<key>n</key><value>1</value></call>", [("f", '{"n": 1}')]),
        (TAGGED, "<call>f<key>s</key><value>1</value></call>", [("f", '{"s": "1"}')]),
        (TAGGED, "<call>f<key>x</key><value>{'a': True}</value></call>",
         [("f", '{"x": {"a": true}}')]),
        (TAGGED, "<call>f<key>x</key><value>True</value></call>", [("f", '{"x": true}')]),
        (TAGGED, "<call>f<key>x</key><value>a {</value></call>", [("f", '{"x": "a {"}')]),
        (PYTHON, "<calls>[f(s='a)', n=-1), g()]</calls>",
         [("f", '{"s": "a)", "n": -1}'), ("g", "{}")]),
        (BRACES, '<call>call:f{s:<|"|>a}<|"|>,n:1,o:{l:[1,true]}}</call>',
         [("f", '{"s": "a}", "n": 1, "o": {"l": [1, true]}}')]),
    ],
)  # fmt: skip
def test_ways_to_write_a_call(form: AnswerFormat, text: str, calls: list[tuple[str, str]]) -> None:
    for size in (1, 3, len(text)):
        assert joined(read(form, text, size=size)) == ("", "", calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "<call>{}</call>"),
        (HERMES, '<call>{"name": 3, "arguments": {}}</call>'),
        (HERMES, '<call>{"name": "f g", "arguments": {}}</call>'),
        (HERMES, f'<call>{{"name": {"1" * 5000}, "arguments": {{}}}}</call>'),
        (HERMES, '<call>{"name": "f", "arguments": [1]}</call>'),
        (HERMES, "<call>f()</call>"),
        (HERMES, '<call>{"na'),
        (BARE, '{"a": 1} is JSON'),
        (BARE, '{"name": "f"'),
        (BARE, 'See: {"name": "f", "arguments": {}}'),
        (TAGGED, "<call></call>"),
        (TAGGED, "<call>f g</call>"),
        (PYTHON, "<calls>[f(1)]</calls>"),
        (PYTHON, "<calls>[f(s=open('x'))]</calls>"),
        (PYTHON, "<calls>[f(s={1, 2})]</calls>"),
        (PYTHON, "<calls>[f(s=__import__)]</calls>"),
        (BRACES, "<call>call:f{s:what}</call>"),
        (BRACES, "<call>call:f{"),
    ],
)
def test_what_is_no_call_is_content(form: AnswerFormat, text: str) -> None:
    for size in (1, 3, len(text)):
        assert joined(read(form, text, size=size)) == (text, "", [])


@pytest.mark.parametrize(
    ("form", "text", "content", "arguments"),
    [
        (HERMES, '<call>{"name": "f", "arguments": {"s": "ab', "", '{"s": "ab'),
        (HERMES, '<call>{"name": "f", "arguments": {"n": 1}}\n</ca', "", '{"n": 1}'),
        (HERMES, '<call>{"name": "f", "arguments": {n: 1}}</call>', "n: 1}}</call>", "{"),
        (TAGGED, "<call>f<key>n</key><value>1</value><key>s", "", '{"n": 1'),
        (TAGGED, "<call>f<key>n</key><value>1</value>oh", "oh", '{"n": 1'),
    ],
)
def test_a_call_that_is_cut_off_or_goes_wrong(
    form: AnswerFormat, text: str, content: str, arguments: str
) -> None:
    for size in (1, 2, len(text)):
        found = joined(read(form, text, size=size))
        assert found[2] == [("f", arguments)]
        assert content in found[0]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "arguments": {"n": 1}}', "", ['{"n": 1}']),
        ('```json\n{"name": "f", "arguments": {"n": 1}}\n```', "", ['{"n": 1}']),
        ('\n```\n{\n  "name": "f",\n  "arguments": {\n"n": 1}\n}\n```\n', "", ['{"n": 1}']),
        ('```json\n{"name": "f", "arguments": {"n": 1}}', "", ['{"n": 1}']),
        ('{{"name": "f", "arguments": {"n": 1}}}\nDone.', "Done.", ['{"n": 1}']),
        ('```\n{\n{"name": "f", "arguments": {}}\n}\n```', "", ["{}"]),
        ('{{"name": "f", "arguments": {}}', "", ["{}"]),
        ('{"id": 3, "name": "f", "arguments": {}}', '{"id": 3, "name": "f", "arguments": {}}', []),
        ('{"name": "f", "parameters": "{\\"n\\": 1}", "id": "x"}', "", ['{"n": 1}']),
        (
            '{"name": "f", "arguments": {}}\n{"name": "f", "arguments": {"n": 2}}',
            "",
            ["{}", '{"n": 2}'],
        ),
        (
            '```json\n{"name": "f", "arguments": {}}\n```\n'
            '```json\n{"name": "f", "arguments": {}}\n```\nDone.',
            "Done.",
            ["{}", "{}"],
        ),
        (
            '{"name": "f", "arguments": {}}\n<call>\n{"name": "f", "arguments": {}}\n</call>',
            "",
            ["{}", "{}"],
        ),
        ('<think>Hm.</think>\n{"name": "f", "arguments": {}}', "", ["{}"]),
    ],
)
def test_an_answer_that_begins_with_calls_without_markers(
    text: str, content: str, calls: list[str], size: int
) -> None:
    found, _, made = joined(read(HERMES, text, size=size))
    assert found.strip() == content
    assert made == [("f", arguments) for arguments in calls]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "g", "arguments": {}}',
        '```json\n{"name": "g", "arguments": {}}\n```',
        '```python\n{"name": "f", "arguments": {}}\n```',
        'See: {"name": "f", "arguments": {}}',
        'See:\n```json\n{"name": "f", "arguments": {}}\n```',
        '{"kind": "x", "name": "f", "arguments": {}}',
        '[{"name": "f", "arguments": {}}]',
        '{{"name": "g", "arguments": {}}}',
        '{{{"name": "f", "arguments": {}}}}',
        "{{",
        '{"name": 3}',
        '{"name": "f"}',
        '{"name": "f", "description": "A tool", "arguments": {}}',
        '{"name": "f", "parameters": {}, "arguments": {}}',
        '{"name": "f", "s": "a"}',
        '{"name": "f", "arguments": {"s": \'a\'}}',
        '{"name": "f", "arguments": {"n": 1,}}',
        '{"name": "f", "arguments": {"n": 1',
        '{"name": "f", "arguments": 3}',
        "```json\n{",
        "``",
        "{",
    ],
)
def test_other_json_is_content(text: str, size: int) -> None:
    assert joined(read(HERMES, text, size=size)) == (text, "", [])


def test_one_call_without_markers_where_more_are_not_wanted() -> None:
    call = '{"name": "f", "arguments": {}}'
    parser = AnswerParser(HERMES, tools=TOOLS, parallel=False)
    deltas = [parser.add(f"{call}\n{call}"), parser.finish()]
    assert joined(deltas) == (call, "", [("f", "{}")])


def test_other_json_is_shown_as_it_arrives() -> None:
    parser = AnswerParser(HERMES, tools=TOOLS)
    shown = [parser.add(text).content for text in ("```json\n", '{"a"', ": [1", ", 2]}")]
    assert shown == ["", '```json\n{"a"', ": [1", ", 2]}"]


def test_without_tools_calls_are_content() -> None:
    text = '<think>Hm</think><call>{"name": "f"}</call>'
    parser = AnswerParser(HERMES)
    assert joined([parser.add(text), parser.finish()]) == (text[17:], "Hm", [])


WORDS = st.sampled_from(
    ("<call>", "</call>", "<think>", "</think>", '{"name": "f", "arguments": {"s": "x"}}', "\n",
     "<key>n</key><value>1</value>", "[CALLS][", "]", ", ", "<calls>[", "f(n=1)", "call:f{n:1}",
     "f", "g", '"', "{", "}", "<", "a b ", "é", "\\", "<|", "</calls>", ";", '{"name":')
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(WORDS, max_size=12), st.data(), st.booleans())
def test_cuts_change_nothing(
    form: AnswerFormat, words: list[str], data: st.DataObject, opened: bool
) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser = AnswerParser(form, tools=TOOLS, in_reasoning=opened)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = joined([*map(parser.add, pieces), parser.finish()])
    assert found == joined(read(form, text, size=max(1, len(text)), in_reasoning=opened))
    if "<" not in text and "{" not in text and "[" not in text and not opened:
        assert found[0] == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=5), VALUES), st.booleans(), st.integers(1, 9))
def test_any_arguments_come_back(arguments: dict[str, Any], ascii_: bool, size: int) -> None:
    call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_)
    content, _, calls = joined(read(HERMES, f"Hi\n<call>\n{call}\n</call>", size=size))
    assert content == "Hi"
    assert [(name, json.loads(text)) for name, text in calls] == [("f", arguments)]


@settings(max_examples=80, deadline=None)
@given(VALUES, st.integers(1, 5), st.sampled_from(["", "x", "}", ' "', ",1"]))
def test_the_scanner_stops_at_the_end_of_a_value(value: Any, size: int, rest: str) -> None:
    text = json.dumps([value])
    scanner, taken, at = JsonScanner(), "", 0
    whole = text + rest
    while not (scanner.done or scanner.failed) and at < len(whole):
        part, end = scanner.feed(whole[at : at + size])
        taken, at = taken + part, at + end
    assert scanner.done
    assert taken == text


@pytest.mark.parametrize(
    "text",
    ["[1,]", "{,}", '{"a" 1}', "{1: 2}", "[01]", "[1.]", "[.5]", "[tru ]", '["\\x"]', "[1 2]", "]",
     '{"a": }', "[-]", "[1e]", "{'a': 1}", "[" * 200],
)  # fmt: skip
def test_the_scanner_refuses_what_is_no_json(text: str) -> None:
    scanner = JsonScanner()
    scanner.feed(text)
    assert scanner.failed
    assert not scanner.done


def test_line_ends_in_texts_are_escaped() -> None:
    scanner = JsonScanner()
    text, _ = scanner.feed('{"a": "b\nc\td"}')
    assert json.loads(text) == {"a": "b\nc\td"}


def calls_of(call: Callable[[], object]) -> int:
    """How many functions a call calls, in Python and in C."""
    count = 0

    def counted(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_the_work_of_a_long_answer_is_linear() -> None:
    def parse(words: int) -> None:
        arguments = json.dumps({"name": "f", "arguments": {"s": "word " * words}})
        text = "word " * words + f"<call>{arguments}</call>"
        deltas = read(HERMES, text, size=5)
        assert joined(deltas)[2][0][1].count("word") == words

    assert calls_of(lambda: parse(2000)) < 5 * calls_of(lambda: parse(500))


WRITTEN = (
    (HERMES, '<call>{"name": "f", "arguments": {"n": 1, "s": "x"}}</call>'),
    (BARE, '{"name": "f", "arguments": {"s": "é\\u00e9"}}; {"name": "g"}'),
    (LIST, '[CALLS] [ {"name": "f", "arguments": {"n": [1]}} ,{"name": "g"} ]'),
    (TAGGED, "<call>f<key>n</key><value>1</value><key>x</key><value>{'a': True}</value></call>"),
    (PYTHON, "<calls>[f(s='a)', n=-1, x=[1, {'a': None}]), g()]</calls>"),
    (BRACES, '<call>call:f{s:<|"|>a}<|"|>,n:1,o:{l:[1,true]}}</call>'),
)
INSERTED = (
    *("1" * 5000, "[" * 5000, '{"a":' * 2000, "-" * 3000, "\ud83d", '"\\ud83d"', "\0", "\\", "\n"),
    *("'", '"', "(", ")", "}", "<", "null", "NaN", "1e999", "f'{x}'", "b''", "**x", "{1}", "1j"),
)  # fmt: skip


@settings(max_examples=150)
@given(st.sampled_from(WRITTEN), st.data(), st.booleans(), st.sampled_from([1, 7, 10**6]))
def test_any_text_is_an_answer(
    written: tuple[AnswerFormat, str], data: st.DataObject, opened: bool, size: int
) -> None:
    form, text = written
    for _ in range(data.draw(st.integers(1, 3))):
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        put = data.draw(st.sampled_from(("", text[begin:end] * 2, *INSERTED)))
        text = text[:begin] + put + text[end:]
    _, _, calls = joined(read(form, text[:8_000], size=size, in_reasoning=opened))
    assert all(name.isascii() for name, _ in calls)
