"""Opening of a draft model, and the reasons why a model cannot draft for another one."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.backends.registry import NATIVE
from edgellm.backends.selection import select
from edgellm.engine.draft_model import DraftModel
from edgellm.engine.loaded_model import LoadedModel
from edgellm.engine.memory import draft_options
from edgellm.errors import EdgeLLMError, OptionError
from edgellm.graphs.contract import WEIGHTS_FILE
from edgellm.options import EngineOptions, draft_refused
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle
from edgellm.store.import_summary import imported
from edgellm.store.manifest import PACKED
from edgellm.store.prepare import prepare


def prepare_draft(
    bundle: Bundle, options: EngineOptions, *, progress: ProgressCallback | None = None
) -> Bundle | None:
    """Open the bundle of the draft model that `options` name for `bundle`; None: they name none.

    Raises:
        OptionError: the back end of decode checks no drafts, or it is the same model.
        EdgeLLMError: the draft model cannot be had; see `prepare`.
    """
    name = options.draft
    if name is None:
        return None
    decode = select(options, bundle.config).decode
    if decode != NATIVE:
        raise draft_refused(name, decode)
    try:
        draft = prepare(name, precisions=(PACKED,), progress=progress)
    except EdgeLLMError as error:
        raise type(error)(f"`draft` is {name!r}: {error}") from None
    weights, same = draft.manifest.source_sha256, bundle.manifest.source_sha256
    if draft.path.resolve() == bundle.path.resolve() or (weights and weights == same):
        raise OptionError(
            f"`draft` is {name!r}, the model itself, which would be as slow as no drafts; name a "
            "smaller model of the same family, or leave it out"
        )
    if _token_bytes(draft) > _token_bytes(bundle):
        raise OptionError(
            f"`draft` is {name!r}, of which a token reads {_token_bytes(draft) >> 20} MiB, and of "
            f"{bundle.manifest.name} {_token_bytes(bundle) >> 20}: it could never be faster; name "
            "a smaller model of the same family"
        )
    return draft


def open_draft(target: LoadedModel, bundle: Bundle) -> DraftModel:
    """Load a draft model beside the model that it drafts for, in the thread of that.

    Raises:
        OptionError: the vocabularies differ, or a layer of either model has states.
        EdgeLLMError: the draft model cannot be loaded.
    """
    name, options = target.options.draft or bundle.manifest.name, target.options
    used = draft_options(bundle, options, ctx_size=target.ctx_size)
    try:
        model = LoadedModel(bundle, used, thread=target.thread)
    except EdgeLLMError as error:
        raise type(error)(f"`draft` is {name!r}: {error}") from None
    if target.cache.has_states or model.cache.has_states:
        raise OptionError(
            f"`draft` is {name!r}, but a layer has states, which cannot go back behind a rejected "
            "draft; leave out `draft`"
        )
    difference = first_difference(target.tokenizer.vocabulary, model.tokenizer.vocabulary)
    if difference is not None:
        token, wanted, found = difference
        raise OptionError(
            f"`draft` is {name!r}, which has another vocabulary than {target.bundle.manifest.name}:"
            f" token {token} is {found!r}, and not {wanted!r}; name a model with the same "
            "tokenizer, such as a smaller one of the same family"
        )
    return DraftModel(
        decoder=model.decoder,
        cache=model.cache,
        ctx_size=model.ctx_size,
        rows=min(target.config.vocab_size, model.config.vocab_size),
        tokens=options.draft_tokens,
        p_min=options.draft_p_min,
        token_steps=_token_bytes(bundle) / _token_bytes(target.bundle),
    )


def first_difference(
    wanted: Mapping[str, int], found: Mapping[str, int]
) -> tuple[int, str, str] | None:
    """Return the first id that has two texts in two vocabularies, and the texts; None: none has.

    A vocabulary may be longer than the other one: its further tokens are never accepted.
    """
    texts = {token: text for text, token in wanted.items()}
    others = {token: text for text, token in found.items()}
    for token in sorted(texts.keys() & others.keys()):
        if texts[token] != others[token]:
            return token, texts[token], others[token]
    return None


def _token_bytes(bundle: Bundle) -> int:
    """Return the bytes of weights that a token reads: of experts those that it goes through."""
    read = imported(bundle.manifest, PACKED).decode_bytes
    return read or bundle.manifest.files[f"{PACKED}/{WEIGHTS_FILE}"].bytes
