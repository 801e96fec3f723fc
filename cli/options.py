"""Options that several commands share, under the names that llama.cpp's users know."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

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
    PREFILL_PRECISIONS,
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


hints_of = functools.cache(get_type_hints)


def option_of(
    options: type,
    name: str,
    help: str | None,
    *others: str,
    kind: Any = None,
    metavar: str | None = None,
    prefix: str = "",
) -> Callable[[Command], Command]:
    """Return a click option for a field of a class of options, with its name, type and default.

    Args:
        others: further flags.
        kind: type in click's terms; None: that of the field.
        prefix: text before the name.
    """
    hint, default = hints_of(options)[name], getattr(options, name)
    name = prefix + name
    flag = "--" + name.replace("_", "-")
    if hint is bool and default:
        return click.option(f"{flag}/--no-{name}", default=default, show_default=True, help=help)
    if hint is bool:
        return click.option(flag, is_flag=True, help=help)
    one = next((one for one in get_args(hint) if get_origin(one) is Literal), hint)
    if kind is None and get_origin(one) is Literal:
        kind = click.Choice(get_args(one))
    elif kind is None:
        kind = next(iter(get_args(hint)), hint)
    return click.option(
        *sorted((flag, *others), key=lambda each: each.startswith("--")),
        name,
        type=kind,
        default=default,
        show_default=default is not None,
        metavar=metavar,
        help=help,
    )


_ENGINE = functools.partial(option_of, EngineOptions)
_FOLDER = click.Path(path_type=Path, file_okay=False)
_LOADING = (
    _ENGINE(
        "ctx_size",
        "Tokens of context; 0 takes the model's own.  [default: as many of these as a KV cache of "
        "a quarter of the memory holds]",
        "-c",
    ),
    _ENGINE(
        "rope_scale",
        "Stretch RoPE for contexts N times as long as the model was trained for, by YaRN; short "
        "texts lose a little.  [default: as the model has it]",
        metavar="N",
    ),
    _ENGINE(
        "cache_size", "Tokens that the KV cache holds of all answers.  [default: two contexts]"
    ),
    _ENGINE("threads", "CPU threads.  [default: all cores]", "-t"),
    click.option(
        "--kv-format",
        type=click.Choice(KV_FORMATS),
        default="int8",
        show_default=True,
        help="How the KV cache is stored: k4v4 halves int8 of long texts, k8v4 saves a quarter, "
        "k4v2 three fifths (C++, or Triton by name).",
    ),
    _ENGINE(
        "kv_bits",
        "Bits of a number in packed blocks on average, such as 4.25: each layer gets k8v4, k4v4 or "
        "k4v2 by what it loses, which is measured once (C++ kernels alone).",
        metavar="N",
    ),
    _ENGINE(
        "kv_read",
        "With k4v4 and k4v2: tokens that each token of an answer reads at most, those of its "
        "context that matter most to it (C++ kernels alone); prompts read all.  [default: all]",
        metavar="N",
    ),
    _ENGINE(
        "kv_budget",
        "Tokens of a context that the KV cache keeps at most (C++ kernels alone); others are "
        "forgotten.  [default: all]",
        metavar="N",
    ),
    _ENGINE("kv_policy", "Which ones it keeps: the first 128, and the last."),
    _ENGINE(
        "kv_spill",
        "With k8v4, k4v4 and k4v2: keep all but the first and last tokens of contexts in a file of "
        "this folder, which the system reads back where memory is short.  [default: in memory]",
        kind=_FOLDER,
    ),
    _ENGINE(
        "prefill_mass",
        "Share of the attention that prompts keep from token 4,096 on, such as 0.99 (C++ kernels "
        "and int8 alone): long ones are read sooner, and not quite as well.  [default: 1]",
        metavar="SHARE",
    ),
    _ENGINE("prefill", "native, or an execution provider, see `edgellm devices`."),
    _ENGINE(
        "decode",
        "Decode back end: C++ kernels, Triton's, ONNX Runtime, float32, or chunked: in the chunks "
        "of prefill.",
        kind=click.Choice(DECODE_BACKENDS),
    ),
    _ENGINE(
        "precision",
        "Precision of prefill in ONNX Runtime.  [default: int8, or what the provider takes]",
        kind=click.Choice(PREFILL_PRECISIONS),
    ),
    _ENGINE(
        "schedule",
        "How chunks share accelerator and host.  [default: out-of-order; on a CPU serial]",
    ),
    _ENGINE(
        "scheduling",
        "Of answers on their way at once: in the same steps, with a few tokens of prompts or "
        "(layered) a few layers, one after the other, or prompts on an accelerator while others "
        "decode.",
    ),
    _ENGINE(
        "time_target_ms", "With stall_free and layered: what a step may take while others begin."
    ),
    _ENGINE(
        "decode_slowdown",
        "With two_devices: how many times as long decode may take beside prompts.",
    ),
    click.option(
        "--provider-option",
        "provider_option",
        multiple=True,
        metavar="KEY=VALUE",
        help="An option of the execution provider itself; may be repeated.",
    ),
    _ENGINE("allow_fallback", "Let the CPU run what the execution provider does not take."),
    _ENGINE("kv_cache_dir", "Keep computed prefixes in this folder, for later runs.", kind=_FOLDER),
    _ENGINE("kv_cache_bytes", "Size of that folder at most."),
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
    _ENGINE("draft_tokens", "Tokens that it guesses for one step at most.", "--draft-max"),
    _ENGINE("draft_p_min", "Probability of its best token below which it guesses no further."),
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
        if {"kv_bits", "kv_format"} <= values.keys():
            raise OptionError("--kv-bits and --kv-format: bits choose the formats; leave out one")
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
        arguments = cast(LoadArguments, over_file(model.arguments, values))
        if not drafts:
            arguments.pop("draft", None)
        return command(load_arguments=arguments, name=model.source, **given)

    return wrapped


def over_file(of_file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the configuration file and of the command line, which goes over it; a KV
    format or bits of the one take the place of the other's."""
    kv = {"kv_bits", "kv_format"}
    dropped = kv if kv & given.keys() else set[str]()
    return {**{name: x for name, x in of_file.items() if name not in dropped}, **given}


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
