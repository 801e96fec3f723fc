"""Options that several commands share, under the names that llama.cpp's users know."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click

from edgellm.cli.text import say
from edgellm.errors import OptionError
from edgellm.generation_options import CONTEXT_POLICIES, GenerationArguments
from edgellm.models import DEFAULT_MODEL
from edgellm.options import (
    DECODE_BACKENDS,
    KV_FORMATS,
    POLICIES,
    PREFILL_PRECISIONS,
    SCHEDULING,
    EngineArguments,
    EngineOptions,
)
from edgellm.store.home import home

Command = Callable[..., Any]
# Standard input, in the place of a file, a prompt, or a MODEL that stands before a prompt.
STDIN = "-"


def model_argument(command: Command) -> Command:
    """Add MODEL to a command, as the first positional or as -m; passed on as `name`."""

    @click.argument("model", required=False)
    @click.option("-m", "--model", "model_option", metavar="MODEL", help="The same as MODEL.")
    @functools.wraps(command)
    def wrapped(*, model: str | None, model_option: str | None, **rest: Any) -> Any:
        if model == STDIN and model_option is not None and "prompt" in rest:
            model, rest["prompt"] = None, rest["prompt"] or STDIN
        if model is not None and model_option is not None:
            raise OptionError("the model is named twice, as MODEL and with -m")
        return command(name=model or model_option or DEFAULT_MODEL, **rest)

    return wrapped


def load_options(command: Command) -> Command:
    """Add options for loading a model to a command; passed on as `load_arguments`."""

    @click.option(
        "-c", "--ctx-size", type=int,
        help="Tokens of context; 0 takes the model's own.  [default: at most 4096]",
    )  # fmt: skip
    @click.option(
        "--cache-size", type=int,
        help="Tokens that the KV cache holds of all answers.  [default: two contexts]",
    )  # fmt: skip
    @click.option("-t", "--threads", type=int, help="CPU threads.  [default: all cores]")
    @click.option(
        "--kv-format",
        type=click.Choice(KV_FORMATS),
        default="int8",
        show_default=True,
        help="How the KV cache is stored; int4 halves it and costs quality.",
    )
    @click.option(
        "--prefill", default="auto", show_default=True,
        help="native, or an execution provider, see `edgellm devices`.",
    )  # fmt: skip
    @click.option(
        "--decode",
        type=click.Choice(DECODE_BACKENDS),
        default="auto",
        show_default=True,
        help="Decode back end: C++ kernels, Triton's, ONNX Runtime, float32, or chunked: in the "
        "chunks of prefill.",
    )
    @click.option(
        "--precision",
        type=click.Choice(PREFILL_PRECISIONS),
        help="Precision of prefill in ONNX Runtime.  [default: int8, or what the provider takes]",
    )
    @click.option(
        "--schedule",
        type=click.Choice(POLICIES),
        help="How chunks share accelerator and host.  [default: out-of-order; on a CPU serial]",
    )
    @click.option(
        "--scheduling", type=click.Choice(SCHEDULING),
        default=EngineOptions.scheduling, show_default=True,
        help="Of answers on their way at once: in the same steps, with a few tokens of prompts or "
        "(layered) a few layers, one after the other, or prompts on an accelerator while others "
        "decode.",
    )  # fmt: skip
    @click.option(
        "--time-target-ms", type=float, default=EngineOptions.time_target_ms, show_default=True,
        help="With stall_free and layered: what a step may take while others begin.",
    )  # fmt: skip
    @click.option(
        "--decode-slowdown", type=float, default=EngineOptions.decode_slowdown, show_default=True,
        help="With two_devices: how many times as long decode may take beside prompts.",
    )  # fmt: skip
    @click.option(
        "--provider-option", "provider_option", multiple=True, metavar="KEY=VALUE",
        help="An option of the execution provider itself; may be repeated.",
    )  # fmt: skip
    @click.option(
        "--allow-fallback", is_flag=True,
        help="Let the CPU run what the execution provider does not take.",
    )  # fmt: skip
    @click.option(
        "--kv-cache-dir", type=click.Path(path_type=Path, file_okay=False),
        help="Keep computed prefixes in this folder, for later runs.",
    )  # fmt: skip
    @click.option(
        "--kv-cache-bytes", type=int, default=4 << 30, show_default=True,
        help="Size of that folder at most.",
    )  # fmt: skip
    @functools.wraps(command)
    def wrapped(*, provider_option: tuple[str, ...], **given: Any) -> Any:
        say_if_kernels_are_missing()
        given["provider_options"] = dict(map(_parse_option, provider_option))
        values = {n: given.pop(n) for n in EngineArguments.__annotations__ if n in given}
        return command(load_arguments=cast(EngineArguments, values), **given)

    return wrapped


def sampling_options(command: Command) -> Command:
    """Add options for choosing tokens to a command; given options are passed on as `sampling`."""
    names = list(GenerationArguments.__annotations__)

    @click.option(
        "-n", "--predict", "--max-tokens", "max_tokens", type=click.IntRange(min=-1),
        help="Tokens to generate at most; -1 goes on to the answer's end.  [default: -1]",
    )  # fmt: skip
    @click.option(
        "--context-policy", type=click.Choice(CONTEXT_POLICIES),
        help="In a full context: end, or shift: forget the older half and go on.  [default: error]",
    )  # fmt: skip
    @click.option("--keep", type=int, help="First tokens that shift never forgets.  [default: 4]")
    @click.option("--temp", "--temperature", "temperature", type=float, help="0 is greedy.")
    @click.option("--top-k", type=int, help="Keep the k most likely tokens; 0 keeps all.")
    @click.option("--top-p", type=float, help="Keep the tokens that make up this probability.")
    @click.option("--min-p", type=float, help="Keep tokens this probable relative to the first.")
    @click.option("--repeat-penalty", type=float, help="Penalty of recent tokens; 1 is none.")
    @click.option("--repeat-last-n", type=int, help="How many tokens are recent; -1 all.")
    @click.option("--presence-penalty", type=float, help="Subtracted for each recent token.")
    @click.option("--frequency-penalty", type=float, help="Subtracted for each occurrence.")
    @click.option(
        "-l", "--logit-bias", multiple=True, metavar="TOKEN(+/-)BIAS",
        help="Change a token's logit, e.g. 29905-100; may be repeated.",
    )  # fmt: skip
    @click.option(
        "-s", "--seed", type=click.IntRange(min=-1),
        help="The same seed gives the same text; -1 draws one.",
    )  # fmt: skip
    @click.option(
        "-r", "--reverse-prompt", "--stop", "stop", multiple=True,
        help="A text that ends the answer; may be repeated.",
    )  # fmt: skip
    @click.option("--ignore-eos", is_flag=True, default=None, help="Never take an end token.")
    @click.option(
        "--repetition-limit", type=int,
        help="End an endless answer that repeats itself for so many tokens; 0 never.  "
        "[default: 256]",
    )  # fmt: skip
    @click.option(
        "--speculate/--no-speculate", default=None,
        help="Check guesses from the prompt; the answer is the same.  [default: speculate]",
    )  # fmt: skip
    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        values = {name: given.pop(name, None) for name in names}
        values["logit_bias"] = dict(map(_parse_bias, values["logit_bias"]))
        values["stop"] = list(values["stop"])
        for name in ("max_tokens", "seed"):
            if values[name] == -1:
                values[name] = None
        chosen = {name: value for name, value in values.items() if value not in (None, {}, [])}
        return command(sampling=chosen, **given)

    return wrapped


def _parse_option(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise OptionError(f"provider option {text!r}: write KEY=VALUE, e.g. soc_model=60")
    return key, value


def _parse_bias(text: str) -> tuple[int, float]:
    cut = max(text.rfind("+"), text.rfind("-"))
    try:
        return int(text[:cut]), float(text[cut:])
    except ValueError:
        raise OptionError(f"logit bias {text!r}: write TOKEN+BIAS or TOKEN-BIAS") from None


def say_if_kernels_are_missing() -> None:
    """Say once per environment and EDGELLM_HOME that there are no compiled kernels."""
    from edgellm.devices import native_isa  # with numpy, which no --help needs

    if native_isa() is not None:
        return
    environment = hashlib.sha256(sys.prefix.encode(errors="surrogateescape")).hexdigest()[:16]
    said = home() / "said" / f"no-kernels-{environment}"
    try:
        said.parent.mkdir(parents=True, exist_ok=True)
        said.touch(exist_ok=False)
    except FileExistsError:
        return
    except OSError:
        pass  # the note cannot be marked as said, so it is said at every run
    say(
        "the C++ kernels are not built, so decode is some five times slower; install a C++ "
        "compiler, and then edgellm again"
    )
