"""A plugin of `llm` (llm.datasette.io): `llm -m edgellm/NAME "PROMPT"`, computed in this process.

NAME is an alias, or the label of a bundle in EDGELLM_HOME. Every `llm` command registers all
models, whichever it uses, so the runtime is imported when the first one answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import llm
from llm.parts import Part, ReasoningPart, StreamEvent, TextPart, ToolCallPart, ToolResultPart
from pydantic import Field

from edgellm.progress import Progress
from edgellm.store.home import bundles_dir, models_dir
from edgellm.store.sources import DEFAULT_MODEL
from edgellm.tool_use import Tool, ToolCall, ToolCallDelta, joined_calls

if TYPE_CHECKING:
    from edgellm.chat import Chat
    from edgellm.llm import LLM
    from edgellm.results import Piece
    from edgellm.text.prompt import Message


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Offer each model to `llm`."""
    for name, loadable in model_names().items():
        loaded = _Loaded(loadable)
        register(EdgeModel(f"edgellm/{name}", loaded), AsyncEdgeModel(f"edgellm/{name}", loaded))


def model_names() -> Mapping[str, str]:
    """Return the models' names in `llm`, each with the name that `edgellm.load` takes.

    The newest of several bundles with one label has the label as its name; the other bundles have
    the names of their folders.
    """
    names = {DEFAULT_MODEL: DEFAULT_MODEL}
    root = bundles_dir()
    folders = [f for f in root.iterdir() if f.is_dir()] if root.is_dir() else []
    for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime_ns, reverse=True):
        label = folder.name.rpartition("-")[0]
        if label != DEFAULT_MODEL and not folder.name.startswith("."):
            names[folder.name if label in names else label] = str(folder)
    return names


class EdgeOptions(llm.Options):
    """Options of an answer; options that are not given are the model's own."""

    max_tokens: int | None = Field(default=None, description="Tokens to generate at most")
    min_tokens: int | None = Field(default=None, description="No end token before so many")
    temperature: float | None = Field(default=None, description="0 is greedy")
    top_k: int | None = Field(default=None, description="Keep the k most likely tokens; 0: all")
    top_p: float | None = Field(default=None, description="Keep tokens of this probability")
    min_p: float | None = Field(default=None, description="Least probability, to the first's")
    repeat_penalty: float | None = Field(default=None, description="Of recent tokens; 1: none")
    presence_penalty: float | None = Field(default=None, description="Of each recent token")
    frequency_penalty: float | None = Field(default=None, description="Of each occurrence")
    seed: int | None = Field(default=None, description="The same seed gives the same text")
    stop: str | list[str] | None = Field(default=None, description="Text that ends the answer")

    def arguments(self) -> Any:
        """Return the options that are given as fields of `GenerationOptions`."""
        values = self.model_dump(exclude_none=True)
        if isinstance(self.stop, str):
            values["stop"] = [self.stop]
        return values


class _Loaded:
    """A model that is loaded when it is first needed, and stays loaded.

    Args:
        name: name for `edgellm.load`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._llm: LLM | None = None

    def llm(self) -> LLM:
        from edgellm.llm import load

        with self._lock:
            if self._llm is None:
                self._llm = load(self._name, progress=_FirstUse(self._name).tell)
            return self._llm


class _FirstUse:
    """Messages on stderr that say why a model's first answer is late; `llm` itself shows none."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told: set[str] = set()

    def tell(self, progress: Progress) -> None:
        what = progress.label.partition(":")[0]
        if what in self._told:
            return
        self._told.add(what)
        if progress.unit == "bytes":
            self._write(f"{what}, {progress.total / 1e6:.0f} MB, to {models_dir()}")
        elif what.startswith("exporting"):
            self._write(f"{what} to {bundles_dir()}")

    def _write(self, text: str) -> None:
        print(f"edgellm: {self._name}: {text}, once", file=sys.stderr)


class _Model:
    can_stream = supports_schema = supports_tools = True
    Options = EdgeOptions

    def __init__(self, model_id: str, loaded: _Loaded) -> None:
        self.model_id = model_id
        self._loaded = loaded


class EdgeModel(_Model, llm.Model):
    """A model of edgellm as a model of `llm`."""

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[StreamEvent]:
        asked, answer = _Asked(prompt, self._loaded.llm()), _Answer(response)
        with asked.chat as chat:
            for piece in chat.stream(asked.text, logit_filter=asked.logit_filter):
                yield from answer.events(piece)


class AsyncEdgeModel(_Model, llm.AsyncModel):
    """A model of edgellm as a model of `llm` for asyncio."""

    async def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.AsyncResponse,
        conversation: llm.AsyncConversation | None,
    ) -> AsyncIterator[StreamEvent]:
        loaded = await asyncio.to_thread(self._loaded.llm)
        asked, answer = _Asked(prompt, loaded), _Answer(response)
        with asked.chat as chat:
            async for piece in chat.astream(asked.text, logit_filter=asked.logit_filter):
                for event in answer.events(piece):
                    yield event


class _Asked:
    """A prompt of `llm` as the next turn of a chat.

    Attributes:
        chat: chat with the messages before the turn.
        text: last message, if it is the user's; None: the model goes on behind results of tools.
    """

    def __init__(self, prompt: llm.Prompt, loaded: LLM) -> None:
        tools = [_tool(tool) for tool in prompt.tools]
        self.chat: Chat = loaded.chat(tools=tools, **prompt.options.arguments())
        messages = [each for message in prompt.messages for each in _messages(message)]
        self.text: str | None = None
        if messages and messages[-1].role == "user":
            self.text = messages.pop().content
        self.chat.messages.extend(messages)
        schema = prompt.schema
        self.logit_filter = None if schema is None else loaded.json_filter(json.dumps(schema))


def _tool(tool: object) -> Tool:
    if not isinstance(tool, llm.Tool):
        raise llm.ModelError(f"{tool}: edgellm calls functions; it has no tools of its own")
    return Tool(tool.name, tool.description or "", tool.input_schema)


def _messages(message: llm.Message) -> Iterator[Message]:
    """Iterate the messages of edgellm for a message of `llm`; each tool result is a message."""
    from edgellm.text.prompt import Message

    results = [part for part in message.parts if isinstance(part, ToolResultPart)]
    for part in results:
        yield Message("tool", part.output, tool_call_id=part.tool_call_id, name=part.name)
    if len(results) == len(message.parts):
        return
    calls = [part for part in message.parts if isinstance(part, ToolCallPart)]
    yield Message(
        message.role,
        _text(message.parts, TextPart),
        reasoning=_text(message.parts, ReasoningPart) or None,
        tool_calls=tuple(
            ToolCall(part.tool_call_id or "", part.name, json.dumps(part.arguments))
            for part in calls
        ),
    )


def _text(parts: list[Part], kind: type[TextPart] | type[ReasoningPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


class _Answer:
    """Conversion of an answer's pieces into events of a response of `llm`."""

    def __init__(self, response: llm.Response | llm.AsyncResponse) -> None:
        self._response = response
        self._calls: list[ToolCallDelta] = []
        self._ids: dict[int, str | None] = {}

    def events(self, piece: Piece) -> Iterator[StreamEvent]:
        if piece.reasoning:
            yield StreamEvent(type="reasoning", chunk=piece.reasoning)
        if piece.text:
            yield StreamEvent(type="text", chunk=piece.text)
        for delta in piece.tool_calls:
            self._calls.append(delta)
            id = self._ids.setdefault(delta.index, delta.id)
            if delta.name is not None:
                yield StreamEvent(type="tool_call_name", chunk=delta.name, tool_call_id=id)
            else:
                yield StreamEvent(type="tool_call_args", chunk=delta.arguments, tool_call_id=id)
        if piece.stats is not None:
            self._finish(piece)

    def _finish(self, piece: Piece) -> None:
        """Give the tool calls and token counts of an answer to the response.

        Raises:
            llm.ModelError: a tool call was cut off.
        """
        for call in joined_calls(self._calls):
            if not call.complete:
                raise llm.ModelError(
                    f"the answer ended ({piece.finish_reason}) within a call of {call.name}; allow "
                    "more tokens (`-o max_tokens`)"
                )
            arguments = json.loads(call.arguments)
            self._response.add_tool_call(llm.ToolCall(call.name, arguments, call.id))
        stats = piece.stats
        assert stats is not None
        self._response.set_usage(
            input=stats.prompt_tokens,
            output=stats.generation_tokens,
            details={"cached_tokens": stats.cached_tokens},
        )
        self._response.response_json = {
            "finish_reason": piece.finish_reason,
            "stats": stats.to_json(),
        }
