"""Models that a server serves, how each is loaded, and facts about them for clients."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from edgellm.backends.selection import precisions_of, select
from edgellm.engine.adapters import AdapterSource, adapter_bytes
from edgellm.engine.auto_backend import prepare_for
from edgellm.engine.draft_opening import prepare_draft
from edgellm.engine.engine import Engine
from edgellm.engine.loaded_model import open_template
from edgellm.engine.memory import MemoryEstimate, estimate
from edgellm.errors import OptionError, TemplateError, UnsupportedModelError
from edgellm.generation_options import GenerationOptions, chosen_options
from edgellm.graphs.config import ModelConfig
from edgellm.llm import (
    LLM,
    LoadArguments,
    engine_options,
    load,
    with_defaults,
)
from edgellm.measure.kv_bits import with_layer_formats
from edgellm.options import EngineOptions
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import PACKED, Manifest, imported
from edgellm.store.prepare import prepared
from edgellm.store.sources import check_name
from edgellm.text.fim import Family, require_family
from edgellm.text.template import ChatTemplate
from edgellm.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_WITH_ID = re.compile(r"([\w.:-]+)=(?!=)")  # not the `==` of pypi:package==version


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Facts about a model for its clients.

    Attributes:
        name: the model's own name.
        ctx_size: context length in tokens.
        slots: number of whole contexts that fit into the KV cache.
        options: default generation options of answers.
        precision: precision in which answers are decoded.
        file_type: quantization of the model file, such as Q4_K_M; for a file that does not name
            one, the storage type of most of its matrices.
        memory_bytes: estimated memory of weights, a full KV cache, draft model and adapters.
        bos, eos: texts of the begin and end tokens; "" where there is none.
        template: source of the chat template; "" where there is none.
        takes_tools: whether the template describes tools to the model.
        calls_tools: whether the model's tool calls can also be told from its text.
        reasons: whether the model's reasoning can be told from its text.
        infill: family of the model's fill-in-the-middle tokens; None: it cannot fill gaps.
    """

    name: str
    config: ModelConfig
    ctx_size: int
    slots: int
    options: GenerationOptions
    precision: str
    file_type: str
    memory_bytes: int
    bos: str
    eos: str
    template: str
    takes_tools: bool
    calls_tools: bool
    reasons: bool
    infill: Family | None


def card_of(engine: Engine) -> ModelCard:
    template = _readable(engine.bundle, lambda: engine.template)
    return _card(engine.bundle, engine.options, engine.tokenizer, template, engine.memory)


def card_on_disk(
    bundle: Bundle, options: EngineOptions, *, draft: Bundle | None = None, adapters: int = 0
) -> ModelCard:
    """Return the card of a model that is not loaded, as if loaded with these options.

    Args:
        draft: bundle of its draft model; None: it has none, or none that is on disk.
        adapters: bytes of its adapters.
    """
    tokenizer = Tokenizer(bundle.path, bundle.manifest.tokenizer, rows=bundle.config.vocab_size)
    template = _readable(bundle, lambda: open_template(bundle, tokenizer))
    selection = select(options, bundle.config)
    needed = estimate(bundle, options, selection, draft=draft, adapters=adapters)
    return _card(bundle, options, tokenizer, template, needed)


def _readable(bundle: Bundle, opened: Callable[[], ChatTemplate | None]) -> ChatTemplate | None:
    """Open the chat template; None if there is none, or if it is broken, which is logged.

    Requests that need no template still work then.
    """
    try:
        return opened()
    except TemplateError as error:
        _log.warning("%s: %s", bundle.manifest.name, error)
        return None


def _card(
    bundle: Bundle,
    options: EngineOptions,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    needed: MemoryEstimate,
) -> ModelCard:
    config, selection = bundle.config, select(options, bundle.config)
    precision = selection.decode_precision(config)
    takes_tools = template is not None and template.traits.takes_tools
    form = None if template is None else template.answer_format
    return ModelCard(
        name=bundle.manifest.name,
        config=config,
        ctx_size=needed.ctx_size,
        # a cache of the usual size holds two contexts, see `EngineOptions`
        slots=options.cache_size // needed.ctx_size if options.cache_size else 2,
        options=chosen_options(bundle.manifest, None, {}),
        precision=precision,
        file_type=_file_type(bundle.manifest, precision),
        memory_bytes=needed.models,
        bos=tokenizer.bos or "",
        eos=next(iter(tokenizer.eos), ""),
        template="" if template is None else template.source,
        takes_tools=takes_tools,
        calls_tools=takes_tools and form is not None and bool(form.calls),
        reasons=form is not None and form.reasoning is not None,
        infill=_infill(bundle, tokenizer),
    )


def _file_type(manifest: Manifest, precision: str) -> str:
    if manifest.file_type:
        return manifest.file_type
    storage = imported(manifest, precision).storage
    return max(storage, key=storage.__getitem__, default="")


def _infill(bundle: Bundle, tokenizer: Tokenizer) -> Family | None:
    try:
        return require_family(tokenizer.vocabulary, tokenizer.fim, model=bundle.manifest.name)
    except UnsupportedModelError:
        return None


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
        used = with_layer_formats(bundle, used, progress=progress)
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
            with_layer_formats(bundle, options, measures=False),
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
