"""What is told of a model, whether it is loaded or not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from edgellm.backends.selection import select
from edgellm.engine.engine import Engine
from edgellm.engine.loaded_model import context_size, open_template, planned_memory
from edgellm.errors import TemplateError, UnsupportedModelError
from edgellm.generation_options import GenerationOptions, chosen_options
from edgellm.graphs.config import ModelConfig
from edgellm.options import EngineOptions
from edgellm.store.bundle import Bundle
from edgellm.store.import_summary import imported
from edgellm.store.manifest import Manifest
from edgellm.text.fim import Family, require_family
from edgellm.text.template import ChatTemplate
from edgellm.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A model as clients are told of it.

    Attributes:
        name: the model's own.
        ctx_size: in tokens.
        slots: answers that all may fill their contexts.
        options: of answers whose requests say nothing of them.
        precision: that answers are computed in.
        file_type: how the model file is quantized, as Q4_K_M; of one that does not say so, what
            most of its matrices are stored as.
        memory_bytes: that it takes when its cache is full, as estimated.
        bos, eos: texts of its begin and end tokens; "" where there is none.
        template: the source of its chat template; "" where there is none.
        takes_tools: whether the template tells the model of tools.
        calls_tools: whether its calls can be told from text, too.
        reasons: whether its thoughts can.
        infill: how it is asked to fill a gap; None: it cannot.
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
    """The card of a model that is loaded."""
    template = _readable(engine.bundle, lambda: engine.template)
    return _card(engine.bundle, engine.options, engine.tokenizer, template)


def card_on_disk(bundle: Bundle, options: EngineOptions) -> ModelCard:
    """The card of one that is not, and would be with these options."""
    tokenizer = Tokenizer(bundle.path, bundle.manifest.tokenizer, rows=bundle.config.vocab_size)
    template = _readable(bundle, lambda: open_template(bundle, tokenizer))
    return _card(bundle, options, tokenizer, template)


def _readable(bundle: Bundle, opened: Callable[[], ChatTemplate | None]) -> ChatTemplate | None:
    """A template; one that is broken is as none, for whoever does not chat."""
    try:
        return opened()
    except TemplateError as error:
        _log.warning("%s: %s", bundle.manifest.name, error)
        return None


def _card(
    bundle: Bundle, options: EngineOptions, tokenizer: Tokenizer, template: ChatTemplate | None
) -> ModelCard:
    config, selection = bundle.config, select(options)
    estimate = planned_memory(bundle, options, selection.precisions(config))
    precision = selection.decode_precision(config)
    ctx_size = context_size(options, config.context_length)
    takes_tools = template is not None and template.traits.takes_tools
    form = None if template is None else template.answer_format
    return ModelCard(
        name=bundle.manifest.name,
        config=config,
        ctx_size=ctx_size,
        # a cache of the usual size holds two contexts, see `EngineOptions`
        slots=options.cache_size // ctx_size if options.cache_size else 2,
        options=chosen_options(bundle.manifest, None, {}),
        precision=precision,
        file_type=_file_type(bundle.manifest, precision),
        memory_bytes=estimate.weights + estimate.kv_cache,
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
