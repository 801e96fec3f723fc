"""`edgellm.toml`: models of the user's own names, with their options.

    default = "coder"                 # what `edgellm run` takes without a MODEL
    serve = ["coder", "chat"]         # what `edgellm serve` takes

    [models.coder]
    source = "hf:Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M"
    ctx_size = 16384                  # options of loading, and of answers
    draft = "small"                   # guesses tokens ahead; also a name of the file
    temperature = 0.2
    system = "Answer with code alone."  # of conversations that have none of their own
    pinned = true                     # `serve` never unloads it to make room

Options of the command line go over those of the file.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

from edgellm import AdapterSource, LoadArguments
from edgellm.cli.text import file_errors
from edgellm.errors import OptionError
from edgellm.generation_options import GenerationArguments, GenerationOptions
from edgellm.models import DEFAULT_MODEL
from edgellm.options import NO_DRAFT, EngineArguments, EngineOptions
from edgellm.store.home import home

T = TypeVar("T")
_FILE = "edgellm.toml"
_LOADING = tuple(EngineArguments.__annotations__)
# without biases of tokens: keys of TOML are texts
_ANSWERS = tuple(name for name in GenerationArguments.__annotations__ if name != "logit_bias")
_OWN = {"source": str, "system": str, "pinned": bool, "adapters": dict}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model of the file.

    Attributes:
        arguments: options of loading, with those of answers as their defaults.
        pinned: see `ServedModel`.
    """

    source: str
    arguments: LoadArguments = field(default_factory=LoadArguments)
    pinned: bool = False


@dataclass(frozen=True)
class Config:
    """The content of the file.

    Attributes:
        default: model of `edgellm run` without a name.
        serve: models of `edgellm serve` without names.
    """

    default: str = DEFAULT_MODEL
    serve: tuple[str, ...] = ()
    models: Mapping[str, ModelConfig] = field(default_factory=dict)

    def model(self, name: str) -> ModelConfig:
        """Return the model of a name, with no options of its own if the file has none of it."""
        return self.models.get(name) or ModelConfig(source=name)


def read_config(path: Path | None) -> Config:
    """Read the file at `path`; None: that in EDGELLM_HOME, if there is one.

    Raises:
        OptionError: it cannot be read, a key is unknown, or a value is not allowed.
    """
    if path is None:
        path = home() / _FILE
        if not path.exists():
            return Config()
    try:
        with file_errors(path):
            values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"{path}: {error}") from None
    _check_keys(values, ("default", "serve", "models"), where=str(path))
    models = _typed(values, "models", dict, where=str(path)) or {}
    default = _typed(values, "default", str, where=str(path))
    serve = _typed(values, "serve", list, where=str(path)) or []
    read = {name: _model(name, value, file=path) for name, value in models.items()}
    for model in read.values():
        draft = read.get(model.arguments.get("draft") or "")
        if draft is not None:
            model.arguments["draft"] = draft.source
    config = Config(default=default or DEFAULT_MODEL, serve=tuple(map(str, serve)), models=read)
    for name in serve:
        if not isinstance(name, str) or not name:
            raise OptionError(f"{path}: 'serve' is {serve!r}; a list of names is expected")
    return config


def _model(name: str, values: Any, *, file: Path) -> ModelConfig:
    where = f"{file}: [models.{name}]"
    if not re.fullmatch(r"[\w.:-]+", name):
        raise OptionError(f"{where}: a name has letters, digits, and _ . : - alone")
    if not isinstance(values, dict):
        raise OptionError(f"{where} is {values!r}; a table is expected")
    _check_keys(values, (*_OWN, *_LOADING, *_ANSWERS), where=where)
    own = {key: _typed(values, key, kind, where=where) for key, kind in _OWN.items()}
    if not own["source"]:
        raise OptionError(f"{where} has no 'source'; name a file, a folder or a download")
    engine = {key: value for key, value in values.items() if key in _LOADING}
    defaults = {key: value for key, value in values.items() if key in _ANSWERS}
    try:
        EngineOptions(**engine)
        GenerationOptions(**defaults)
    except OptionError as error:
        # without the quotes that the command line replaces by its flags
        raise OptionError(f"{where}: {error}".replace("`", "'")) from None
    source = _beside(file, str(own["source"]))
    arguments: dict[str, Any] = {**engine}
    if engine.get("draft", NO_DRAFT) != NO_DRAFT:
        arguments["draft"] = _beside(file, engine["draft"])
    if defaults:
        arguments["defaults"] = defaults
    if own["adapters"]:
        arguments["adapters"] = _adapters(own["adapters"], where=where, file=file)
    if own["system"] is not None:
        arguments["system"] = own["system"]
    return ModelConfig(
        source=source,
        arguments=cast(LoadArguments, arguments),
        pinned=bool(own["pinned"]),
    )


def _adapters(values: Mapping[str, Any], *, where: str, file: Path) -> dict[str, AdapterSource]:
    """Return the adapters of a model; a path is beside the file, and may end with :SCALE."""
    adapters: dict[str, AdapterSource] = {}
    for name, text in values.items():
        if not isinstance(text, str) or not text:
            raise OptionError(f"{where}: 'adapters' has {name} = {text!r}; a path is expected")
        path, scale = path_and_scale(text)
        adapters[name] = (file.parent / path, scale)
    return adapters


def _beside(file: Path, source: str) -> str:
    """Return a model's source; a path is beside the file, wherever a program starts."""
    path = file.parent / source
    return str(path) if path.exists() else source


def path_and_scale(text: str) -> tuple[str, float]:
    """Split PATH:SCALE; without a number behind the last colon the scale is 1."""
    path, _, number = text.rpartition(":")
    try:
        scale = float(number)
    except ValueError:
        return text, 1.0
    return (path, scale) if path and math.isfinite(scale) else (text, 1.0)


def _typed(values: Mapping[str, Any], key: str, kind: type[T], *, where: str) -> T | None:
    value = values.get(key)
    if value is None or isinstance(value, kind):
        return value
    raise OptionError(f"{where}: '{key}' is {value!r}; a {kind.__name__} is expected")


def _check_keys(values: Mapping[str, Any], allowed: tuple[str, ...], *, where: str) -> None:
    for key in values:
        if key not in allowed:
            close = get_close_matches(key, allowed, 1)
            meant = f"'{close[0]}' may be meant; " if close else ""
            raise OptionError(
                f"{where}: there is no key '{key}'; {meant}allowed are {', '.join(allowed)}"
            )
