"""A loaded model: everything that sessions share."""

from __future__ import annotations

import hashlib
import json
import threading
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.backends import thread_pool
from edgellm.backends.batch import Backend, StepBackend
from edgellm.backends.chunked_backend import ChunkedBackend, TokenBackend
from edgellm.backends.host_attention import rope_tables
from edgellm.backends.opening import Graphs, Steps, open_models
from edgellm.backends.registry import CHUNKED
from edgellm.backends.selection import Parts, select
from edgellm.cache.disk_cache import DiskCache, WriteBehind
from edgellm.cache.groups import DRAFT_STATES, cache_groups, rope_frequencies, shortlists
from edgellm.cache.kv_cache import KVCache
from edgellm.engine import memory
from edgellm.engine.adapters import Adapters
from edgellm.engine.costs import load_or_measure
from edgellm.engine.draft_policy import DraftSource
from edgellm.engine.prompt_lookup import TokenTable
from edgellm.engine.thread import EngineThread
from edgellm.errors import TemplateError
from edgellm.graphs.contract import WEIGHTS_FILE
from edgellm.kernels.experts import ExpertMemory
from edgellm.kernels.kv_blocks import LAYOUT_VERSION
from edgellm.kernels.native import isa
from edgellm.kernels.sealed_blocks import Shortlists
from edgellm.machine import usable_cores
from edgellm.options import EngineOptions
from edgellm.progress import ProgressCallback
from edgellm.store import key_basis
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import CHAT_TEMPLATE, FORMAT_VERSION, PACKED
from edgellm.text.grammar import Grammars
from edgellm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgellm.text.template import ChatTemplate


class LoadedModel:
    """A model with back ends for prefill and decode over one KV cache.

    `selection` names its back ends, `precisions` their precisions; `scheduling` is the one in use.
    Where decode is chunked, `decoder` is `prefill` itself. Once the model is loaded, `thread` alone
    computes steps and changes the cache. `adapters` are those that its answers may name.
    `draft_model` drafts for its answers, if one was asked for or the model has a head that can;
    `token_table` drafts what answers had before (None: it does not).
    """

    def __init__(
        self,
        bundle: Bundle,
        options: EngineOptions,
        *,
        draft: Bundle | None = None,
        adapters: int = 0,
        thread: EngineThread | None = None,
        tails_only: bool = True,
        why_cpu: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Open the back ends.

        Args:
            draft: bundle of the draft model that is to have memory beside it.
            adapters: bytes of adapters that are to have memory beside it.
            thread: thread that computes; None: one of its own.
            tails_only: see `ChunkedBackend`.
            why_cpu: see `prepare_for`.
            progress: told while graphs are compiled for an accelerator.
        """
        self.bundle = bundle
        self._why_cpu = why_cpu
        self.options = options
        self.config = bundle.config
        self.selection = select(options, self.config)
        self.scheduling = self.selection.scheduling(options.scheduling)
        self.precisions = self.selection.precisions(self.config)
        self.memory = memory.estimate(
            bundle, options, self.selection, draft=draft, adapters=adapters
        )
        memory.check_fits(self.memory)
        self.ctx_size = self.memory.ctx_size
        self.tokenizer = Tokenizer(
            bundle.path, bundle.manifest.tokenizer, rows=self.config.vocab_size
        )
        self.draft_model: DraftSource | None = None
        self.token_table: TokenTable | None = TokenTable()
        self.thread = thread or EngineThread()
        self.written: WriteBehind | None = None
        self.cache = self._make_cache()
        if self.precisions == {PACKED}:
            self.threads = options.threads or usable_cores()
        else:  # ONNX Runtime's are started
            self.threads = thread_pool.start(options.threads, spare=int(self.selection.shares_cpu))
        steps, graphs = open_models(
            Parts(
                bundle=bundle,
                options=options,
                selection=self.selection,
                cache=self.cache,
                ropes=rope_tables(self.config, self.ctx_size),
                threads=self.threads,
                progress=progress,
            )
        )
        host, chunked = self._open_host(steps, graphs), self.selection.decode == CHUNKED
        self.prefill = self._make_prefill(steps, graphs, host, tails_only=tails_only)
        self.decoder = host if host is not None and not chunked else self.prefill
        self.adapters = Adapters(bundle, prefill=self.prefill, decoder=self.decoder)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Chat template; None if the model has none.

        Raises:
            TemplateError: the template is broken.
        """
        return open_template(self.bundle, self.tokenizer)

    @property
    def expert_memory(self) -> ExpertMemory | None:
        """Experts in memory, where there is a limit for them; else None."""
        decoder = self.decoder
        return decoder.expert_memory if isinstance(decoder, StepBackend) else None

    @property
    def fallbacks(self) -> list[str]:
        """Notes on a back end and a scheduling in the place of others, and on vain options."""
        notes = [] if self._why_cpu is None else [self._why_cpu]
        used, asked = self.scheduling, self.options.scheduling
        if used != asked:
            notes.append(f"scheduling {used}, not {asked}: {self.selection.one_processor}")
        if self.options.kv_budget is not None and self.cache.policy is None:
            notes.append("`kv_budget` has no effect: no layer sees all positions")
        windows = (each.window for each in self.config.attentions.values())
        if self.options.prefill_mass is not None and None not in windows:
            notes.append("`prefill_mass` has no effect: no layer sees all positions")
        if self.options.expert_memory is not None and not self.config.has_experts:
            notes.append("`expert_memory` has no effect: the model has no experts")
        elif self.options.expert_memory is not None and self.expert_memory is None:
            notes.append(f"`expert_memory` has no effect with decode {self.decoder.name}")
        return notes

    @property
    def recomputes_exactly(self) -> bool:
        """Whether tokens sampled one by one have the same bits when computed as a prompt."""
        return self.prefill is self.decoder and self.decoder.exact_rows

    @property
    def fingerprint(self) -> str:
        """Digest of the model and the storage of K and V; equal where KV caches fit each other."""
        manifest = self.bundle.manifest
        values = (
            f"{manifest.source_sha256 or manifest.files}{self.options.kv_format}/{LAYOUT_VERSION}"
            f"{self.options.eviction or ''}{self.options.prefill_mass or ''}"
            f"{json.dumps(manifest.config.to_json(), sort_keys=True)}/{FORMAT_VERSION}"
            f"{key_basis.fingerprint(manifest)}"
        )
        return hashlib.sha256(values.encode()).hexdigest()

    @property
    def arithmetic(self) -> str:
        """Back ends, kernels and weights of K and V; others give near values, not the same bits."""
        files = (f"{precision}/{WEIGHTS_FILE}" for precision in sorted(self.precisions))
        weights = (self.bundle.manifest.files[file].sha256 for file in files)
        backends = (self.selection.prefill, self.selection.decode)
        return "|".join((*backends, str(isa()), *weights))

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars over the model's vocabulary, for schemas and tools.

        Raises:
            OptionError: llguidance cannot be imported.
        """
        return Grammars(self.tokenizer)

    @cached_property
    def state_steps(self) -> float:
        """Plain steps that keeping the states after one more row takes as long as, about."""
        states = 2 * self.cache.state_bytes  # a write reads its cache lines first
        return states / (memory.token_bytes(self.bundle) + states)

    def shortlists(self) -> Shortlists:
        """Allocate the shortlists of an answer, see `StepSpan`; none where all is read."""
        kv_read = self.options.kv_read
        if kv_read is None or kv_read > self.ctx_size:
            return ()
        return shortlists([group.group for group in self.cache.groups], kv_read)

    def _make_cache(self) -> KVCache:
        bundle, options = self.bundle, self.options
        basis = key_basis.open_key_basis(bundle.path, bundle.manifest.keys, self.config)
        cache = KVCache(
            cache_groups(self.config),
            format=options.kv_format,
            ctx_size=self.ctx_size,
            blocks=self.memory.blocks,
            policy=options.eviction,
            key_offsets=basis.offsets,
            rope_frequencies=rope_frequencies(self.config),
            fingerprint=f"{self.fingerprint}|{self.arithmetic}".encode(),
            drafts=DRAFT_STATES,
            defer=self.thread.soon,
            spill=None if options.kv_spill is None else Path(options.kv_spill),
        )
        self.thread.shares_file |= options.kv_spill is not None
        if options.kv_cache_dir is not None:
            disk = DiskCache(Path(options.kv_cache_dir), budget=options.kv_cache_bytes)
            cache.disk = self.written = WriteBehind(disk)
        return cache

    def _open_host(self, steps: Steps, graphs: Graphs) -> Backend | None:
        """Return the back end that works beside an execution provider; see `Selection.host`."""
        name = self.selection.host(self.config)
        precision = self.selection.host_precision(self.config)
        if name is None or precision is None:
            return None
        if name in steps:
            return steps[name]
        return TokenBackend(graphs[precision], name=name)

    def _make_prefill(
        self, steps: Steps, graphs: Graphs, host: Backend | None, *, tails_only: bool
    ) -> Backend:
        selection = self.selection
        name = selection.prefill
        if host is not None and name == host.name:
            return host
        if name in steps:
            return steps[name]
        model = graphs[selection.prefill_precision(self.config)]
        # a precision that was asked for is not mixed with another one, nor are two devices
        mixed = bool(steps) and self.options.precision is None
        mixed = mixed and self.scheduling != "two_devices"
        step = host if mixed and selection.decode != CHUNKED else None
        stop = threading.Event()
        costs = self.thread.call(
            lambda: load_or_measure(
                self.bundle.path, model, step, self.cache, threads=self.threads, stop=stop
            ),
            stop=stop,
        )
        return ChunkedBackend(
            model,
            host,
            costs,
            policy=self.selection.policy,
            tails_only=tails_only,
        )


def open_template(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template of a model; None if it has none.

    Raises:
        TemplateError: the template is broken, or no UTF-8 text.
    """
    from edgellm.text.template import ChatTemplate  # imports Jinja, 30 ms that only chats need

    path = bundle.path / CHAT_TEMPLATE
    if not path.exists():
        return None
    end = tokenizer.eos[0] if tokenizer.eos else None
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path}: {error}") from None
    return ChatTemplate(source, bos=tokenizer.bos, eos=end)
