"""Opening of a draft model, and the reasons why a model cannot draft for another one."""

from __future__ import annotations

import math
from collections.abc import Mapping

from edgellm.backends.host_attention import rope_tables
from edgellm.backends.mtp import MtpModel
from edgellm.backends.packed_weights import open_assistant_weights, open_mtp_weights
from edgellm.backends.registry import NATIVE
from edgellm.backends.selection import select
from edgellm.cache.groups import DRAFT_STATES, cache_groups, of_other_layers, pool_blocks
from edgellm.cache.kv_cache import KVCache
from edgellm.engine.draft_model import DraftModel
from edgellm.engine.draft_policy import DraftSource
from edgellm.engine.loaded_model import LoadedModel
from edgellm.engine.memory import draft_options, token_bytes
from edgellm.engine.mtp import MtpHead
from edgellm.errors import EdgeLLMError, OptionError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.mtp import mtp_config, mtp_tensors
from edgellm.kernels.native import library
from edgellm.kernels.rope import RopeTable
from edgellm.options import NO_DRAFT, EngineOptions, draft_refused
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle, stretched
from edgellm.store.manifest import MTP, PACKED
from edgellm.store.prepare import prepare
from edgellm.text.tokenizer import Tokenizer

# First tokens of the vocabulary that a head guesses among. Those of most texts are there, as
# tokenizers number the most frequent first; all 248,320 take a third of a step of Qwen3.5-0.8B.
_MTP_TOKENS = 65_536


def prepare_draft(
    bundle: Bundle, options: EngineOptions, *, progress: ProgressCallback | None = None
) -> Bundle | None:
    """Open the bundle of the draft model that `options` name for `bundle`; None: they name none.

    Raises:
        OptionError: the back end of decode checks no drafts, or it is the same model.
        EdgeLLMError: the draft model cannot be had; see `prepare`.
    """
    name = options.draft
    if name in (None, NO_DRAFT):
        return None
    decode = select(options, bundle.config).decode
    if decode != NATIVE:
        raise draft_refused(name, decode)
    try:
        draft = prepare(name, precisions=(PACKED,), progress=progress)
        if draft.config.backbone is not None:  # it reads the model's keys; others have their own
            draft = stretched(draft, options.rope_scale)
    except EdgeLLMError as error:
        raise type(error)(f"`draft` is {name!r}: {error}") from None
    weights, same = draft.manifest.source_sha256, bundle.manifest.source_sha256
    if draft.path.resolve() == bundle.path.resolve() or (weights and weights == same):
        raise OptionError(
            f"`draft` is {name!r}, the model itself, which would be as slow as no drafts; name a "
            "smaller model of the same family, or leave it out"
        )
    if token_bytes(draft) > token_bytes(bundle):
        raise OptionError(
            f"`draft` is {name!r}, of which a token reads {token_bytes(draft) >> 20} MiB, and of "
            f"{bundle.manifest.name} {token_bytes(bundle) >> 20}: it could never be faster; name "
            "a smaller model of the same family"
        )
    return draft


def open_draft(target: LoadedModel, bundle: Bundle) -> DraftSource:
    """Load a draft model, or an assistant, beside the model that it drafts for.

    Raises:
        OptionError: the vocabularies differ, or it is an assistant of another model.
        EdgeLLMError: the draft model cannot be loaded.
    """
    if bundle.config.backbone is not None:
        return open_assistant(target, bundle)
    name, options = target.options.draft or bundle.manifest.name, target.options
    used = draft_options(bundle, options, ctx_size=target.ctx_size)
    try:
        model = LoadedModel(bundle, used, thread=target.thread)
    except EdgeLLMError as error:
        raise type(error)(f"`draft` is {name!r}: {error}") from None
    _check_vocabulary(target, model.tokenizer, name=name)
    return DraftModel(
        decoder=model.decoder,
        cache=model.cache,
        ctx_size=model.ctx_size,
        rows=min(target.config.vocab_size, model.config.vocab_size),
        # the last one is never computed
        tokens=min(options.draft_tokens, DRAFT_STATES + 1)
        if model.cache.has_states
        else options.draft_tokens,
        p_min=options.draft_p_min,
        token_steps=token_bytes(bundle) / token_bytes(target.bundle),
    )


def open_assistant(target: LoadedModel, bundle: Bundle) -> MtpHead:
    """Open a small model that reads hidden states, K and V of the one that it drafts for.

    Raises:
        OptionError: it is for another model.
    """
    config, options, compiled = bundle.config, target.options, library()
    name = options.draft or bundle.manifest.name
    assert compiled is not None  # see `prepare_draft`
    tokenizer = Tokenizer(bundle.path, bundle.manifest.tokenizer, rows=config.vocab_size)
    _check_vocabulary(target, tokenizer, name=name)
    sources = _sources(target.config, config)
    if config.backbone != target.config.hidden_size or sources is None:
        raise OptionError(
            f"`draft` is {name!r}, which reads hidden states of {config.backbone} numbers, K and V "
            f"of another model than {target.bundle.manifest.name}; name the one that was made for "
            "this model, or a smaller model of the same family"
        )
    # a row is computed as if at the last position of the model's sequence, behind which it stands
    ropes = [
        RopeTable(table.cos[1:], table.sin[1:])
        for table in rope_tables(config, target.ctx_size + 1)
    ]
    model = MtpModel(
        compiled,
        open_assistant_weights(bundle, target.bundle, sources, at=target.cache.places),
        ropes,
        [group.blocks for group in target.cache.groups],
        threads=target.threads,
    )
    return MtpHead(
        model=model,
        cache=None,
        ctx_size=min(target.ctx_size, config.context_length),
        tokens=options.draft_tokens,
        p_min=options.draft_p_min,
        token_steps=token_bytes(bundle) / token_bytes(target.bundle),
    )


def _sources(target: ModelConfig, config: ModelConfig) -> list[int] | None:
    """Return the layer of a model whose K and V each layer of its assistant reads.

    It is the last one with K and V of its own and the same window. None: there is none, or it has
    heads of other sizes.
    """
    own = {a.window: i for i, a in target.attentions.items() if a.kv_from is None}
    attentions = config.attentions.values()
    if not {each.window for each in attentions} <= own.keys():
        return None
    sources = [own[each.window] for each in attentions]
    for each, source in zip(attentions, sources, strict=True):
        there = target.attentions[source]
        sizes = there.kv_heads, there.head_dim
        if there.latent is not None or (each.kv_heads, each.head_dim) != sizes:
            return None
    return sources


def open_mtp(target: LoadedModel) -> MtpHead | None:
    """Open a model's own head for drafts; None: it has none, or decode checks no drafts."""
    bundle, options, entry = target.bundle, target.options, target.bundle.manifest.mtp
    compiled = library()
    if entry is None or compiled is None or target.decoder.name != NATIVE:
        return None
    weights = open_mtp_weights(bundle, entry, tokens=_MTP_TOKENS)
    cache = KVCache(
        cache_groups(mtp_config(target.config)),
        format=of_other_layers(options.kv_format, mtp_config(target.config)),
        ctx_size=target.ctx_size,
        blocks=pool_blocks(target.ctx_size),
        policy=options.eviction,
        fingerprint=f"{target.fingerprint}|{target.arithmetic}|{MTP}".encode(),
        defer=target.thread.soon,
    )
    model = MtpModel(
        compiled,
        weights,
        rope_tables(target.config, target.ctx_size),
        [group.blocks for group in cache.groups],
        threads=target.threads,
    )
    specs = mtp_tensors(target.config)
    read = sum(specs[name].used(math.prod(entry.arrays[name].shape)) for name in entry.kinds)
    read += weights.step.head.data.nbytes
    return MtpHead(
        model=model,
        cache=cache,
        ctx_size=target.ctx_size,
        tokens=options.draft_tokens,
        p_min=options.draft_p_min,
        token_steps=read / token_bytes(bundle),
    )


def _check_vocabulary(target: LoadedModel, tokenizer: Tokenizer, *, name: str) -> None:
    """Refuse the draft model `name` if its tokens have other texts."""
    difference = first_difference(target.tokenizer.vocabulary, tokenizer.vocabulary)
    if difference is not None:
        token, wanted, drafted = difference
        raise OptionError(
            f"`draft` is {name!r}, which has another vocabulary than {target.bundle.manifest.name}:"
            f" token {token} is {drafted!r}, and not {wanted!r}; name a model with the same "
            "tokenizer, such as a smaller one of the same family"
        )


def first_difference(
    wanted: Mapping[str, int], drafted: Mapping[str, int]
) -> tuple[int, str, str] | None:
    """Return the first id that has two texts in two vocabularies, and the texts; None: none has.

    A vocabulary may be longer than the other one: its further tokens are never accepted.
    """
    texts = {token: text for text, token in wanted.items()}
    others = {token: text for text, token in drafted.items()}
    for token in sorted(texts.keys() & others.keys()):
        if texts[token] != others[token]:
            return token, texts[token], others[token]
    return None
