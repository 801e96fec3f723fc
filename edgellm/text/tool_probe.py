"""Search for the format of a model's answers, by rendering probes through its own chat template.

Conversations that differ in one thing (content or a call, one call or two, a text or a number as an
argument, with and without reasoning) are rendered, and their differences are taken apart. No
knowledge of particular models is used; renderings that do not come apart give no format, with a
reason. The idea is that of llama.cpp's differential parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgellm.errors import TemplateError
from edgellm.text.answer_parser import AnswerDelta, AnswerParser
from edgellm.text.call_shapes import (
    NotUnderstood,
    common_end,
    common_head,
    find_shape,
    probe_call,
    segments,
)
from edgellm.text.template_traits import PROBE_TOOL, PROBE_USER, Render, TemplateTraits
from edgellm.text.tool_format import AnswerFormat, CallFormat, Marks
from edgellm.tool_use import joined_calls

# Texts that no template has; they begin and end with a letter that no marker has.
_CONTENT, _REASONING = "\u03a9content\u03a9", "\u03a9reason\u03a9"
_TAG = re.compile(r"<[^<>\s][^<>]*>|\[/?[A-Z_]+\]")
_LAST_TAG = re.compile(rf"({_TAG.pattern})\w{{0,20}}\s*\Z")
_LONGEST_MARK = 80
# Limits in characters: renderings of probes by released templates have 6,500, their answers 650.
_LONGEST_RENDERING = 1 << 15
_LONGEST_ANSWER = 1 << 12
_MARKUP = re.compile(r"[^\w\s.,=]")


def find_answer_format(render: Render, traits: TemplateTraits, source: str) -> AnswerFormat:
    """Find the format of the answers that a template's model was trained on.

    A template may render anything, so any failure becomes a reason why there is no format.
    """
    try:
        return _found_format(_Probe(render, traits), source)
    except Exception as error:
        return AnswerFormat(calls=None, no_calls=_reason(error))


def _found_format(probe: _Probe, source: str) -> AnswerFormat:
    traits = probe.traits
    answer = probe.answer(_CONTENT)
    if answer is None or _CONTENT not in answer:
        reason = "the chat template does not render an answer's content"
        return AnswerFormat(calls=None, no_calls=reason)
    called = None if traits.renders_calls else probe.answer("", [probe_call(1)])
    other = probe.answer("other") if called is None else called
    head, end = common_head(answer, other or ""), common_end(answer, other or "")
    begin, _, behind = answer.partition(_CONTENT)
    content = Marks(begin.removeprefix(head).strip(), behind.removesuffix(end).strip())
    reasoning = _find_reasoning(probe, source, head, content)
    if reasoning is not None and not _reads_back(probe, reasoning, content, head, end):
        reasoning = None
    if reasoning is not None and reasoning.open in content.open:
        content = Marks("", content.close)
    if called is None:
        reason = traits.renders_calls or "the chat template does not render a call"
        return AnswerFormat(calls=None, no_calls=reason, reasoning=reasoning, content=content)
    plain = AnswerFormat(calls=None, reasoning=reasoning, content=content)
    try:
        calls = _find_calls(probe, called, head, end)
        if not calls.section.strip() and calls.section_close.strip():
            plain = replace(plain, ends=(calls.section_close.strip(),))
            calls = replace(calls, section_close="")
        form = replace(plain, calls=_without_reasoning(calls, reasoning))
        _check_calls(probe, form, head, end)
    except Exception as error:
        return replace(plain, no_calls=_reason(error))
    return form


def _reason(error: Exception) -> str:
    if isinstance(error, NotUnderstood):
        return str(error)
    return f"taking the chat template's renderings apart ended in a {type(error).__name__}"


@dataclass(frozen=True)
class _Probe:
    render: Render
    traits: TemplateTraits

    def answer(
        self,
        content: str,
        calls: Sequence[Mapping[str, Any]] = (),
        *,
        reasoning: str | None = None,
    ) -> str | None:
        """Render a conversation with one answer; None if the template refuses it."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            if self.traits.renders_calls:
                return None
            message = self.traits.call_message(content, calls)
        if reasoning is not None:
            if self.traits.reasoning_field is None:
                return None
            message[self.traits.reasoning_field] = reasoning
        return self._rendered([PROBE_USER, message], prompt=False)

    def prompt(self) -> str:
        """Render the prompt of an answer; "" if the template refuses it."""
        return self._rendered([PROBE_USER], prompt=True) or ""

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str | None:
        for tools in ((PROBE_TOOL,), ()):  # some templates take only one of these
            try:
                text = self.render(messages, tools=tools, add_generation_prompt=prompt)
            except TemplateError:
                continue
            _check_length(text, _LONGEST_RENDERING)
            return text
        return None


def _find_calls(probe: _Probe, called: str, head: str, end: str) -> CallFormat:
    one = called[len(head) : len(called) - len(end)]
    numbers = probe.answer("", [probe_call(1, edgekey1=7, edgekey2="edgevalue2")])
    typed = "" if numbers is None else numbers[len(head) : len(numbers) - len(end)]
    shape = find_shape(one, typed, probe_call(1))
    both = probe.answer("", [probe_call(1), probe_call(2)])
    two = None if both is None else both[len(head) : len(both) - len(end)]
    form = shape.form(one, two)
    if not form.begin and form.kind != "object":
        raise NotUnderstood("nothing marks the beginning of a call")
    if form.trigger and not _MARKUP.search(form.trigger):
        raise NotUnderstood(f"a call begins with the plain text {form.trigger!r}")
    return form


def _without_reasoning(calls: CallFormat, reasoning: Marks | None) -> CallFormat:
    """Return a call format without the empty reasoning that some templates write before calls."""
    if reasoning is None:
        return calls
    section = calls.section.lstrip().removeprefix(reasoning.open).lstrip()
    if not section.startswith(reasoning.close):
        return calls
    return replace(calls, section=section.removeprefix(reasoning.close))


def _check_calls(probe: _Probe, form: AnswerFormat, head: str, end: str) -> None:
    """Parse the rendered probes with a format.

    Raises:
        NotUnderstood: the parser does not return the calls that were rendered.
    """
    for numbers in ([1], [1, 2])[: 1 + (form.calls is not None and form.calls.parallel)]:
        asked = [probe_call(number) for number in numbers]
        text = (probe.answer("", asked) or "").removeprefix(head).removesuffix(end)
        deltas = _parsed(AnswerParser(form, tools=()), text)
        calls = joined_calls([call for delta in deltas for call in delta.tool_calls])
        read = [(call.name, _json(call.arguments)) for call in calls]
        expected = [(call["name"], call["arguments"]) for call in asked]
        if read != expected or any(delta.content.strip() for delta in deltas):
            raise NotUnderstood("the calls that the chat template renders do not read back")


def _parsed(parser: AnswerParser, text: str) -> tuple[AnswerDelta, AnswerDelta]:
    """Parse a whole answer at once, in time that grows with the square of its length."""
    _check_length(text, _LONGEST_ANSWER)
    return parser.add(text), parser.finish()


def _check_length(text: str, limit: int) -> None:
    if len(text) > limit:
        raise NotUnderstood(f"the chat template renders {len(text)} characters of a few words")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _find_reasoning(probe: _Probe, source: str, head: str, content: Marks) -> Marks | None:
    """Find the markers around the reasoning; None if there are none.

    Sources are its rendering before content or a call, the prompt's end, and the markers by which
    the template cuts it off old answers.
    """
    for text, follows in (
        (probe.answer(_CONTENT, reasoning=_REASONING), _CONTENT),
        (probe.answer("", [probe_call(1)], reasoning=_REASONING), ""),
    ):
        before, reasoning, behind = (text or "").partition(_REASONING)
        if not reasoning or (follows and follows not in behind):
            continue
        close = behind.partition(follows)[0].strip() if follows else behind
        close = close.removesuffix(content.open).strip()
        if not follows:
            tags = [segment for segment in segments(close.lstrip()) if len(segment) > 1]
            close = tags[0] if tags else ""
        opened = before.removeprefix(head).strip() if before.startswith(head) else ""
        tag = _LAST_TAG.search(before)
        tail = probe.prompt().removeprefix(head).strip()
        if not close:
            continue
        if _TAG.match(opened):
            return Marks(opened, close)
        if tail and not _TAG.search(tail) and not _twins(tag, close):
            return Marks(tail, close)  # some prompts begin it in words
        if tag is not None:
            return Marks(tag[0].strip(), close)
    tag = _LAST_TAG.search(probe.prompt())
    for opening in ([tag[1]] if tag else []) + ["<think>", "[THINK]"]:
        closing = f"{opening[0]}/{opening[1:]}"
        if opening in source and closing in source:
            return Marks(opening, closing)
    return None


def _reads_back(probe: _Probe, reasoning: Marks, content: Marks, head: str, end: str) -> bool:
    """Whether the parser tells reasoning and content of the rendered probe apart.

    Without such a rendering: whether the markers are short enough.
    """
    text = probe.answer(_CONTENT, reasoning=_REASONING)
    if text is None or _REASONING not in text:
        return max(len(reasoning.open), len(reasoning.close)) < _LONGEST_MARK
    begin = text.index(_REASONING)
    form = AnswerFormat(calls=None, reasoning=reasoning, content=content)
    parser = AnswerParser(form, in_reasoning=True)
    deltas = _parsed(parser, text[begin:].removesuffix(end))
    shown = "".join(delta.content for delta in deltas).strip()
    return shown == _CONTENT and len(reasoning.open) < _LONGEST_MARK


def _twins(tag: re.Match[str] | None, close: str) -> bool:
    return tag is not None and f"{tag[1][0]}/{tag[1][1:]}" == close
