"""A loaded model: everything that sessions share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.backends import thread_pool
from edgellm.backends.decode import DecodeBackend, SegmentDecoder, StepDecoder
from edgellm.backends.forward import Model
from edgellm.backends.host_attention import HostAttention, head_norms, rope_tables
from edgellm.backends.native_model import NativeModel
from edgellm.backends.packed_weights import open_packed_weights
from edgellm.backends.providers import CPU, CUDA, NATIVE, TRITON
from edgellm.backends.segments import Head, ModelHead, Segments
from edgellm.backends.selection import select
from edgellm.backends.self_test import check_once
from edgellm.backends.step_model import StepModel
from edgellm.cache.disk_cache import DiskCache
from edgellm.cache.kv_cache import KVCache, blocks_for, cache_bytes
from edgellm.engine import memory
from edgellm.engine.costs import load_or_measure
from edgellm.engine.prefill import ChunkedPrefill, Prefill, StepPrefill
from edgellm.errors import OptionError, UnsupportedModelError
from edgellm.graphs.contract import WEIGHTS_FILE
from edgellm.kernels.gpu.device import require
from edgellm.kernels.kv_blocks import LAYOUT_VERSION
from edgellm.kernels.linear import PANEL
from edgellm.kernels.native import MAX_HEAD_DIM, isa, library
from edgellm.kernels.rope import RopeTable
from edgellm.options import EngineOptions
from edgellm.progress import ProgressCallback
from edgellm.store import key_basis
from edgellm.store.bundle import CHAT_TEMPLATE, PACKED, Bundle
from edgellm.text.template import ChatTemplate
from edgellm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgellm.backends.triton_model import TritonModel  # imports torch

DEFAULT_CTX_SIZE = 4096


class Engine:
    """Prefill and decode over one KV cache.

    `selection` says which back ends it has, `precisions` in which precisions.
    `native_prefill` is there beside an accelerator's `prefill` where decode is native.

    Steps of different sessions take turns under `lock`: they share buffers and the cache.
    """

    def __init__(
        self,
        bundle: Bundle,
        options: EngineOptions,
        *,
        tails_only: bool = True,
        progress: ProgressCallback | None = None,
    ) -> None:
        """`tails_only`: see `ChunkedPrefill`; `progress` is called while graphs are compiled for an
        accelerator."""
        self.bundle = bundle
        self.options = options
        self.config = bundle.config
        self.ctx_size = _ctx_size(options, self.config.context_length)
        self.selection = select(options)
        self.precisions = self.selection.precisions(self.config)
        memory.check_fits(planned_memory(bundle, options, self.precisions))
        self.tokenizer = Tokenizer(
            bundle.path, bundle.manifest.tokenizer, rows=self.config.vocab_size
        )
        self.template = _template(bundle, self.tokenizer)
        self.cache = KVCache(
            self.config,
            format=options.kv_format,
            ctx_size=self.ctx_size,
            blocks=_cache_blocks(options, self.ctx_size),
            key_offset=key_basis.open_key_basis(bundle.path, bundle.manifest.keys).offset,
            fingerprint=f"{self.fingerprint}|{self.arithmetic}".encode(),
        )
        self.lock = self.cache.lock
        if options.kv_cache_dir is not None:
            self.cache.disk = DiskCache(
                Path(options.kv_cache_dir), budget=options.kv_cache_bytes, blocks=self.cache.blocks
            )
        graphs = self.precisions - {PACKED}
        spare = int(self.selection.shares_cpu)
        self.threads = thread_pool.size(options.threads)
        if graphs:
            self.threads = thread_pool.start(options.threads, spare=spare)
        ropes = rope_tables(self.config, self.ctx_size)
        decode, prefill = self.selection.decode, self.selection.prefill
        native = self._native_model(ropes) if NATIVE in (decode, prefill) else None
        self.native_prefill = None if native is None else StepPrefill(native, name=NATIVE)
        steps: dict[str, StepModel] = {} if native is None else {NATIVE: native}
        head: ModelHead | None = None if native is None else native.head
        if TRITON in (decode, prefill):
            steps[TRITON] = head = self._triton_model(ropes)
        models = self._segment_models(sorted(graphs), ropes, head, progress)
        self.decoder: DecodeBackend
        if decode in steps:
            self.decoder = StepDecoder(steps[decode], name=decode)
        else:
            precision = self.selection.decode_precision
            self.decoder = SegmentDecoder(models[precision], name=decode, precision=precision)
        self.prefill: Prefill
        if prefill in steps:
            self.prefill = StepPrefill(steps[prefill], name=prefill)
        else:
            model = models[self.selection.prefill_precision(self.config)]
            # a precision that was asked for is not mixed with another one
            mixed = bool(steps) and options.precision is None
            step = self.decoder if mixed else None
            costs = load_or_measure(bundle.path, model, step, self.cache, threads=self.threads)
            self.prefill = ChunkedPrefill(
                model,
                self.decoder,
                costs,
                policy=self.selection.policy,
                tails_only=tails_only,
            )

    @property
    def fingerprint(self) -> str:
        """Of the weights and of how K and V are stored: whose KV cache fits."""
        manifest = self.bundle.manifest
        values = (
            f"{manifest.source_sha256 or manifest.files}{self.options.kv_format}/{LAYOUT_VERSION}"
            f"{key_basis.fingerprint(manifest)}"
        )
        return hashlib.sha256(values.encode()).hexdigest()

    @property
    def arithmetic(self) -> str:
        """What else K and V depend on: another back end's are near, and not the same bits."""
        files = (f"{precision}/{WEIGHTS_FILE}" for precision in sorted(self.precisions))
        weights = (self.bundle.manifest.files[file].sha256 for file in files)
        backends = (self.selection.prefill, self.selection.decode)
        return "|".join((*backends, str(isa()), *weights))

    def _native_model(self, ropes: Sequence[RopeTable]) -> NativeModel:
        compiled = library()
        assert compiled is not None
        if self.config.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"head_dim is {self.config.head_dim}; the native kernels take at most "
                f"{MAX_HEAD_DIM}. Take `decode` portable and `prefill` cpu"
            )
        if self.config.kv_size % PANEL:
            raise UnsupportedModelError(
                f"kv_heads * head_dim is {self.config.kv_size}; the native kernels take multiples "
                f"of {PANEL}. Take `decode` portable and `prefill` cpu"
            )
        return NativeModel(compiled, open_packed_weights(self.bundle), ropes, threads=self.threads)

    def _triton_model(self, ropes: Sequence[RopeTable]) -> TritonModel:
        device = require()
        from edgellm.backends.triton_model import TritonModel  # imports torch and triton

        return TritonModel(open_packed_weights(self.bundle), ropes, self.cache, device=device)

    def _segment_models(
        self,
        precisions: Sequence[str],
        ropes: Sequence[RopeTable],
        int8_head: ModelHead | None,
        progress: ProgressCallback | None,
    ) -> dict[str, Model]:
        """The precisions in use that are graphs; one that serves both ends is opened once."""
        heads: dict[str, ModelHead] = {}
        for kind in {self.bundle.precision(f).head for f in precisions}:
            assert kind is not None
            own = int8_head if kind == "int8" else None
            heads[kind] = own or Head(self.bundle, kind)
        norms = key_basis.open_head_norms(self.bundle.path, self.bundle.manifest.keys)
        weights = head_norms(self.config, norms.__getitem__)
        attention = HostAttention(self.config, ropes, weights)
        models = {}
        for precision in precisions:
            head = heads[self.bundle.precision(precision).head or ""]
            runs_prefill = precision == self.selection.prefill_precision(self.config)
            if runs_prefill and self.selection.prefill == CUDA:
                models[precision] = self._device_model(precision, attention, head)
                continue
            segments = Segments(
                self.bundle,
                precision,
                provider=self.selection.prefill if runs_prefill else CPU,
                threads=self.threads,
                provider_options=self.options.provider_options if runs_prefill else {},
                allow_fallback=self.options.allow_fallback,
                progress=progress,
            )
            check_once(self.bundle, segments, progress)
            on_one = runs_prefill and self.selection.shares_cpu
            threads = 1 if on_one else self.threads
            models[precision] = Model(segments, head, attention, threads=threads)
        return models

    def _device_model(self, precision: str, attention: HostAttention, head: ModelHead) -> Model:
        device = require()
        from edgellm.backends.device_model import (  # imports torch
            DeviceModel,
            DeviceSegments,
            Queue,
        )

        queue = Queue(device)
        segments = DeviceSegments(
            self.bundle,
            precision,
            queue=queue,
            threads=self.threads,
            provider_options=self.options.provider_options,
            allow_fallback=self.options.allow_fallback,
        )
        replica = self.cache.on_device(device)
        return DeviceModel(segments, head, attention, replica=replica, queue=queue)


def planned_memory(
    bundle: Bundle, options: EngineOptions, precisions: set[str]
) -> memory.MemoryEstimate:
    """What a model loaded with these options, in these precisions, will take when its cache is
    full."""
    blocks = _cache_blocks(options, _ctx_size(options, bundle.config.context_length))
    return memory.estimate(
        bundle,
        precisions=precisions,
        kv_cache_bytes=cache_bytes(bundle.config, format=options.kv_format, blocks=blocks),
    )


def _ctx_size(options: EngineOptions, trained: int) -> int:
    if options.ctx_size is None:
        return min(DEFAULT_CTX_SIZE, trained)
    if options.ctx_size > trained:
        raise OptionError(
            f"`ctx_size` is {options.ctx_size}; this model was trained for at most {trained}"
        )
    return options.ctx_size or trained


def _cache_blocks(options: EngineOptions, ctx_size: int) -> int:
    if options.cache_size is None:
        return 2 * blocks_for(ctx_size)
    if options.cache_size < ctx_size:
        raise OptionError(
            f"`cache_size` is {options.cache_size}; it must hold one session of {ctx_size} tokens"
        )
    return blocks_for(options.cache_size)


def _template(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate | None:
    path = bundle.path / CHAT_TEMPLATE
    if not path.exists():
        return None
    end = tokenizer.eos[0] if tokenizer.eos else None
    return ChatTemplate(path.read_text(encoding="utf-8"), bos=tokenizer.bos, eos=end)
