"""A loaded model: everything that sessions share."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from edgellm import memory, thread_pool
from edgellm.bundle import CHAT_TEMPLATE, Bundle
from edgellm.decode import DecodeBackend, PortableDecoder
from edgellm.errors import OptionError
from edgellm.forward import Model
from edgellm.int8_support import int8_products_are_exact
from edgellm.kernels import rope
from edgellm.kernels.kv_blocks import KVFormat
from edgellm.kv_cache import KVCache, blocks_for, cache_bytes, check_format
from edgellm.prefill import PrefillExecutor
from edgellm.providers import choose
from edgellm.segments import Head, Segments
from edgellm.template import ChatTemplate
from edgellm.tokenizer import Tokenizer

DEFAULT_CTX_SIZE = 4096


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is loaded.

    Attributes:
        flavour: precision of prefill; None takes int8 where this CPU multiplies it exactly (see
            `int8_support.py`), else float32.
        decode: `auto`, `portable` (int4) or `reference` (float32).
        prefill: execution provider, or `auto`.
        kv_format: how the KV cache is stored.
        ctx_size: tokens of one session; None is the model's own, at most 4096; 0 the model's own.
        cache_size: tokens that the shared pool holds for all sessions; None is twice `ctx_size`.
        threads: CPU threads of the process, see `thread_pool.py`; None takes all usable cores.
    """

    flavour: str | None = None
    decode: str = "auto"
    prefill: str = "auto"
    kv_format: KVFormat = "int8"
    ctx_size: int | None = None
    cache_size: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            OptionError: a value that is not allowed.
        """
        check_format(self.kv_format)
        if self.flavour not in (None, "w8a8", "f32"):
            raise OptionError(f"flavour {self.flavour!r}: allowed are w8a8 and f32")
        if self.decode not in ("auto", "portable", "reference"):
            raise OptionError(f"decode {self.decode!r}: allowed are auto, portable and reference")
        if self.ctx_size is not None and self.ctx_size < 0:
            raise OptionError(
                f"ctx_size is {self.ctx_size}; allowed is 0 (the model's own) or more"
            )
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise OptionError(f"threads is {self.threads}; allowed is 1 to 1024")

    @property
    def prefill_flavour(self) -> str:
        if self.flavour is not None:
            return self.flavour
        return "w8a8" if int8_products_are_exact() else "f32"

    @property
    def decode_flavour(self) -> str:
        return "f32" if self.decode == "reference" else "int4"

    @property
    def flavours(self) -> set[str]:
        return {self.prefill_flavour, self.decode_flavour}


class Engine:
    """Prefill and decode over one KV cache.

    Steps of different sessions take turns under `lock`: they share buffers.
    """

    def __init__(self, bundle: Bundle, options: EngineOptions) -> None:
        self.bundle = bundle
        self.options = options
        self.config = bundle.config
        self.lock = threading.Lock()
        self.ctx_size = _ctx_size(options, self.config.context_length)
        memory.check_fits(planned_memory(bundle, options))
        self.tokenizer = Tokenizer(bundle.path, bundle.manifest.tokenizer)
        self.template = _template(bundle, self.tokenizer)
        self.cache = KVCache(
            self.config,
            format=options.kv_format,
            ctx_size=self.ctx_size,
            blocks=_cache_blocks(options, self.ctx_size),
            fingerprint=f"{bundle.manifest.files}{options.kv_format}".encode(),
        )
        self.threads = thread_pool.start(options.threads)
        models = self._models(choose(options.prefill))
        self.prefill = PrefillExecutor(
            models[options.prefill_flavour], flavour=options.prefill_flavour
        )
        self.decoder: DecodeBackend = PortableDecoder(
            models[options.decode_flavour], flavour=options.decode_flavour
        )

    def _models(self, provider: str) -> dict[str, Model]:
        """The flavours in use; one that serves prefill and decode is opened once."""
        table = rope.table(self.config.inv_freq, self.ctx_size)
        kinds = {self.bundle.flavour(f).head for f in self.options.flavours}
        heads = {kind: Head(self.bundle, kind) for kind in kinds}
        models = {}
        for flavour in sorted(self.options.flavours):
            runs_prefill = flavour == self.options.prefill_flavour
            segments = Segments(
                self.bundle,
                flavour,
                provider=provider if runs_prefill else "cpu",
                threads=self.threads,
            )
            models[flavour] = Model(
                segments, heads[self.bundle.flavour(flavour).head], table, threads=self.threads
            )
        return models


def planned_memory(bundle: Bundle, options: EngineOptions) -> memory.MemoryEstimate:
    """What a model loaded with these options will take when its cache is full."""
    blocks = _cache_blocks(options, _ctx_size(options, bundle.config.context_length))
    return memory.estimate(
        bundle,
        flavours=options.flavours,
        kv_cache_bytes=cache_bytes(bundle.config, format=options.kv_format, blocks=blocks),
    )


def _ctx_size(options: EngineOptions, trained: int) -> int:
    if options.ctx_size is None:
        return min(DEFAULT_CTX_SIZE, trained)
    if options.ctx_size > trained:
        raise OptionError(
            f"ctx_size is {options.ctx_size}; this model was trained for at most {trained}"
        )
    return options.ctx_size or trained


def _cache_blocks(options: EngineOptions, ctx_size: int) -> int:
    if options.cache_size is None:
        return 2 * blocks_for(ctx_size)
    if options.cache_size < ctx_size:
        raise OptionError(
            f"cache_size is {options.cache_size}; it must hold one session of {ctx_size} tokens"
        )
    return blocks_for(options.cache_size)


def _template(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate | None:
    path = bundle.path / CHAT_TEMPLATE
    if not path.exists():
        return None
    end = tokenizer.eos[0] if tokenizer.eos else None
    return ChatTemplate(path.read_text(encoding="utf-8"), bos=tokenizer.bos, eos=end)
