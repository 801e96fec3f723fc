"""The format in which a model writes reasoning, content and tool calls, found in its template.

    reasoning.open  ...  reasoning.close
    content.open  ...  content.close
    section  [ open CALL close ]  between  [ open CALL close ]  section_close

where CALL is one of

    object      {"name": NAME, "arguments": {...}}                      Hermes, Qwen3, Llama 3
    json        NAME middle {...}                                       Mistral, DeepSeek, Kimi
    tagged      NAME middle [ key_open KEY key_close VALUE value_close ]...     Qwen3-Coder, GLM
    python      NAME(KEY=VALUE, ...)                                    LFM2
    braces      NAME{KEY:VALUE,...}, texts between quotes of their own  Gemma 4

White space in the markers matches any other white space, or none. Pure Python.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["object", "json", "tagged", "python", "braces"]

# Slots: characters that stand in markers for texts that differ from call to call.
NAME_SLOT, ID_SLOT, INDEX_SLOT = "\ue001", "\ue002", "\ue003"
KEY_SLOT, TYPE_SLOT = "\ue004", "\ue005"
SLOTS = NAME_SLOT + ID_SLOT + INDEX_SLOT + KEY_SLOT + TYPE_SLOT
_CHUNK = re.compile(rf"\s+|[{SLOTS}]|[^\s{SLOTS}]+")


@dataclass(frozen=True, kw_only=True)
class ObjectKeys:
    """Keys of a tool call that is a JSON object.

    Attributes:
        name: key of the tool's name; None if the name is itself the key of the arguments.
        arguments: key of the arguments; None with `name`.
        id: key of the model's own identifier, if it writes one.
        id_last: whether the identifier stands after the arguments.
        others: further keys with a text.
    """

    name: str | None
    arguments: str | None
    id: str | None = None
    id_last: bool = False
    others: tuple[str, ...] = ()

    @property
    def argument_names(self) -> list[str]:
        """Keys of the arguments; models interchange the two usual ones."""
        usual = {"arguments", "parameters"} - set(self.others)
        return sorted(usual | ({self.arguments} if self.arguments else set()))

    def bare(self, name: str) -> tuple[str, str]:
        """Return regular expressions for a call without markers, before its arguments and behind.

        Identifiers and types, which some models write as well, may stand on both sides.

        Args:
            name: name of the tool.
        """
        labels = "|".join(re.escape(json.dumps(label)) for label in self.argument_names)
        others = "|".join(
            re.escape(json.dumps(key)) for key in sorted({self.id or "id", "id", "type"})
        )
        s = r"\s{0,12}"
        more = rf'({s},{s}({others}){s}:{s}"[^"\\\n]{{0,64}}")*'
        key, value = (re.escape(json.dumps(text)) for text in (self.name, name))
        return rf"\{{\s*{key}\s*:\s*{value}{more}{s},{s}({labels}){s}:{s}", rf"{more}{s}\}}"


@dataclass(frozen=True, kw_only=True)
class ParameterTags:
    """Markers around an argument of a `tagged` call.

    Attributes:
        key_open: marker before a key.
        texts: markers between a key and a text that is written as it is.
        values: markers between a key and JSON; if equal to `texts`, the tool's schema decides
            between text and JSON.
        value_close: marker after a value.
    """

    key_open: str
    texts: tuple[str, ...]
    values: tuple[str, ...]
    value_close: str


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """The form of tool calls, with the markers named at the head of this file.

    Attributes:
        keys: keys of calls of the kind `object`.
        tags: markers of arguments of the kind `tagged`.
        quote: quote around texts of the kind `braces`.
        parallel: whether the template takes several calls in one answer.
    """

    kind: Kind
    section: str = ""
    open: str = ""
    middle: str = ""
    close: str = ""
    between: str = ""
    section_close: str = ""
    keys: ObjectKeys | None = None
    tags: ParameterTags | None = None
    quote: str = ""
    parallel: bool = True

    @property
    def begin(self) -> str:
        """Text before the first call's name or object."""
        return (self.section + self.open).lstrip()

    @property
    def trigger(self) -> str:
        """First text of a call's marker, which identifies a call; "" for an object alone."""
        return next((chunk for chunk in chunks(self.begin) if chunk not in SLOTS), "")

    @property
    def may_be_bare(self) -> bool:
        """Whether a call is known without its markers, by a tool's name in a JSON object."""
        named = self.keys is not None and self.keys.name is not None
        return named and self.trigger not in ("", "[", "{")


@dataclass(frozen=True)
class Marks:
    """Markers around a part of an answer."""

    open: str
    close: str


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """The format of a model's answers, as far as found in its chat template.

    Attributes:
        calls: form of tool calls; None if none was found.
        no_calls: reason why `calls` is None.
        reasoning: markers around the reasoning; None if the model does not reason.
        content: markers around the content, most often "".
        ends: further markers that are no content, such as those of a turn's end.
    """

    calls: CallFormat | None
    no_calls: str = ""
    reasoning: Marks | None = None
    content: Marks = Marks("", "")
    ends: tuple[str, ...] = ()

    @property
    def dropped(self) -> tuple[str, ...]:
        """Markers that may stand before or after content, and are dropped."""
        marks = (self.content.open, self.content.close, *self.ends)
        return tuple(mark.strip() for mark in marks if mark.strip())

    @property
    def markers(self) -> str:
        """Text of all markers of the format; special tokens in it must be shown in an answer."""
        text = [*self.dropped]
        if self.reasoning is not None:
            text += [self.reasoning.open, self.reasoning.close]
        if self.calls is not None:
            c = self.calls
            text += [c.section, c.open, c.middle, c.close, c.between, c.section_close, c.quote]
            if c.tags is not None:
                text += [c.tags.key_open, *c.tags.texts, *c.tags.values, c.tags.value_close]
        return "\n".join(text)


def chunks(marker: str) -> list[str]:
    """Split a marker into texts, slots, and single spaces for runs of white space.

    A list's bracket at either end of a text is split off, since models put spaces around it.
    """
    parts: list[str] = []
    for chunk in _CHUNK.findall(marker):
        if chunk.isspace():
            parts.append(" ")
        elif len(chunk) > 1 and chunk.endswith("["):
            parts += [chunk[:-1], " ", "["]
        elif len(chunk) > 1 and chunk.startswith("]") and "[" not in chunk:
            parts += ["]", " ", chunk[1:]]
        else:
            parts.append(chunk)
    return parts
