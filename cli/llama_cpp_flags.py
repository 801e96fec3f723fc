"""Flags of llama.cpp's programs that have no use here: they are taken, and said to be ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from edgellm.cli.text import say

Command = Callable[..., Any]
_SWITCH = click.Choice(["on", "off", "auto", "1", "0", "-1", "true", "false"])
# Names, what may follow (None: nothing), and the reason.
_IGNORED: tuple[tuple[tuple[str, ...], click.ParamType[Any] | None, str], ...] = (
    (
        ("-ngl", "--gpu-layers", "--n-gpu-layers"),
        click.STRING,
        "a back end takes all layers; --prefill and --decode choose it",
    ),
    (("-fa", "--flash-attn"), _SWITCH, "attention is always fused"),
    (("-cnv", "--conversation"), None, "a prompt makes it one answer, and none a chat"),
    (("--jinja",), None, "chat templates are always used"),
    (("-cb", "--cont-batching"), None, "answers always share steps"),
    (("--mlock",), None, "weights are mapped from the file"),
    (("--no-mmap",), None, "weights are mapped from the file"),
    (("-np", "--parallel"), click.INT, "answers share the KV cache; --cache-size is its size"),
    (("-b", "--batch-size"), click.INT, "steps are sized by --time-target-ms"),
    (("-ub", "--ubatch-size"), click.INT, "steps are sized by --time-target-ms"),
    (("-tb", "--threads-batch"), click.INT, "-t is for prompts as well"),
)
# llama.cpp's types of the KV cache, and the formats nearest to them.
KV_TYPES = {"f32": "f32", "f16": "f16", "bf16": "f16", "q8_0": "int8", "q4_0": "k4v4"}


def ignored_options(command: Command) -> Command:
    """Let a command take llama.cpp's flags that have no use here."""
    for names, kind, why in _IGNORED:
        settings: dict[str, Any] = {"is_flag": True} if kind is None else {"type": kind}
        if kind is _SWITCH:  # it was a flag without a value before
            settings |= {"is_flag": False, "flag_value": "on"}
        command = click.option(
            *names,
            "_ignored_" + names[-1].strip("-").replace("-", "_"),
            expose_value=False,
            hidden=True,
            callback=_telling(names[0], why),
            **settings,
        )(command)
    return command


def _telling(flag: str, why: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def tell(_: click.Context, __: click.Parameter, value: Any) -> None:
        if value not in (None, False):
            say(f"{flag} is ignored: {why}")

    return tell
