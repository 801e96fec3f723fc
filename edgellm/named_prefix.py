"""Prefixes: named texts, such as system prompts and documents, with a KV cache kept between runs.

    EDGELLM_HOME/prefixes/NAME-KEY/
        prefix.json   its description, see `NamedPrefix`
        session       its tokens and KV cache, see `session_file.py`

A folder appears whole, by renaming. Models, KV formats and back ends have folders of their own.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from edgellm.checks import check_number
from edgellm.engine.condense import check_condensable
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.errors import CancelledError, OptionError, SessionFileError, TemplateError
from edgellm.progress import ProgressCallback
from edgellm.session import Session
from edgellm.store.home import delete_folder, file_safe, locked, prefixes_dir, replacing_folder
from edgellm.text.prompt import Message, encode_conversation

Kind = Literal["system", "text"]
_SESSION = "session"
_ABOUT = "prefix.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedPrefix:
    """Description of a kept prefix, in its folder's `prefix.json`.

    Attributes:
        model: name of the model, for people.
        kind: system: a system prompt, as the chat template writes it; text: a text as it is.
        tokens: number of tokens.
        keep: share of the rows of K and V that is kept, see `Session.condense`.
    """

    name: str
    model: str
    kv_format: str
    kind: Kind
    text: str
    tokens: int
    keep: float = 1


def open_prefix(
    engine: Engine, name: str, *, adapter: str | None = None
) -> tuple[NamedPrefix, Session]:
    """Open a kept prefix; return its description and a session that begins with it.

    A damaged KV cache is computed again.

    Args:
        adapter: adapter that the prefix was kept with, and that the session has; None: none.

    Raises:
        OptionError: no prefix of that name is kept for this model and adapter.
    """
    folder = _folder(engine, name, adapter)
    prefix = _read(folder)
    if prefix is None:
        kept = sorted({p.name for p, _ in kept_prefixes() if p.model == _model(engine)})
        of = "" if adapter is None else f" and the adapter {adapter!r}"
        raise OptionError(
            f"no prefix {name!r} is kept for {_model(engine)} with a KV cache in "
            f"{engine.options.kv_text}{of}; kept for this model are: "
            f"{', '.join(kept) or 'none'}. `edgellm cache add` keeps one"
        )
    try:
        context = Context(engine, adapter=engine.adapters.get(adapter))
        context.restore(folder / _SESSION)
        # others find the last block, which is not full, only once a session is closed
        with Session(engine, context, adapter=adapter) as session:
            return prefix, session.fork()
    except SessionFileError as error:
        _log.warning("%s; computed again", error)
        tokens = _tokens(engine, prefix.text, prefix.kind)
        return prefix, _compute(engine, prefix, tokens, None, adapter=adapter)


def keep_prefix(
    engine: Engine,
    name: str,
    text: str,
    *,
    kind: Kind,
    keep: float = 1,
    adapter: str | None = None,
    progress: ProgressCallback | None = None,
) -> Session:
    """Keep a text under a name, in place of an older one; return a session that begins with it.

    Args:
        keep: share of the rows of K and V that is kept, see `Session.condense`; 1: all.
        adapter: adapter to compute it with, and of the session; None: none.

    Raises:
        OptionError: an empty name or text, or files that cannot be written.
        ContextOverflowError: the text does not fit into the context.
    """
    if not name.strip() or not text:
        raise OptionError("a prefix has a name and a text; one of them is empty")
    tokens = _tokens(engine, text, kind)
    check_number("keep", keep, 0, 1)
    format = engine.options.kv_text
    about = NamedPrefix(name, _model(engine), format, kind, text, len(tokens), keep)
    if _read(_folder(engine, name, adapter)) == about:
        return open_prefix(engine, name, adapter=adapter)[1]
    return _compute(engine, about, tokens, progress, adapter=adapter)


def kept_prefixes() -> list[tuple[NamedPrefix, Path]]:
    """Return all kept prefixes of all models and their folders, sorted by name."""
    root = prefixes_dir()
    folders = root.glob("[!.]*")  # folders with a dot are being written, or their writer was killed
    read = [(_read(folder), folder) for folder in folders]
    return sorted(
        ((prefix, folder) for prefix, folder in read if prefix is not None),
        key=lambda pair: (pair[0].name, pair[0].model, pair[0].kv_format),
    )


def forget_prefix(name: str) -> int:
    """Delete a prefix for all models; return how many there were."""
    folders = [folder for prefix, folder in kept_prefixes() if prefix.name == name]
    for folder in folders:
        delete_folder(folder)
    return len(folders)


def _compute(
    engine: Engine,
    about: NamedPrefix,
    tokens: list[int],
    progress: ProgressCallback | None,
    *,
    adapter: str | None,
) -> Session:
    folder = _folder(engine, about.name, adapter)
    with Session(engine, adapter=adapter) as session:
        session.replace(tokens)
        if about.keep < 1:
            check_condensable(engine, tokens)
        answer = session.generate(max_tokens=0, progress=progress)
        if answer.finish_reason != "length":
            raise CancelledError(f"prefix {about.name!r}: {answer.finish_reason}; nothing is kept")
        if about.keep < 1:
            session.condense(about.keep)
        try:
            with (
                locked(folder),
                replacing_folder(folder, private=True, make_parents=True) as partial,
            ):
                session.save(partial / _SESSION)
                (partial / _ABOUT).write_text(json.dumps(asdict(about)), encoding="utf-8")
        except OSError as error:
            raise OptionError(f"{folder}: {error.strerror}") from None
        return session.fork()


def _folder(engine: Engine, name: str, adapter: str | None) -> Path:
    loaded = engine.adapters.get(adapter)
    words = [name, engine.fingerprint, engine.arithmetic]
    words += [] if loaded is None else [loaded.digest]
    key = hashlib.sha256("|".join(words).encode())
    return prefixes_dir() / f"{file_safe(name)}-{key.hexdigest()[:16]}"


def _model(engine: Engine) -> str:
    return engine.bundle.manifest.name


def _read(folder: Path) -> NamedPrefix | None:
    try:
        return NamedPrefix(**json.loads((folder / _ABOUT).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _tokens(engine: Engine, text: str, kind: Kind) -> list[int]:
    if kind == "text":
        return engine.tokenizer.encode(text, parse_special=True)
    # the tokens that all conversations with this system prompt begin with
    some, other = (
        encode_conversation(
            [Message("system", text), Message("user", question)], engine.template, engine.tokenizer
        )
        for question in ("a", "1")
    )
    differing = (i for i, (a, b) in enumerate(zip(some, other, strict=False)) if a != b)
    shared = next(differing, None)
    if shared is None:
        raise TemplateError(
            "the chat template ignores what the user says, so no system prompt can be kept for it; "
            "keep a text instead"
        )
    return some[:shared]
