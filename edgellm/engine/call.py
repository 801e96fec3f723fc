"""Calls: the options and callbacks of an answer, from the keyword arguments of a caller."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgellm.checks import check_hooks, check_names
from edgellm.engine.answer import LogitFilter
from edgellm.engine.loaded_model import LoadedModel
from edgellm.errors import OptionError
from edgellm.generation_options import GenerationArguments, GenerationOptions, chosen_options
from edgellm.progress import ProgressCallback
from edgellm.text.grammar import Grammar
from edgellm.tool_use import ToolArguments


class CallArguments(GenerationArguments, total=False):
    """Keyword arguments of an answer: fields of `GenerationOptions`, and these.

    options: options of the answer, under the fields that are given beside it; without it they are
        the model's (`LLM.generation_options`), or the chat's.
    cancel: event to set from any thread to stop, also in the middle of prefill; the session stays
        valid and keeps the computed tokens.
    progress: callback told during prefill how many tokens are done, in the thread that computes; it
        uses neither the model nor its sessions.
    logit_filter: function that rules tokens out at each step, called as `progress` is.
    json_schema: JSON schema that the answer fits: a dict, its text, or a class with pydantic's
        `model_json_schema`.
    grammar: grammar of the answer: GBNF or llguidance's Lark, or a `Grammar`. Of `logit_filter`,
        `json_schema` and `grammar` one may be given.
    """

    options: GenerationOptions | None
    cancel: threading.Event | None
    progress: ProgressCallback | None
    logit_filter: LogitFilter | None
    json_schema: Mapping[str, Any] | str | type | None
    grammar: str | Grammar | None


class ChatArguments(GenerationArguments, ToolArguments, total=False):
    """Keyword arguments of a chat: fields of `GenerationOptions` and of `ToolArguments`."""


class ChatCallArguments(CallArguments, ToolArguments, total=False):
    """Keyword arguments of an answer in a chat: those of `CallArguments` and `ToolArguments`."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Checked `CallArguments`.

    Attributes:
        whole: whether the caller gets the whole answer at once; see `Stream`.
    """

    options: GenerationOptions
    cancel: threading.Event | None = None
    progress: ProgressCallback | None = None
    logit_filter: LogitFilter | None = None
    whole: bool = False


_FORMS = ("logit_filter", "json_schema", "grammar")
CALL_NAMES = ("options", "cancel", "progress", *_FORMS)


def checked_call(
    engine: LoadedModel,
    arguments: CallArguments,
    choose: Callable[[GenerationOptions | None, GenerationArguments], GenerationOptions],
) -> Call:
    """Return the call of a caller's arguments.

    Args:
        choose: function of the argument `options`, and of the fields that go over it.

    Raises:
        OptionError: a value is not allowed.
        TypeError: an argument has another name.
    """
    check_names(arguments, GenerationOptions, *CALL_NAMES)
    cancel, progress = arguments.get("cancel"), arguments.get("progress")
    logit_filter = arguments.get("logit_filter")
    check_hooks(cancel, progress, logit_filter)
    over = {name: value for name, value in arguments.items() if name not in CALL_NAMES}
    options = choose(arguments.get("options"), over)  # type: ignore[arg-type]
    grammar = _grammar(arguments)
    if grammar is not None:
        logit_filter = engine.grammars.filter(grammar)
    return Call(options=options, cancel=cancel, progress=progress, logit_filter=logit_filter)


def model_call(engine: LoadedModel, arguments: CallArguments) -> Call:
    """Return the call of a caller's arguments, with the model's options where there are none."""
    return checked_call(engine, arguments, partial(chosen_options, engine.bundle.manifest))


def _grammar(arguments: CallArguments) -> Grammar | None:
    """Return the grammar of the arguments `json_schema` and `grammar`; None: none of them is given.

    Raises:
        OptionError: a value is not allowed, or several arguments give the form of the answer.
    """
    forms = [f"`{name}`" for name in _FORMS if arguments.get(name) is not None]
    if len(forms) > 1:
        raise OptionError(f"{' and '.join(forms)} give the form of an answer; leave one out")
    schema, grammar = arguments.get("json_schema"), arguments.get("grammar")
    if schema is not None:
        return Grammar("json_schema", _schema_text(schema))
    return grammar if isinstance(grammar, Grammar | None) else Grammar.of(grammar)


def _schema_text(schema: object) -> str:
    if isinstance(schema, str):
        return schema
    describe = getattr(schema, "model_json_schema", None)
    if describe is not None:
        schema = describe()
    if not isinstance(schema, Mapping):
        raise OptionError(
            f"`json_schema` is {schema!r:.60}; a dict, a text, or a pydantic class is expected"
        )
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"`json_schema` is no JSON: {error}") from None
