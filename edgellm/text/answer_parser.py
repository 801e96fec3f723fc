"""Streaming parser of an answer into reasoning, content and tool calls. Pure Python.

Text is held back only as long as it may belong to a marker. Text that begins like a call and is
none is content. White space around the parts is dropped. An answer may begin with calls that lack
their markers or stand in a code fence, as small models write them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from edgellm.text.call_parser import CallParser
from edgellm.text.marker_reader import MarkerReader, Reading, hold_back
from edgellm.text.tool_format import AnswerFormat, chunks
from edgellm.tool_use import Tool, ToolCallDelta

_FENCE, _FENCES = "```", ("```json", "```")


@dataclass(frozen=True)
class AnswerDelta:
    """The content, reasoning and pieces of tool calls that a piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class AnswerParser:
    """Parser of one answer's text, piece by piece.

    Args:
        format: markers of the model's answers.
        tools: tools that may be called; None: calls are content.
        in_reasoning: whether the prompt has begun the reasoning.
        short_ids: see `CallParser`.
        parallel: whether several calls without markers may stand in one answer.
    """

    def __init__(
        self,
        format: AnswerFormat,
        *,
        tools: Sequence[Tool] | None = None,
        in_reasoning: bool = False,
        short_ids: bool = False,
        parallel: bool = True,
    ) -> None:
        self._format = format
        self._parallel = parallel
        self._reader = MarkerReader()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._trim = False  # white space before content
        self._begun = False  # whether content has begun
        self._calls: CallParser | None = None
        if format.calls is not None and tools is not None:
            self._calls = CallParser(
                format.calls, self._reader, self._deltas.append, tools=tools, short_ids=short_ids
            )
        self._reading = self._answer(in_reasoning)
        next(self._reading, None)

    @property
    def calls(self) -> int:
        """Number of tool calls that have begun."""
        return 0 if self._calls is None else self._calls.count

    def add(self, text: str) -> AnswerDelta:
        """Parse a piece of the answer's text, and return the parts that it completes."""
        self._reader.add(text)
        next(self._reading, None)
        return self._delta()

    def finish(self) -> AnswerDelta:
        """End the answer, and return the parts of the text that was held back."""
        self._reader.ended = True
        next(self._reading, None)
        return self._delta()

    def _delta(self) -> AnswerDelta:
        delta = AnswerDelta("".join(self._content), "".join(self._reasoning), tuple(self._deltas))
        self._content.clear()
        self._reasoning.clear()
        self._deltas.clear()
        return delta

    def _answer(self, in_reasoning: bool) -> Generator[None, None, None]:
        marks, reader = self._format.reasoning, self._reader
        yield
        if marks is not None:
            begin = reader.at
            opened = in_reasoning
            if marks.open.strip() and (yield from reader.space()):
                opened = (yield from reader.marker(marks.open.strip())) or opened
            if opened:
                yield from self._thoughts(marks.close.strip())
            elif (yield from reader.marker(marks.close.strip())):
                self._trim = True  # some prompts leave an empty reasoning to be closed
            else:
                reader.at = begin
        yield from self._contents()

    def _thoughts(self, close: str) -> Generator[None, None, None]:
        """Read reasoning up to its end marker, the answer's end, or a call within it."""
        reader = self._reader
        yield from reader.space()
        self._trim = True
        markers = [chunks(close)[0], *self._call_triggers()]
        while True:
            reader.forget()
            hits = [(at, m) for at, m in ((reader.text.find(m), m) for m in markers) if at >= 0]
            end, marker = min(hits, default=(0, ""))
            if hits:
                before = reader.text[:end].rstrip()
                self._reasoning.append(before)
                reader.at = end
                if marker == markers[0] and (yield from reader.marker(close)):
                    return
                if marker != markers[0] and self._calls and (yield from self._calls.calls()):
                    return
                reader.at, end = len(before), end + len(marker)
            else:
                end = len(reader.text) - hold_back(reader.text, markers)
                end = len(reader.text[:end].rstrip())
            self._reasoning.append(reader.text[reader.at : end])
            reader.at = end
            if not hits and not (yield from reader.more()):
                self._reasoning.append(reader.rest.rstrip())
                reader.at = len(reader.text)
                return

    def _contents(self) -> Generator[None, None, None]:
        """Read content and calls up to the answer's end."""
        reader = self._reader
        while (self._parallel or not self.calls) and (yield from self._bare_call()):
            self._trim = True
        while True:
            reader.forget()
            at, trigger = self._next_trigger(self._triggers())
            if trigger is None:
                self._show(at)
                if not (yield from reader.more()):
                    reader.forget()
                    self._show(len(reader.text), last=True)
                    return
                continue
            self._show(len(reader.text[:at].rstrip()))
            shown, reader.at = reader.at, at
            if (yield from self._marked(trigger)):
                self._trim = True
            else:
                reader.at = shown
                self._show(at + max(1, len(trigger)))

    def _bare_call(self) -> Reading:
        """Read an object that is a call but for the markers around it, also in a code fence."""
        reader, begin, calls = self._reader, self._reader.at, self._calls
        if calls is None or self._format.calls is None or not self._format.calls.may_be_bare:
            return False
        if (yield from reader.space()):
            yield from reader.marker("} ")  # more of the call before, as its fence may be
            fence = first = yield from reader.first_of(_FENCES)
            if first == 1:  # perhaps the end of the one before
                yield from reader.space()
                fence = max(first, (yield from reader.first_of(_FENCES)))
            doubled = yield from reader.marker(" { {")  # as Qwen2.5-Coder's template shows it
            reader.at -= doubled
            if (yield from calls.bare()):
                # one brace too many is no text, whether it was opened or not
                yield from reader.marker(" }", unfinished=True)
                if fence >= 0:
                    yield from reader.marker(f" {_FENCE}", unfinished=True)
                return True
        reader.at = begin
        return False

    def _triggers(self) -> list[str]:
        """Return the texts with which calls and dropped markers begin."""
        triggers = [chunks(mark)[0] for mark in self._format.dropped]
        return [*triggers, *self._call_triggers()]

    def _call_triggers(self) -> list[str]:
        """Return the text that starts a call anywhere in an answer, if the format has one and the
        answer may have one more call."""
        if self._calls is None or self._format.calls is None:
            return []
        if self.calls and not self._parallel:
            return []
        trigger = self._format.calls.trigger
        return [] if trigger in ("", "[", "{") else [trigger]

    def _next_trigger(self, triggers: Sequence[str]) -> tuple[int, str | None]:
        """Find the place where a call or marker may begin, and its trigger.

        Without one: the end of the text that is content in any case, and None.
        """
        text = self._reader.text
        calls = self._format.calls if self._calls is not None else None
        if calls is not None and calls.trigger in ("", "[", "{") and not self._begun:
            begin = len(text) - len(text.lstrip())
            if text[begin : begin + 1] == (calls.trigger or "{"):
                return begin, calls.trigger
        hits = [(at, t) for at, t in ((text.find(t), t) for t in triggers) if at >= 0]
        if hits:
            return min(hits)
        safe = len(text) - hold_back(text, triggers)
        return len(text[:safe].rstrip()), None

    def _marked(self, trigger: str) -> Reading:
        """Read calls, or a marker to drop, at the reading place; False if neither is there."""
        calls = self._format.calls
        asked = self._calls is not None and calls is not None and trigger == calls.trigger
        if asked and self._calls is not None and (yield from self._calls.calls()):
            return True
        return (yield from self._reader.first_of(self._format.dropped)) >= 0

    def _show(self, end: int, *, last: bool = False) -> None:
        """Show text up to `end` as content; white space alone is shown only at the answer's end."""
        text = self._reader.text[self._reader.at : end]
        if text and (not text.isspace() or (last and self._begun)):
            self._put(text)
            self._reader.at = end
        elif last and not self._trim:
            self._put(text)

    def _put(self, text: str) -> None:
        if self._trim:
            text = text.lstrip()
        if text:
            self._trim = False
            self._begun = True
            self._content.append(text)
