"""Calls: the options and callbacks of an answer, from the keyword arguments of a caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

from edgellm.checks import check_hooks, check_names
from edgellm.engine.answer import LogitFilter
from edgellm.generation_options import GenerationArguments, GenerationOptions, chosen_options
from edgellm.progress import ProgressCallback
from edgellm.store.manifest import Manifest
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
    """

    options: GenerationOptions | None
    cancel: threading.Event | None
    progress: ProgressCallback | None
    logit_filter: LogitFilter | None


class ChatArguments(GenerationArguments, ToolArguments, total=False):
    """Keyword arguments of a chat: fields of `GenerationOptions` and of `ToolArguments`."""


class ChatCallArguments(CallArguments, ToolArguments, total=False):
    """Keyword arguments of an answer in a chat: those of `CallArguments` and `ToolArguments`."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Checked `CallArguments`."""

    options: GenerationOptions
    cancel: threading.Event | None = None
    progress: ProgressCallback | None = None
    logit_filter: LogitFilter | None = None


CALL_NAMES = tuple(field.name for field in fields(Call))


def checked_call(
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
    given = {name: arguments.get(name) for name in CALL_NAMES}
    check_hooks(given["cancel"], given["progress"], given["logit_filter"])
    over = {name: value for name, value in arguments.items() if name not in CALL_NAMES}
    given["options"] = choose(arguments.get("options"), over)  # type: ignore[arg-type]
    return Call(**given)  # type: ignore[arg-type]


def model_call(manifest: Manifest, arguments: CallArguments) -> Call:
    """Return the call of a caller's arguments, with the model's options where there are none."""
    return checked_call(arguments, partial(chosen_options, manifest))
