"""Models that a server serves, and how each is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from edgellm.backends.selection import precisions_of, select
from edgellm.engine.adapters import AdapterSource, adapter_bytes
from edgellm.engine.auto_decode import prepare_for
from edgellm.engine.draft_opening import prepare_draft
from edgellm.engine.memory import estimate
from edgellm.errors import OptionError
from edgellm.llm import (
    LLM,
    LoadArguments,
    engine_options,
    load,
    with_defaults,
)
from edgellm.progress import ProgressCallback
from edgellm.serve.model_card import ModelCard, card_on_disk
from edgellm.store.manifest import PACKED
from edgellm.store.prepare import prepared
from edgellm.store.sources import check_name

_WITH_ID = re.compile(r"([\w.:-]+)=(?!=)")  # not the `==` of pypi:package==version


@dataclass(frozen=True)
class ServedModel:
    """A model that clients may name.

    Attributes:
        id: id by which clients name the model.
        open: function that loads the model; takes seconds, or minutes where it is exported first.
        needed_bytes: function that estimates the model's memory; may take as long as `open`.
        card: function that reads the model's card without loading, downloading or exporting it;
            None where it would have to be downloaded or exported. May take a second.
        check: function that refuses at once a name that can never be loaded.
        pinned: whether the model is never unloaded to make room for others.
        adapters: adapters that `open` loads, see `edgellm.load`.
    """

    id: str
    open: Callable[[], LLM]
    needed_bytes: Callable[[], int] = lambda: 0
    card: Callable[[], ModelCard | None] = lambda: None
    check: Callable[[], None] = lambda: None
    pinned: bool = False
    adapters: Mapping[str, AdapterSource] = field(default_factory=dict)


def served_model(
    name: str,
    arguments: LoadArguments,
    *,
    id: str | None = None,
    pinned: bool = False,
    progress: ProgressCallback | None = None,
) -> ServedModel:
    """Return the model that the command line names.

    Args:
        name: name as for `edgellm.load`, or `ID=NAME` to choose the id. Without `ID=` the id is
            the name without `hf:` and `.gguf`, and of a path the last part.
        arguments: see `edgellm.load`.
        id: id of the model; None: `name` says it.
        pinned: see `ServedModel`.
        progress: called with the progress of download and export whenever the model is loaded.

    Raises:
        OptionError: `ID=` without a name.
    """
    given, source = (id, name) if id is not None else split_id(name)
    options = engine_options(arguments)

    def needed_bytes() -> int:
        bundle, used, _ = prepare_for(source, options, progress=progress)
        draft = prepare_draft(bundle, used, progress=progress)
        adapters = adapter_bytes(arguments.get("adapters"))
        selection = select(used, bundle.config)
        return estimate(bundle, used, selection, draft=draft, adapters=adapters).models

    def card() -> ModelCard | None:
        bundle = prepared(source, precisions=precisions_of(options))
        if bundle is None:
            return None
        draft = None
        if options.draft is not None:
            draft = prepared(options.draft, precisions=(PACKED,))
        return card_on_disk(
            with_defaults(bundle, arguments.get("defaults")),
            options,
            draft=draft,
            adapters=adapter_bytes(arguments.get("adapters")),
        )

    return ServedModel(
        given or _public_id(source),
        lambda: load(source, progress=progress, **arguments),
        needed_bytes,
        card,
        partial(check_name, source),
        pinned,
        arguments.get("adapters") or {},
    )


def split_id(name: str) -> tuple[str, str]:
    """Split `ID=NAME` into both; the id is "" where there is none.

    Raises:
        OptionError: `ID=` without a name.
    """
    with_id = _WITH_ID.match(name)
    given, source = ("", name) if with_id is None else (with_id[1], name[with_id.end() :])
    if not source:
        raise OptionError(f"model {name!r}: write ID=NAME or NAME")
    return given, source


def _public_id(source: str) -> str:
    """Return the id of a model's source, without folders of this machine."""
    if source.startswith("hf:"):
        return source.removeprefix("hf:").partition("@")[0]
    last = Path(source.rpartition("!")[2]).name if "/" in source or "!" in source else source
    return last.removesuffix(".gguf") or source
