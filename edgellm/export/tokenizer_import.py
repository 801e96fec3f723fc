"""Import of a checkpoint's tokenizer, chat template and generation defaults into a bundle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgellm.errors import ModelFormatError, OptionError, TokenizerError
from edgellm.export.tokenizer_gguf import adds_bos, build_tokenizer, end_tokens
from edgellm.generation_options import GenerationOptions
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.fields import Fields
from edgellm.graphs.safetensors_folder import read_json
from edgellm.store.manifest import CHAT_TEMPLATE, GENERATION, TOKENIZER, TokenizerEntry
from edgellm.text.tokenizer import check_ids, read_tokenizer, tokenizer_errors

# GGUF's names of infill tokens, the newer one first -> ours (see `fim.py`).
_FIM_KEYS = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "repository": ("fim_rep",),
    "file": ("fim_sep",),
}
# Name of the chat template for prompts with tools, in models that have a separate one.
_TOOL_USE = "tool_use"
_TOOL_TEMPLATE = f"additional_chat_templates/{_TOOL_USE}.jinja"
_PROCESSOR_TEMPLATE = "chat_template.json"
# Our name -> generation_config.json's, where they differ.
_GENERATION_KEYS = {"repeat_penalty": "repetition_penalty"}
# GGUF's general.sampling.* -> our name.
_GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
}


@dataclass(frozen=True)
class ImportedTokenizer:
    """The tokenizer, special tokens, chat template and sampling defaults of a checkpoint."""

    tokenizer: Tokenizer
    entry: TokenizerEntry
    chat_template: str | None
    generation: Mapping[str, Any]

    def save(self, folder: Path) -> None:
        # the library's own `save` raises no OSError when the disk is full
        (folder / TOKENIZER).write_text(self.tokenizer.to_str(pretty=True), encoding="utf-8")
        if self.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_text(self.chat_template, encoding="utf-8")


def import_tokenizer(checkpoint: Checkpoint) -> ImportedTokenizer:
    """Read the tokenizer from GGUF metadata or from the files beside the weights.

    Raises:
        TokenizerError: the tokenizer is missing or damaged, or a token has no row in the embedding.
        ModelFormatError: a setting has another type than it should have, or a value not allowed.
    """
    if checkpoint.metadata:
        imported = _from_gguf(checkpoint.metadata, origin=str(checkpoint.path))
    else:
        imported = _from_folder(checkpoint.path, rows=checkpoint.config.vocab_size)
    check_ids(imported.tokenizer, checkpoint.config.vocab_size, origin=str(checkpoint.path))
    try:
        GenerationOptions(**imported.generation)
    except OptionError as error:
        raise ModelFormatError(f"{checkpoint.path}: generation settings: {error}") from None
    return imported


def _from_gguf(metadata: Mapping[str, Any], *, origin: str) -> ImportedTokenizer:
    tokenizer = build_tokenizer(metadata, origin=origin)

    fields = Fields(metadata, origin=origin)

    def text(role: str) -> str | None:
        token = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return None if token is None else tokenizer.id_to_token(token)

    add_bos = fields.optional(bool, "tokenizer.ggml.add_bos_token")
    entry = TokenizerEntry(
        bos=text("bos"),
        add_bos=adds_bos(metadata, add_bos),
        eos=end_tokens(tokenizer, [text("eos"), text("eot"), text("eom")]),
        fim={
            role: token
            for role, keys in _FIM_KEYS.items()
            if (token := next(filter(None, map(text, keys)), None)) is not None
        },
    )
    template = _one_template(
        fields.optional(str, "tokenizer.chat_template"),
        fields.optional(str, f"tokenizer.chat_template.{_TOOL_USE}"),
    )
    generation = {
        name: value
        for key, name in _GGUF_SAMPLING.items()
        if (value := fields.optional(GENERATION[name], f"general.sampling.{key}")) is not None
    }
    return ImportedTokenizer(tokenizer, entry, template, generation)


def _from_folder(folder: Path, *, rows: int) -> ImportedTokenizer:
    if not (folder / TOKENIZER).exists():
        raise TokenizerError(
            f"{folder}: {TOKENIZER} is missing; a tokenizer in another format must be converted "
            "with transformers' save_pretrained first"
        )
    tokenizer = read_tokenizer(folder / TOKENIZER, template=True)
    with tokenizer_errors(str(folder / TOKENIZER)):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        prefix = tokenizer.encode("", add_special_tokens=True).tokens
    settings = _optional_json(folder / "tokenizer_config.json")
    generation = _optional_json(folder / "generation_config.json")
    bos = _token_text(settings.get("bos_token"))
    ends = [
        _token_text(settings.get("eos_token")),
        *_end_tokens(folder, generation, tokenizer, rows),
    ]
    entry = TokenizerEntry(
        bos=bos,
        add_bos=bos is not None and prefix[:1] == [bos],
        eos=end_tokens(tokenizer, ends),
    )
    fields = Fields(generation, origin=str(folder / "generation_config.json"))
    defaults: dict[str, Any] = {
        name: value
        for name, kind in GENERATION.items()
        if (value := fields.optional(kind, _GENERATION_KEYS.get(name, name))) is not None
    }
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return ImportedTokenizer(tokenizer, entry, _folder_template(folder, settings), defaults)


def _end_tokens(
    folder: Path, generation: Mapping[str, Any], tokenizer: Tokenizer, rows: int
) -> list[str | None]:
    """Return the texts of `eos_token_id`, one id or several; None for ids the tokenizer lacks."""
    ids = generation.get("eos_token_id", read_json(folder / "config.json").get("eos_token_id"))
    if ids is None:
        return []
    texts = []
    for token in ids if isinstance(ids, list) else [ids]:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < rows:
            raise ModelFormatError(
                f"{folder}: eos_token_id is {ids!r}; a token id from 0 to {rows - 1}, a list of "
                "them or null is allowed"
            )
        texts.append(tokenizer.id_to_token(token))
    return texts


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Read the chat template from its own files, else tokenizer_config.json, else a processor's."""
    named = {
        name: _read_text(folder / path)
        for name, path in (("default", CHAT_TEMPLATE), (_TOOL_USE, _TOOL_TEMPLATE))
        if (folder / path).exists()
    }
    if "default" not in named:
        named = {**_written_templates(folder, settings), **named}
    for name in ("default", _TOOL_USE):
        if not isinstance(named.get(name), str | None):
            raise ModelFormatError(f"{folder}: the chat template {name!r} is not text")
    return _one_template(named.get("default"), named.get(_TOOL_USE))


def _written_templates(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read chat templates by name from the settings; a single template is named `default`."""
    written = settings.get("chat_template")
    if written is None:
        written = _optional_json(folder / _PROCESSOR_TEMPLATE).get("chat_template")
    if isinstance(written, list):
        return {str(t.get("name")): t.get("template") for t in written if isinstance(t, dict)}
    return written if isinstance(written, dict) else {"default": written}


def _one_template(default: str | None, tool_use: str | None) -> str | None:
    """Join two chat templates into one that chooses between them as transformers does.

    Each renders as it does by itself: Jinja removes the line end after `%}` and the last of a file,
    and `{%+` keeps the space before it.
    """
    if default is None or tool_use is None or tool_use == default:
        return default
    first, second = (re.sub(r"(\r\n|\r|\n)\Z", "", text) for text in (tool_use, default))
    return f"{{% if tools %}}\n{first}{{%+ else %}}\n{second}{{%+ endif %}}"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path}: {error}") from None


def _optional_json(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(value: Any) -> str | None:
    """Return a token's text; tokenizer_config.json has a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
