"""Grammars in llguidance's Lark for answers with tool calls.

A grammar is lazy: any text is allowed until a call begins, which then has the name of a tool and
arguments of its schema. A required call begins at once, or after the reasoning.
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgellm.text.grammar import WHITESPACE, Grammar
from edgellm.text.tool_format import (
    ID_SLOT,
    INDEX_SLOT,
    KEY_SLOT,
    NAME_SLOT,
    SLOTS,
    TYPE_SLOT,
    AnswerFormat,
    CallFormat,
)
from edgellm.tool_use import Tool

_MOST_LOOKED_AT = 100
_TEXT = r"/(.|\n)*/"
# What may stand before a call without markers: the ends of another one's braces and code fence, a
# fence, and a second brace, which the template of Qwen2.5-Coder shows by mistake. `AnswerParser`
# reads the same.
_FENCED = r"\s*(\}\s*)?(```\s*)?(```(json)?\s*)?(\{\s*)?"
_SPACE = r"/[ \n]{0,4}/"
_LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,  # keywords that llguidance cannot hold an answer to are left out
}
# Booleans as JSON and Python write them; templates differ.
_BOOLEAN = '("true" | "false" | "True" | "False")'
_PATTERNS = {ID_SLOT: "/[A-Za-z0-9]{9}/", INDEX_SLOT: "/[0-9]{1,3}/"}


def tool_grammar(
    format: AnswerFormat,
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    in_reasoning: bool,
    added: Mapping[str, int],
) -> str:
    """Write a grammar for answers with tool calls.

    Args:
        format: format of the model's answers, with calls.
        tools: tools that may be called.
        required: whether the answer must be a call.
        parallel: whether several calls may stand in one answer.
        in_reasoning: whether the prompt has begun the reasoning.
        added: ids of the vocabulary's added tokens by their texts, which llguidance does not match
            as text.
    """
    assert format.calls is not None
    return _Grammar(format, format.calls, added).text(
        tools, required=required, parallel=parallel, in_reasoning=in_reasoning
    )


def loosened(tool: Tool, compiles: Callable[[Tool], bool]) -> Tool:
    """Return a tool with any JSON allowed in the place of what no grammar can hold.

    Args:
        compiles: whether a grammar can be made for a tool.
    """
    if compiles(tool):
        return tool
    values: Mapping[str, Any] = tool.schema["properties"]
    shared = ("$defs", "definitions")
    definitions: dict[str, Any] = {k: tool.schema[k] for k in shared if k in tool.schema}

    def alone(key: str) -> Tool:
        only = {"properties": {key: values[key]}, "required": [key]}
        return replace(tool, parameters={**definitions, **only})

    few = len(values) <= _MOST_LOOKED_AT  # each takes 1 ms
    kept = {key: value for key, value in values.items() if few and compiles(alone(key))}
    anything: dict[str, Any] = {key: {} for key in values}
    properties, required = {**anything, **kept}, _required(tool.schema)
    tried: list[dict[str, Any]] = [
        {**tool.parameters, "properties": properties},
        {**definitions, "properties": properties, "required": required},
        {"properties": properties, "required": required},
    ]
    for parameters in tried:
        if compiles(loose := replace(tool, parameters=parameters)):
            return loose
    return replace(tool, parameters={"properties": anything, "additionalProperties": True})


def after_reasoning(format: AnswerFormat, grammar: Grammar, *, added: Mapping[str, int]) -> str:
    """Write a grammar for reasoning that the prompt has begun, and then a text of a grammar.

    Args:
        format: format of the model's answers, with markers of reasoning.
        grammar: grammar of the answer after the reasoning.
        added: see `tool_grammar`.

    Raises:
        OptionError: the grammar cannot be converted.
    """
    rules = _Rules(format, added)
    before = rules.reasoning(in_reasoning=True)
    if grammar.kind != "json_schema":
        parts = [{"lark_grammar": rules.grammar(f"{before} @answer")}]
        parts.append({"name": "answer", "lark_grammar": grammar.lark()})
        return json.dumps({"grammars": parts})
    schema = json.loads(grammar.text)
    if isinstance(schema, Mapping):
        given = schema.get("x-guidance")
        layout = {**(given if isinstance(given, Mapping) else {}), "whitespace_pattern": WHITESPACE}
        schema = {**schema, "x-guidance": layout}
    return rules.grammar(f"{before} %json {json.dumps(schema)}")


class _Rules:
    """Collector of the rules of a grammar."""

    def __init__(self, format: AnswerFormat, added: Mapping[str, int]) -> None:
        self._format = format
        self._added = added
        texts = sorted((re.escape(text) for text in added if text), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(texts)})") if texts else None
        self._names: set[str] = set()
        self._rules = [f"TEXT: {_TEXT}", f"SPACE: {_SPACE}"]

    def grammar(self, start: str) -> str:
        rules = "\n".join(self._rules)
        return f"%llguidance {{}}\nstart: {start}\n{rules}\n"

    def literal(self, text: str) -> str:
        """Write a marker: added tokens by their ids, slots as patterns, other text as it is."""
        parts = []
        for chunk in re.split(f"([{SLOTS}])", text):
            if chunk in _PATTERNS:
                parts.append(_PATTERNS[chunk])
                continue
            for part in self._pattern.split(chunk) if self._pattern else [chunk]:
                if part in self._added:
                    parts.append(f"<[{self._added[part]}]>")
                elif part:
                    parts.append(_quoted(part))
        return " ".join(parts)

    def reasoning(self, *, in_reasoning: bool) -> str:
        marks = self._format.reasoning
        if marks is None:
            return ""
        thoughts = f"{self._until(marks.close.strip(), 'thoughts')} SPACE"
        if in_reasoning:
            return thoughts
        return f"(SPACE {self.literal(marks.open.strip())} {thoughts})?"

    def _until(self, end: str, name: str) -> str:
        """Write any text and the marker that ends it.

        Args:
            end: the marker.
            name: name of the rule to add if `end` has no added token.
        """
        special = self._pattern.search(end) if self._pattern else None
        if special is not None:
            return f"TEXT {self.literal(end)}"
        return self._rule(f"{name}[suffix={_quoted(end)}]", "TEXT").partition("[")[0]

    def _rule(self, name: str, body: str) -> str:
        self._names.add(name)
        self._rules.append(f"{name}: {body}")
        return name


class _Grammar(_Rules):
    """Collector of the rules of answers with tool calls."""

    def __init__(self, format: AnswerFormat, calls: CallFormat, added: Mapping[str, int]) -> None:
        super().__init__(format, added)
        self._calls = calls

    def text(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool, in_reasoning: bool
    ) -> str:
        form = self._calls
        self._rule("call", " | ".join(self._call(i, tool) for i, tool in enumerate(tools)))
        reasoning = self.reasoning(in_reasoning=in_reasoning)
        begin = form.begin
        if required:
            reasoning = reasoning if in_reasoning else ""
            start = self._listed_calls(begin, parallel=parallel)
        elif not begin:
            self._rule("OTHER", r"/[^{](.|\n)*/")
            start = f"({self._listed_calls(begin, parallel=parallel)} | OTHER)?"
        else:
            start = self._anywhere(tools, parallel=parallel, in_reasoning=in_reasoning)
        return self.grammar(f"{reasoning} {start}")

    def _anywhere(self, tools: Sequence[Tool], *, parallel: bool, in_reasoning: bool) -> str:
        """Write any text with calls in it; the first ones may be without their markers."""
        several = parallel and not self._calls.section.strip()
        if not self._calls.may_be_bare:
            later = self._triggered("TEXT", "trigger", parallel=parallel)
            return f"({later}){'*' if several else '?'} TEXT"
        bare = self._bare(tools, "" if in_reasoning else self._thoughts_in_text())
        first = self._triggered("OTHER", "first_trigger", parallel=parallel)
        later = f"({self._triggered('TEXT', 'trigger', parallel=parallel)})*" if several else ""
        rest = f"OTHER | {first} {later} TEXT"
        return f"{bare}* ({rest})" if parallel else f"({bare} TEXT | {rest})"

    def _bare(self, tools: Sequence[Tool], before: str) -> str:
        """Write an object that is a call but for its markers, and OTHER for any other text.

        Args:
            before: terminal for the reasoning before it.
        """
        keys = self._calls.keys
        assert keys is not None
        heads = [f"{_FENCED}{keys.bare(tool.name)[0]}" for tool in tools]
        self._rule("BARE", rf"{before} /({'|'.join(heads)})(.|\n)*/")
        self._rule("OTHER", f"{_TEXT} & ~BARE")
        for i, head in enumerate(heads):
            self._rule(f"BARE_{i}", f"{before} /{head}/")
        each = (f"BARE_{i} arguments_{i}" for i in range(len(heads)))
        return self._rule("bare", rf"({' | '.join(each)}) /{keys.bare('')[1]}/")

    def _thoughts_in_text(self) -> str:
        """Write a terminal for reasoning, if its markers are no tokens that tell it from text."""
        marks = self._format.reasoning
        if marks is None or (self._pattern and self._pattern.search(marks.close)):
            return ""
        begin, end = _quoted(marks.open.strip()), marks.close.strip()
        ended = re.escape(end).replace("/", r"\/")
        self._rule("UNENDED", rf"{_TEXT} & ~/(.|\n)*{ended}(.|\n)*/")
        return self._rule("THOUGHTS", rf"(/\s*/ ({begin} UNENDED)? {_quoted(end)})") + "?"

    def _listed_calls(self, begin: str, *, parallel: bool) -> str:
        """Write one call, or several consecutive ones; the first is after the marker `begin`."""
        form = self._calls
        close = f"call {self.literal(form.close)}"
        more = f"({self.literal(form.between + form.open)} {close})*" if parallel else ""
        return f"{self.literal(begin)} {close} {more} {self.literal(form.section_close)}"

    def _triggered(self, text: str, name: str, *, parallel: bool) -> str:
        """Write a text up to the first marker of a call, and the rest of the call.

        Args:
            text: name of the terminal for the text.
            name: name of the rule to add if the marker has no added token.
        """
        begin, trigger = self._calls.begin, self._calls.trigger
        in_section = parallel and bool(self._calls.section.strip())
        special = self._pattern.match(trigger) if self._pattern else None
        if special is not None:
            rest = self._listed_calls(begin[special.end() :], parallel=in_section)
            return f"{text} <[{self._added[special[0]]}]> {rest}"
        self._rule(f"{name}[lazy]", f"{text} {_quoted(trigger)}")
        return f"{name} {self._listed_calls(begin[len(trigger) :], parallel=in_section)}"

    def _call(self, i: int, tool: Tool) -> str:
        write: Mapping[str, Callable[[int, Tool], str]] = {
            "object": self._object,
            "json": self._json,
            "tagged": self._tagged,
            "python": self._python,
            "braces": self._braces,
        }
        return self._rule(f"call_{i}", write[self._calls.kind](i, tool))

    def _object(self, i: int, tool: Tool) -> str:
        keys = self._calls.keys
        assert keys is not None
        schema = self._rule(f"arguments_{i}", _arguments(tool))
        if keys.name is None:
            return f'"{{" {_quoted(json.dumps(tool.name) + ": ")} {schema} "}}"'
        items = [(key, '"\\"" /[A-Za-z0-9_]{1,40}/ "\\""') for key in keys.others]
        items += [(keys.name, _quoted(json.dumps(tool.name))), (keys.arguments or "", schema)]
        if keys.id is not None:
            at = len(items) if keys.id_last else 0
            items.insert(at, (keys.id, f'"\\"" {_PATTERNS[ID_SLOT]} "\\""'))
        body = ' ", " '.join(f"{_quoted(json.dumps(key) + ': ')} {value}" for key, value in items)
        return f'"{{" {body} "}}"'

    def _json(self, i: int, tool: Tool) -> str:
        middle = self.literal(self._calls.middle.replace(NAME_SLOT, tool.name))
        return f"{_quoted(tool.name)} {middle} {_arguments(tool)}"

    def _tagged(self, i: int, tool: Tool) -> str:
        tags = self._calls.tags
        assert tags is not None
        parts = []
        for j, (key, schema, required) in enumerate(_parameters(tool)):
            close = tags.value_close.replace(KEY_SLOT, key)
            text = _is_text(schema)
            marker = (tags.texts or tags.values)[0] if text else tags.values[0]
            if text and tags.texts:
                value = self._text_value(schema, close, f"value_{i}_{j}")
            else:
                marker = next((m for m in tags.values if TYPE_SLOT not in m), marker)
                value = _BOOLEAN if _is_boolean(schema) else _schema(schema)
                value = f"{value} {self.literal(close)}"
            item = f"{self.literal(tags.key_open)} {_quoted(key)} {self.literal(marker)} {value}"
            parts.append(item if required else f"({item})?")
        middle = self.literal(self._calls.middle.replace(NAME_SLOT, tool.name))
        return f"{_quoted(tool.name)} {middle} {' '.join(parts)}"

    def _text_value(self, schema: Mapping[str, Any], close: str, name: str) -> str:
        choices = _choices(schema)
        if choices and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(map(_quoted, choices))}) {self.literal(close)}"
        return self._until(close, name)

    def _python(self, i: int, tool: Tool) -> str:
        return f'{_quoted(tool.name)} "(" {self._listed(tool, "=", ", ", i)} ")"'

    def _braces(self, i: int, tool: Tool) -> str:
        return f'{_quoted(tool.name)} "{{" {self._listed(tool, ":", ",", i)} "}}"'

    def _listed(self, tool: Tool, equals: str, comma: str, i: int) -> str:
        """Write the arguments of a tool with commas between them, the required ones first."""
        quote, parameters = self._calls.quote, _parameters(tool)
        required: list[str] = []
        optional: list[str] = []
        for j, (key, schema, needed) in enumerate(parameters):
            value = self._python_value(schema)
            if quote:
                value = self._brace_value(schema, f"value_{i}_{j}")
            item = f"{_quoted(key + equals)} {value}"
            (required if needed else optional).append(item)
        between = f" {_quoted(comma)} "
        if required:
            tail = "".join(f"({between}{item})?" for item in optional)
            return between.join(required) + tail
        listed = ""
        # any subset of them, in their order; in rules, as nested text would double with each
        for j, item in reversed([*enumerate(optional)]):
            body = f"{item} ({between}{listed})? | {listed}" if listed else item
            listed = self._rule(f"from_{i}_{j}", body)
        return f"({listed})?" if listed else ""

    def _python_value(self, schema: Mapping[str, Any]) -> str:
        if _is_boolean(schema):
            return _BOOLEAN
        if not _is_text(schema):
            return _schema(schema)
        choices = _choices(schema)
        if not choices:
            return r"""(/'([^'\\]|\\.)*'/ | /"([^"\\]|\\.)*"/)"""
        quoted = [q for choice in choices for q in (repr(choice), json.dumps(choice))]
        return f"({' | '.join(map(_quoted, quoted))})"

    def _brace_value(self, schema: Mapping[str, Any], name: str) -> str:
        quote = self._calls.quote
        if _is_text(schema):
            return f"{self.literal(quote)} {self._text_value(schema, quote, name)}"
        if schema.get("type") in ("integer", "number", "boolean"):
            return _schema(schema)
        if "brace" not in self._names:
            text = f"{self.literal(quote)} {self._until(quote, 'brace_text')}"
            self._rule("BRACE_WORD", r"/-?[0-9]+(\.[0-9]+)?|true|false|null/")
            self._rule("BRACE_KEY", "/[A-Za-z0-9_.$-]+/")
            self._rule("brace_list", 'brace ("," brace)*')
            self._rule("brace_items", 'BRACE_KEY ":" brace ("," BRACE_KEY ":" brace)*')
            nested = '"[" brace_list? "]" | "{" brace_items? "}"'
            self._rule("brace", f"BRACE_WORD | {text} | {nested}")
        return "brace"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _schema(schema: Mapping[str, Any]) -> str:
    """Write JSON of a schema, laid out as in templates, so that the next prompt has the same."""
    return f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT})}"


def _arguments(tool: Tool) -> str:
    schema = tool.schema
    return _schema({"additionalProperties": False, **schema, "required": _required(schema)})


def _parameters(tool: Tool) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return the name of each parameter of a tool, its schema, and whether it is required."""
    schema = tool.schema
    required = _required(schema)
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    values: Mapping[str, Any] = schema["properties"]
    return [
        (key, {**value, **shared} if isinstance(value, Mapping) else {}, key in required)
        for key, value in values.items()
    ]


def _is_boolean(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "boolean"


def _is_text(schema: Mapping[str, Any]) -> bool:
    choices = _choices(schema)
    return schema.get("type") == "string" or (
        "type" not in schema and bool(choices) and all(isinstance(v, str) for v in choices)
    )


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values of `enum`; none where it is missing or wrong."""
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def _required(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of required parameters; those that the schema does not have are left out."""
    names, known = schema.get("required"), schema["properties"]
    return [each for each in names if each in known] if isinstance(names, list) else []
