"""How a model writes reasoning, content and tool calls: what is found in its template.

    reasoning.open  ...  reasoning.close
    content.open  ...  content.close
    section  [ open CALL close ]  between  [ open CALL close ]  section_close

where CALL is one of

    object      {"name": NAME, "arguments": {...}}                      Hermes, Qwen3, Llama 3
    json        NAME middle {...}                                       Mistral, DeepSeek, Kimi
    tagged      NAME middle [ key_open KEY key_close VALUE value_close ]...     Qwen3-Coder, GLM
    python      NAME(KEY=VALUE, ...)                                    LFM2
    braces      NAME{KEY:VALUE,...}, texts between quotes of their own  Gemma 4

Spaces and line ends in the markers are taken as they come. Pure Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["object", "json", "tagged", "python", "braces"]

# Stand in markers for what differs from call to call.
NAME_SLOT, ID_SLOT, INDEX_SLOT = "\ue001", "\ue002", "\ue003"
KEY_SLOT, TYPE_SLOT = "\ue004", "\ue005"
SLOTS = NAME_SLOT + ID_SLOT + INDEX_SLOT + KEY_SLOT + TYPE_SLOT
_CHUNK = re.compile(rf"\s+|[{SLOTS}]|[^\s{SLOTS}]+")


@dataclass(frozen=True, kw_only=True)
class ObjectKeys:
    """Keys of a call that is a JSON object.

    Attributes:
        name: None where the name is itself the key of the arguments.
        id: the key of the model's own identifier, if it writes one.
        id_last: whether it stands behind the arguments.
        others: further keys with a text.
    """

    name: str | None
    arguments: str | None
    id: str | None = None
    id_last: bool = False
    others: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ParameterTags:
    """Markers of one argument.

    Attributes:
        texts, values: what may stand between a key and its value, before a text that is written as
            it is and before JSON; where they are the same, the tool's schema tells.
    """

    key_open: str
    texts: tuple[str, ...]
    values: tuple[str, ...]
    value_close: str


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How calls are written; see the head of this file.

    Attributes:
        quote: of `braces`, around texts.
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
        """All that comes before the first call's name or object."""
        return (self.section + self.open).lstrip()

    @property
    def trigger(self) -> str:
        """The first text by which a call is known; "" is an object alone."""
        return next((chunk for chunk in chunks(self.begin) if chunk not in SLOTS), "")


@dataclass(frozen=True)
class Marks:
    """What stands around a part of an answer."""

    open: str
    close: str


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """What is found of a template.

    Attributes:
        calls: None: there is no tool format.
        no_calls: why not.
        reasoning: None: the model does not reason.
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
        """Markers that may stand before or behind content."""
        marks = (self.content.open, self.content.close, *self.ends)
        return tuple(mark.strip() for mark in marks if mark.strip())

    @property
    def markers(self) -> str:
        """Everything that an answer's text may be cut by; special tokens in it are to be shown."""
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
    """A marker as texts, slots, and runs of white space as single spaces.

    A list's bracket at either end stands by itself, since models put spaces around it.
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
