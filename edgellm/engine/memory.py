"""Memory that a model takes, and the context that fits into it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
import psutil

from edgellm.backends.providers import CPU, CUDA
from edgellm.backends.registry import NATIVE, STEPS, TRITON
from edgellm.backends.selection import Selection
from edgellm.cache.groups import (
    STEP_ROWS,
    cache_bytes,
    context_blocks,
    of_other_layers,
    pool_blocks,
    sealed_pool_bytes,
)
from edgellm.errors import MemoryEstimateError, OptionError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import WEIGHTS_FILE
from edgellm.graphs.mtp import mtp_config
from edgellm.graphs.tensors import model_tensors
from edgellm.kernels.kv_blocks import BLOCK, seals
from edgellm.kernels.linear import PANEL
from edgellm.options import NO_DRAFT, EngineOptions
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import MTP, PACKED, imported

# A process with all libraries imported and no model: 110 MB on Linux with Python 3.11.
_BASE_BYTES = 110 << 20
# Share of the memory that the KV cache takes at most, where no context was asked for.
_CACHE_SHARE = 4
# Smallest context that the share decides on; with less memory the model is not loaded.
_LEAST_CONTEXT = 4096
# Different tokens in what a model reads and writes; 8,192 tokens of prose have about 2,000.
_DIFFERENT_TOKENS = 8192
_PAGE = 4096
# A context that the share cuts is a multiple of as many tokens.
_STEP = 1024


HOST = "host"
# Back ends whose devices have memory of their own, where they check themselves what fits.
_OWN_MEMORY = (CUDA, TRITON)
# Copies that ONNX Runtime keeps on the CPU, in multiples of the file: others than float32 are an
# upper bound, with which it is repacked (w8a8: 1.5) or computed in float32 (f16: 2.0).
_ON_CPU = {"f32": 1, "head-f32": 1}
_REPACKED = 2


@dataclass(frozen=True)
class Copy:
    """A copy of weights in memory.

    Attributes:
        owner: part of the bundle that they are from, or `draft` for another bundle.
        place: `host`, or the back end in the memory of whose device they are.
    """

    owner: str
    place: str
    bytes: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Resident bytes of a loaded model with a full KV cache.

    Attributes:
        weights: bytes of all copies but those of drafts, and those in a GPU's own memory.
        copies: all copies of weights.
        ctx_size: tokens of a context.
        blocks: number of blocks in each pool of the KV cache.
        draft: bytes of the draft model beside it, or of its own head for drafts, with a full KV
            cache of its own.
        adapters: bytes of the adapters that are loaded with it.
        spilled: bytes of the KV cache that lie in a file instead (`kv_spill`).
    """

    weights: int
    kv_cache: int
    ctx_size: int
    blocks: int
    base: int = _BASE_BYTES
    draft: int = 0
    adapters: int = 0
    copies: tuple[Copy, ...] = ()
    spilled: int = 0

    @property
    def models(self) -> int:
        """Bytes without those of a process that has no model."""
        return self.weights + self.kv_cache + self.draft + self.adapters

    @property
    def total(self) -> int:
        return self.models + self.base


def estimate(
    bundle: Bundle,
    options: EngineOptions,
    selection: Selection,
    *,
    draft: Bundle | None = None,
    adapters: int = 0,
) -> MemoryEstimate:
    """Estimate the memory of a model with these options and back ends when its cache is full.

    Args:
        draft: bundle of its draft model; None: it has none.
        adapters: bytes of the adapters that are loaded with it, see `adapter_bytes`.

    Raises:
        OptionError: the options ask for more tokens than the model was trained for, for a cache
            that does not hold one context, or for less memory than the experts of one token need.
    """
    config = bundle.config
    copies = weight_copies(bundle, selection, expert_memory=options.expert_memory)
    weights = sum(copy.bytes for copy in copies if copy.place not in _OWN_MEMORY)
    drafts = 0 if draft is None else _file_bytes(draft, PACKED) - _unread_bytes(draft)
    head = bundle.manifest.mtp is not None and options.draft is None and selection.decode == NATIVE
    if head:
        drafts = bundle.manifest.files[f"{MTP}/{WEIGHTS_FILE}"].bytes
    if drafts:
        copies = (*copies, Copy(MTP if head else "draft", HOST, drafts))
    ctx_size = _context_size(config, options, selection, weights=weights + drafts + adapters)
    blocks = _blocks(config, options, ctx_size)
    cache = _cache_bytes(config, options, ctx_size)
    if draft is not None:
        used = draft_options(draft, options, ctx_size=ctx_size)
        drafts += _cache_bytes(draft.config, used, used.ctx_size or ctx_size)
    if head:
        drafts += cache_bytes(
            mtp_config(config),
            format=of_other_layers(options.kv_format, mtp_config(config)),
            ctx_size=ctx_size,
            blocks=pool_blocks(ctx_size),
            policy=options.eviction,
        )
    base = _BASE_BYTES + _expert_bytes(config) + _stream_bytes(config)
    return MemoryEstimate(
        weights,
        cache,
        ctx_size=ctx_size,
        blocks=blocks,
        base=base,
        draft=drafts,
        adapters=adapters,
        copies=copies,
        spilled=_spilled_bytes(config, options, blocks),
    )


def weight_copies(
    bundle: Bundle, selection: Selection, *, expert_memory: int | None = None
) -> tuple[Copy, ...]:
    """Return the copies of weights that these back ends keep, without those of drafts.

    Packed weights are mapped, and the native kernels read them in place: prefill, decode,
    embedding and LM head have no other copy beside them. Graphs for a device have one for each
    chunk size.

    Raises:
        OptionError: see `estimate`.
    """
    config = bundle.config
    chosen = {selection.prefill, selection.host(config)}
    precisions = selection.graph_precisions(config)
    copies: list[Copy] = []
    if NATIVE in chosen:
        out = _unread_bytes(bundle)
        if expert_memory is not None and config.has_experts and selection.decode == NATIVE:
            out += _experts_left_out(bundle, expert_memory)
        copies += _packed(bundle, HOST, out=out)
    if TRITON in chosen:  # the host's pages go once they are copied
        copies += _packed(bundle, TRITON)
    for name in precisions:
        size = _file_bytes(bundle, name)
        if selection.prefill == CPU or name != selection.prefill_precision(config):
            copies.append(Copy(name, HOST, size * _ON_CPU.get(name, _REPACKED)))
        else:
            sizes = len(bundle.precision(name).chunk_sizes)
            owner = f"{name} in {sizes} chunk sizes"
            copies.append(Copy(owner, selection.prefill, size * sizes))
    heads = {f"head-{bundle.precision(name).head}" for name in precisions}
    if not chosen.isdisjoint(STEPS):
        heads.discard("head-int8")  # packed weights have it
    for name in sorted(heads):
        size = _file_bytes(bundle, name) * _ON_CPU.get(name, _REPACKED)
        copies.append(Copy(name, HOST, size))
    return tuple(copies)


def _file_bytes(bundle: Bundle, folder: str) -> int:
    return bundle.manifest.files[f"{folder}/{WEIGHTS_FILE}"].bytes


def _packed(bundle: Bundle, place: str, *, out: int = 0) -> list[Copy]:
    """Return the copies of packed weights.

    Args:
        out: bytes of the layers that are not there.
    """
    arrays = bundle.precision(PACKED).arrays
    tables = [arrays[name] for name in ("embedding", "head") if name in arrays]
    rows = sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in tables)
    layers = _file_bytes(bundle, PACKED) - rows - out
    return [Copy(PACKED, place, layers), Copy("embedding and LM head", place, rows)]


def draft_options(draft: Bundle, options: EngineOptions, *, ctx_size: int) -> EngineOptions:
    """Return the options of a draft model: native, with room for one context of `ctx_size`.

    Where it was trained for a shorter context, it drafts up to its end.
    """
    size = min(ctx_size, draft.config.context_length)
    format = of_other_layers(options.kv_format, draft.config)
    return EngineOptions(
        decode=NATIVE,
        prefill=NATIVE,
        kv_format=format,
        kv_budget=options.kv_budget,
        kv_policy=options.kv_policy,
        kv_spill=options.kv_spill if seals(format) else None,
        ctx_size=size,
        cache_size=size,
        threads=options.threads,
        draft=NO_DRAFT,
    )


def token_bytes(bundle: Bundle) -> int:
    """Return the bytes of weights that a token reads: of experts those that it goes through."""
    read = imported(bundle.manifest, PACKED).decode_bytes
    return read or bundle.manifest.files[f"{PACKED}/{WEIGHTS_FILE}"].bytes


def check_fits(needed: MemoryEstimate) -> None:
    """Refuse to load a model that would be killed for memory later.

    Raises:
        MemoryEstimateError: it needs more than is available now.
    """
    available = psutil.virtual_memory().available
    if needed.total > available:
        beside = {"draft": needed.draft, "adapters": needed.adapters}
        parts = [f", `{name}` {_mib(size)}" for name, size in beside.items() if size]
        others = [f", or leave out `{name}`" for name, size in beside.items() if size]
        if needed.draft:  # the model's own head is there without being asked for
            others[0] += " (a head of the model's own: `draft` none)"
        raise MemoryEstimateError(
            f"about {_mib(needed.total)} MiB would be needed (weights {_mib(needed.weights)}, KV "
            f"cache {_mib(needed.kv_cache)}{''.join(parts)}), but {_mib(available)} MiB are "
            f"available; choose a smaller `ctx_size` or a smaller `kv_format`{''.join(others)}"
        )


def context_note(config: ModelConfig, options: EngineOptions, ctx_size: int) -> str | None:
    """Say that a context is smaller than the model's own without being asked for; else None."""
    asked = options.ctx_size is not None or options.cache_size is not None
    if asked or ctx_size >= config.context_length:
        return None
    return (
        f"context of {ctx_size} of the model's {config.context_length} tokens, which the KV "
        f"cache's share of the memory holds (1/{_CACHE_SHARE}); `ctx_size` asks for another one"
    )


def _experts_left_out(bundle: Bundle, limit: int) -> int:
    """Return the bytes of experts beyond a limit.

    Raises:
        OptionError: the limit does not hold the experts of one token, so that none would be there
            when it is used again; or the system does not take memory back.
    """
    if sys.platform == "win32":
        raise OptionError(
            "`expert_memory` is given, and Windows does not take back memory of mapped files; "
            "leave it out"
        )
    arrays = bundle.precision(PACKED).arrays
    sizes = {
        name: (spec, math.prod(arrays[name].shape))
        for name, spec in model_tensors(bundle.config).items()
        if spec.experts is not None and spec.quantized
    }
    needed = sum(spec.used(size) for spec, size in sizes.values())
    if limit < needed:
        raise OptionError(
            f"`expert_memory` is {limit} bytes; the experts of one token are {needed} bytes in all "
            f"layers, so take at least {needed} ({_mib(needed) + 1} MiB)"
        )
    return max(0, sum(size for _, size in sizes.values()) - limit)


def _expert_bytes(config: ModelConfig) -> int:
    """Return the bytes of a step's rows in experts: a byte a code and 2.6 of scales and sums."""
    hidden, most = config.hidden_size, 0.0
    for layer in config.layers:
        if layer.experts is not None:
            width = 4 * hidden + 3.6 * (hidden + layer.mlp.intermediate)
            shared = 0.0
            if layer.shared is not None:
                floats = 2 if layer.shared.beside else 1  # its outputs, and what a router reads
                shared = 4 * hidden * floats + 3.6 * layer.shared.intermediate
            most = max(most, STEP_ROWS * (layer.experts.used * width + shared))
    return int(most)


def _stream_bytes(config: ModelConfig) -> int:
    """Return the bytes of a step's rows in all residual streams, and of gates before a cutoff."""
    gates = [each.mlp.intermediate for each in config.layers if each.mlp.cutoff is not None]
    return 4 * STEP_ROWS * ((config.streams or 0) * config.hidden_size + max(gates, default=0))


def _unread_bytes(bundle: Bundle) -> int:
    """Estimate the bytes of tokens' embeddings for each layer that no text reads.

    A token reads a few pages of their table, which stays in the mapped file.
    """
    width, layers = bundle.config.layer_embedding, bundle.config.layer_count
    if width is None:
        return 0
    panels, *each = bundle.precision(PACKED).arrays["layer_embedding"].shape
    panel = math.prod(each)
    of_token = (layers // PANEL + 2) * panel + _PAGE
    return max(0, panels * panel - _DIFFERENT_TOKENS * of_token)


def _context_size(
    config: ModelConfig, options: EngineOptions, selection: Selection, *, weights: int
) -> int:
    """Return the tokens of a context.

    Raises:
        OptionError: the options ask for more than the model was trained for.
    """
    trained = config.context_length
    if options.ctx_size is None:
        most = trained
        if options.cache_size is not None and options.kv_budget is None:
            most = min(trained, options.cache_size)
        if selection.cache_on_gpu:  # where all blocks get memory at once
            return min(most, _LEAST_CONTEXT)
        return _fitting_context(config, options, most, weights=weights)
    if options.ctx_size > trained:
        raise OptionError(
            f"`ctx_size` is {options.ctx_size}; allowed with this model are {trained} at most, or "
            "more with a larger `rope_scale`"
        )
    return options.ctx_size or trained


def _fitting_context(
    config: ModelConfig, options: EngineOptions, most: int, *, weights: int
) -> int:
    """Return the largest context of up to `most` tokens whose KV cache fits its share of memory.

    The share is of all memory, so that it is the same whenever the model is loaded; where less is
    free beside the weights, it is half of that.
    """
    memory = psutil.virtual_memory()
    limit = options.memory_limit_bytes or memory.total
    share = limit // _CACHE_SHARE
    free = (options.memory_limit_bytes or memory.available) - weights - _BASE_BYTES
    share = share if free >= share else free // 2
    if most <= _LEAST_CONTEXT or _cache_bytes(config, options, most) <= share:
        return most
    low, high = _LEAST_CONTEXT // _STEP, most // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        if _cache_bytes(config, options, middle * _STEP) <= share:
            low = middle
        else:
            high = middle - 1
    return low * _STEP


def _cache_bytes(config: ModelConfig, options: EngineOptions, ctx_size: int) -> int:
    """Return the bytes of a full KV cache in memory, and of the RoPE tables of a whole context."""
    blocks = _blocks(config, options, ctx_size)
    pools = cache_bytes(
        config,
        format=options.kv_format,
        ctx_size=ctx_size,
        blocks=blocks,
        policy=options.eviction,
    )
    pools -= _spilled_bytes(config, options, blocks)
    return pools + sum(8 * len(rope.inv_freq) * ctx_size for rope in config.ropes)


def _spilled_bytes(config: ModelConfig, options: EngineOptions, blocks: int) -> int:
    if options.kv_spill is None:
        return 0
    return sealed_pool_bytes(config, format=options.kv_format, blocks=blocks)


def _blocks(config: ModelConfig, options: EngineOptions, ctx_size: int) -> int:
    """Return the blocks of each pool.

    Raises:
        OptionError: they do not hold one context.
    """
    both = context_blocks(config, ctx_size, format=options.kv_format, policy=options.eviction)
    if options.cache_size is None:
        return both
    least = min(ctx_size, (both // 2 - 1) * BLOCK)  # fewer with a budget
    if options.cache_size < least:
        raise OptionError(
            f"`cache_size` is {options.cache_size}; it must hold {least} tokens of one session"
        )
    return pool_blocks(options.cache_size)


def _mib(count: int) -> int:
    return count >> 20
