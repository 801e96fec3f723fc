"""Options that several commands share, under the names that llama.cpp's users know."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from edgellm import AdapterSource, LoadArguments
from edgellm.cli.config import path_and_scale, read_config
from edgellm.cli.llama_cpp_flags import KV_TYPES, ignored_options
from edgellm.cli.text import parse_size, say
from edgellm.errors import OptionError
from edgellm.models import DEFAULT_MODEL
from edgellm.options import (
    DECODE_BACKENDS,
    KV_FORMATS,
    KV_POLICIES,
    POLICIES,
    PREFILL_PRECISIONS,
    SCHEDULING,
    EngineArguments,
    EngineOptions,
)
from edgellm.store.home import home

Command = Callable[..., Any]
# Key of a command's context: whether the command line names a MODEL.
_NAMED = "edgellm.named"
# Standard input, in the place of a file, a prompt, or a MODEL that stands before a prompt.
STDIN = "-"


def all_of(options: Iterable[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """Return a decorator that adds options to a command, in their order."""

    def add(command: Command) -> Command:
        for option in reversed(tuple(options)):
            command = option(command)
        return command

    return add


def model_argument(command: Command) -> Command:
    """Add MODEL to a command, as the first positional or as -m; passed on as `name`.

    A MODEL of `-` is none: standard input, in the place of a prompt.
    """

    @click.argument("model", required=False)
    @click.option("-m", "--model", "model_option", metavar="MODEL", help="The same as MODEL.")
    @click.option("-hf", "-hfr", "--hf-repo", "hub", hidden=True)
    @functools.wraps(command)
    def wrapped(
        *, model: str | None, model_option: str | None, hub: str | None, **rest: Any
    ) -> Any:
        if model == STDIN and "prompt" in rest:
            model, rest["prompt"] = None, rest["prompt"] or STDIN
        if hub is not None:
            hub = hub if hub.startswith("hf:") else f"hf:{hub}"
        named = [name for name in (model, model_option, hub) if name is not None]
        if len(named) > 1:
            raise OptionError("the model is named twice, as MODEL and with -m")
        context = click.get_current_context()
        context.meta[_NAMED] = bool(named)
        return command(name=named[0] if named else DEFAULT_MODEL, **rest)

    return wrapped


_LOADING = (
    click.option(
        "-c",
        "--ctx-size",
        type=int,
        help="Tokens of context; 0 takes the model's own.  [default: as many of these as a KV "
        "cache of a quarter of the memory holds]",
    ),
    click.option(
        "--rope-scale",
        type=float,
        metavar="N",
        help="Stretch RoPE for contexts N times as long as the model was trained for, by YaRN; "
        "short texts lose a little.  [default: as the model has it]",
    ),
    click.option(
        "--cache-size",
        type=int,
        help="Tokens that the KV cache holds of all answers.  [default: two contexts]",
    ),
    click.option("-t", "--threads", type=int, help="CPU threads.  [default: all cores]"),
    click.option(
        "--kv-format",
        type=click.Choice(KV_FORMATS),
        default="int8",
        show_default=True,
        help="How the KV cache is stored: k4v4 halves int8 of long texts, k8v4 saves a quarter, "
        "k4v2 three fifths (C++, or Triton by name); int4 halves it for all models, and costs "
        "quality.",
    ),
    click.option(
        "--kv-read",
        type=int,
        metavar="N",
        help="With k4v4 and k4v2: tokens that each token of an answer reads at most, those of its "
        "context that matter most to it (C++ kernels alone); prompts read all.  [default: all]",
    ),
    click.option(
        "--kv-budget",
        type=int,
        metavar="N",
        help="Tokens of a context that the KV cache keeps at most (C++ kernels alone); others are "
        "forgotten.  [default: all]",
    ),
    click.option(
        "--kv-policy",
        type=click.Choice(KV_POLICIES),
        default=EngineOptions.kv_policy,
        show_default=True,
        help="Which ones it keeps: the first 128, and the last.",
    ),
    click.option(
        "--kv-spill",
        type=click.Path(path_type=Path, file_okay=False),
        help="With k8v4, k4v4 and k4v2: keep all but the first and last tokens of contexts in a "
        "file of this folder, which the system reads back where memory is short.  [default: in "
        "memory]",
    ),
    click.option(
        "--prefill-mass",
        type=float,
        metavar="SHARE",
        help="Share of the attention that prompts keep from token 4,096 on, such as 0.98 (C++ "
        "kernels and int8 alone): long ones are read sooner, and not quite as well.  [default: 1]",
    ),
    click.option(
        "--prefill",
        default="auto",
        show_default=True,
        help="native, or an execution provider, see `edgellm devices`.",
    ),
    click.option(
        "--decode",
        type=click.Choice(DECODE_BACKENDS),
        default="auto",
        show_default=True,
        help="Decode back end: C++ kernels, Triton's, ONNX Runtime, float32, or chunked: in the "
        "chunks of prefill.",
    ),
    click.option(
        "--precision",
        type=click.Choice(PREFILL_PRECISIONS),
        help="Precision of prefill in ONNX Runtime.  [default: int8, or what the provider takes]",
    ),
    click.option(
        "--schedule",
        type=click.Choice(POLICIES),
        help="How chunks share accelerator and host.  [default: out-of-order; on a CPU serial]",
    ),
    click.option(
        "--scheduling",
        type=click.Choice(SCHEDULING),
        default=EngineOptions.scheduling,
        show_default=True,
        help="Of answers on their way at once: in the same steps, with a few tokens of prompts or "
        "(layered) a few layers, one after the other, or prompts on an accelerator while others "
        "decode.",
    ),
    click.option(
        "--time-target-ms",
        type=float,
        default=EngineOptions.time_target_ms,
        show_default=True,
        help="With stall_free and layered: what a step may take while others begin.",
    ),
    click.option(
        "--decode-slowdown",
        type=float,
        default=EngineOptions.decode_slowdown,
        show_default=True,
        help="With two_devices: how many times as long decode may take beside prompts.",
    ),
    click.option(
        "--provider-option",
        "provider_option",
        multiple=True,
        metavar="KEY=VALUE",
        help="An option of the execution provider itself; may be repeated.",
    ),
    click.option(
        "--allow-fallback",
        is_flag=True,
        help="Let the CPU run what the execution provider does not take.",
    ),
    click.option(
        "--kv-cache-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Keep computed prefixes in this folder, for later runs.",
    ),
    click.option(
        "--kv-cache-bytes",
        type=int,
        default=4 << 30,
        show_default=True,
        help="Size of that folder at most.",
    ),
    click.option(
        "--expert-memory",
        callback=parse_size,
        metavar="SIZE",
        help="Memory for a model's experts, such as 4G or 800M: those used last stay, and others "
        "are read when they are used.  [default: all, as far as they fit]",
    ),
    click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Names and options of models.  [default: edgellm.toml in EDGELLM_HOME, if any]",
    ),
    click.option(
        "-ctk",
        "-ctv",
        "--cache-type-k",
        "--cache-type-v",
        "kv_types",
        multiple=True,
        hidden=True,
        type=click.Choice(list(KV_TYPES)),
    ),
)


_DRAFTS = (
    click.option(
        "-md",
        "--draft",
        "--model-draft",
        "draft",
        metavar="MODEL",
        help="A smaller model of the same vocabulary, or an assistant made for the model (Gemma "
        "4), that guesses tokens ahead, where that is faster; the answer is the same. It needs "
        "`--decode native`. none: the model's own head (MTP) does not guess either, which it does "
        "by default if there is one.",
    ),
    click.option(
        "--draft-tokens",
        "--draft-max",
        "draft_tokens",
        type=int,
        default=EngineOptions.draft_tokens,
        show_default=True,
        help="Tokens that it guesses for one step at most.",
    ),
    click.option(
        "--draft-p-min",
        type=float,
        default=EngineOptions.draft_p_min,
        show_default=True,
        help="Probability of its best token below which it guesses no further.",
    ),
)


_LORA = click.option(
    "--lora",
    "--lora-scaled",
    "lora",
    multiple=True,
    metavar="[NAME=]PATH[:SCALE]",
    help="An adapter (LoRA): a folder of PEFT or MLX, or a GGUF file; may be repeated.",
)


def lora_options(command: Command) -> Command:
    """Add an option for adapters to a command; passed on by `load_options`."""
    return _LORA(command)


def _adapters(given: Iterable[str]) -> dict[str, AdapterSource]:
    """Parse what --lora says; without a name, the file's or folder's is the adapter's."""
    adapters: dict[str, AdapterSource] = {}
    for text in given:
        name, named, path = text.partition("=") if "=" in text else ("", "", text)
        path, scale = path_and_scale(path)
        name = name if named else Path(path).name.removesuffix(".gguf")
        if not path or not name or name in adapters:
            raise OptionError(
                f"--lora {text!r}: write NAME=PATH or NAME=PATH:SCALE, each with its own NAME"
            )
        adapters[name] = (path, scale)
    return adapters


def chosen_adapter(name: str | None) -> str | None:
    """Return the adapter that --adapter names, or the only one of --lora; None: there is none.

    Raises:
        OptionError: several are given, and none is named.
    """
    given = _adapters(click.get_current_context().params.get("lora") or ())
    if name is None and len(given) > 1:
        raise OptionError(f"--lora is given {len(given)} times; choose with --adapter NAME")
    return name if name is not None else next(iter(given), None)


def draft_options(command: Command) -> Command:
    """Add options for a draft model to a command that answers; passed on by `load_options`."""
    return all_of(_DRAFTS)(command)


def load_options(command: Command) -> Command:
    """Add options for loading a model to a command.

    Those given are passed on as `load_arguments`, over those that the configuration file has for
    MODEL, whose source is passed on as `name`. A command without MODEL gets the file as `config`.
    Commands without `draft_options` draft nothing, and load no draft model.
    """

    @ignored_options
    @all_of(_LOADING)
    @functools.wraps(command)
    def wrapped(
        *,
        provider_option: tuple[str, ...],
        config_file: Path | None,
        kv_types: tuple[str, ...],
        **given: Any,
    ) -> Any:
        say_if_kernels_are_missing()
        source, drafts = click.get_current_context().get_parameter_source, "draft" in given
        values = {
            name: value
            for name in EngineArguments.__annotations__
            if name in given
            for value in (given.pop(name),)
            if source(name) is not ParameterSource.DEFAULT
        }
        if kv_types and "kv_format" not in values:
            values["kv_format"] = KV_TYPES[kv_types[-1]]
        if provider_option:
            values["provider_options"] = dict(map(_parse_option, provider_option))
        adapters = _adapters(given.pop("lora", ()))
        config = read_config(config_file)
        if adapters:
            values["adapters"] = adapters
        if "draft" in values:
            values["draft"] = config.model(values["draft"]).source
        if "name" not in given:
            return command(load_arguments=values, config=config, **given)
        name = given.pop("name")
        said = source("name") is not ParameterSource.DEFAULT
        named = click.get_current_context().meta.get(_NAMED, said)
        model = config.model(name if named else config.default)
        arguments = cast(LoadArguments, {**model.arguments, **values})
        if not drafts:
            arguments.pop("draft", None)
        return command(load_arguments=arguments, name=model.source, **given)

    return wrapped


def _parse_option(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise OptionError(f"provider option {text!r}: write KEY=VALUE, e.g. soc_model=60")
    return key, value


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
