"""Options with which a model is loaded: the user's choices, checked.

The back ends that follow from them on a machine are selected in `backends/selection.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict, get_args

from edgellm.backends.providers import CUDA, PROVIDERS
from edgellm.backends.registry import AUTO, CHUNKED, DECODE_BACKENDS, NATIVE, STEPS
from edgellm.backends.schedule import POLICIES, Policy
from edgellm.cache.eviction import (
    KV_POLICIES,
    LEAST_BUDGET,
    EvictionPolicy,
    KVPolicy,
    policy_of,
)
from edgellm.checks import check_choice, check_flag, check_number, check_path, check_text
from edgellm.errors import OptionError
from edgellm.kernels.kv_blocks import (
    KV_FORMATS,
    LEAST_MASS,
    MASS_FORMAT,
    ROW_FORMATS,
    SEALED,
    KVFormats,
    format_text,
    formats_of,
    seals,
)
from edgellm.kernels.sealed_blocks import CHOSEN_FORMATS, LEAST_READ, MOST_READ

# Value of `draft` with which neither another model nor the model's own head drafts.
NO_DRAFT = "none"
# Largest number of tokens of a draft.
MOST_DRAFTED = 63
_MOST_STRETCHED = 64
__all__ = [
    "DECODE_BACKENDS",
    "KV_FORMATS",
    "KV_POLICIES",
    "MOST_DRAFTED",
    "NO_DRAFT",
    "POLICIES",
    "POOLING",
    "PREFILL_PRECISIONS",
    "SCHEDULING",
    "EngineArguments",
    "EngineOptions",
    "Pooling",
    "Scheduling",
]

Scheduling = Literal["stall_free", "layered", "serial", "two_devices"]
SCHEDULING: tuple[str, ...] = get_args(Scheduling)
# Embedding of a text: the mean of its tokens' states, or the last state.
Pooling = Literal["mean", "last"]
POOLING: tuple[str, ...] = get_args(Pooling)
PREFILL_PRECISIONS = tuple(dict.fromkeys(f for p in PROVIDERS.values() for f in p.precisions))


class EngineArguments(TypedDict, total=False):
    """The fields of `EngineOptions` as keyword arguments."""

    precision: str | None
    decode: str
    prefill: str
    kv_format: KVFormats
    kv_bits: float | None
    kv_read: int | None
    kv_budget: int | None
    kv_policy: KVPolicy
    kv_spill: str | Path | None
    prefill_mass: float | None
    ctx_size: int | None
    rope_scale: float | None
    cache_size: int | None
    memory_limit_bytes: int | None
    threads: int | None
    schedule: Policy | None
    scheduling: Scheduling
    time_target_ms: float
    decode_slowdown: float
    provider_options: Mapping[str, str]
    allow_fallback: bool
    kv_cache_dir: str | Path | None
    kv_cache_bytes: int
    draft: str | None
    draft_tokens: int
    draft_p_min: float
    expert_memory: int | None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options with which a model is loaded.

    Attributes:
        precision: precision of the graphs that prefill runs. None: that of the native kernels where
            they run prefill, else the provider's first precision that can compute the model (see
            `providers.py`, `precision_support.py`); on a CPU that does not multiply int8 exactly
            (see `int8_support.py`), float32.
        decode: back end of decode: `native` (int4 in C++), `triton` (int4 in Triton kernels on a
            GPU), `portable` (int4 in ONNX Runtime), `reference` (float32), `chunked` (the execution
            provider of prefill: decoded tokens ride in its chunks, beside rows of prompts), or
            `auto`: triton where there is a GPU with room for the model, else native where the
            kernels were built, else portable; `LLM.notes` says where the GPU has no room.
        prefill: back end of prefill: `native`, `triton`, an execution provider, or `auto`: that of
            decode where it is native or triton and no precision was asked for, else the CPU
            provider. When a model is loaded, an accelerator takes the place of native if it is
            known to be faster (see `auto_backend.py`).
        kv_format: format of K and V in the KV cache. k8v4, k4v4 and k4v2 pack blocks of 128 tokens
            once two later ones have begun; layers with windows or latents have int8 beside them.
            Native kernels have them, and Triton's where `decode` or `prefill` names these. What
            stays of a context that shifts is computed again. Or a tuple of the packed format of
            each layer that attends to all positions.
        kv_bits: bits of a number in packed blocks, such as 4.25, on average with the scales: each
            layer gets k8v4, k4v4 or k4v2, the more bits the more it loses without them. Losses
            are measured when they are first needed, for some minutes, and kept with the model.
            Native kernels alone; `kv_format` is left out then. None: as `kv_format` says.
        kv_read: with k4v4 and k4v2 and the native kernels, tokens that each token of an answer
            reads at most of its context, in whole blocks: the first, the last two, and the packed
            ones that matter most to it, in each layer but the first two; behind 8,576 tokens, of
            those that mattered to one of the last 16. Prompts read all, and nothing is forgotten.
            What an answer has computed so is for its own session alone. None: all.
        kv_budget: tokens that a sequence holds at most in layers that see all positions, with the
            native kernels alone and formats that pack no blocks. The others are forgotten, and what
            stays of a context that shifts is computed again. None: all.
        kv_policy: which ones stay. sinks: the first block of 128 tokens, and the last ones.
        kv_spill: with k8v4, k4v4 and k4v2, folder on a disk where the packed blocks lie in a file
            of their full size, for contexts larger than memory: the system writes blocks out when
            memory is short, and reads them back. The answers are the same, and the file is gone
            when the process ends. None: they are in memory.
        prefill_mass: with int8 and the native kernels, share of the attention that a block of 128
            tokens of a prompt keeps from token 4,096 on, such as 0.99: each head reads the first
            block, itself, the one before, and those others, 16 at a time, that take most of it.
            What is left over behind the last whole block of a prompt, and answers, read all, and
            are for their own session alone. None: all read all.
        ctx_size: tokens of one session; 0: the model's own number. None: the model's own number as
            far as a full KV cache takes a quarter of the memory at most, and half of what is free;
            at most 4096 where the cache is on a GPU.
        rope_scale: factor by which RoPE is stretched for contexts longer than the model was trained
            for, by YaRN (arXiv:2309.00071), such as 4. Short texts lose a little by it. None: RoPE
            stays as the model has it.
        cache_size: tokens that the shared pool holds for all sessions, those of one at least; None:
            those of two. A session has up to `ctx_size`, or `kv_budget` of them.
        memory_limit_bytes: memory of which the KV cache takes a quarter where `ctx_size` is None;
            None: the machine's.
        threads: CPU threads of the process, see `thread_pool.py`; None: all usable cores.
        schedule: policy with which chunks share the accelerator and the host (see `schedule.py`);
            None: `out-of-order` on an accelerator and `serial` on CPU and CUDA. With another policy
            than `serial` on CPU, the CPU provider plays the accelerator on all cores but one, which
            is the host's.
        scheduling: scheduling of answers that are on their way at once. stall_free: all answers
            that have begun go on in each step, and new prompts get the time that `time_target_ms`
            leaves. layered: as stall_free, but a long prompt goes through a few of the layers in
            each step, with up to 512 tokens at once, and not through all layers with fewer tokens;
            not where the prompt's KV cache is on a GPU. serial: one answer after the other, each as
            fast as it can be. The answers are the same with these three.
            two_devices: all prompts on the execution provider of `prefill`, while native kernels
            decode; the provider's arithmetic differs from theirs, and is the same under any load.
            Where one processor is for both, stall_free takes its place, and `LLM.notes` says why.
        time_target_ms: with stall_free and layered, time that a step may take, and so the gap
            between the pieces of a stream while other answers begin. With two_devices, time for
            which a prompt is computed before another prompt may pass it.
        decode_slowdown: with two_devices, largest time of decode beside prompts, on average, as a
            multiple of its time alone; prompts wait in between where it would be larger.
        provider_options: the execution provider's own options, by their names.
        allow_fallback: whether the CPU runs nodes that the provider does not take, instead of an
            error.
        kv_cache_dir: folder in which computed blocks are kept, for other and later processes.
        kv_cache_bytes: largest size of the folder; blocks not used for longest are deleted.
        draft: smaller model of the same vocabulary, named as for `load`, that guesses tokens ahead
            where that is faster; the answers are the same. It has a KV cache of its own, unless it
            is an assistant made for the model. None: the model's own head that predicts further
            tokens guesses, if it has one; "none": it does not, and only earlier tokens tell what
            may follow.
        draft_tokens: largest number of tokens that the draft model or the head guesses for a step.
        draft_p_min: probability of its best token below which either guesses no further.
        expert_memory: bytes of experts that stay in memory, those that were used last; the others
            are read from the disk when they are used. The answers are the same. None: all experts
            stay as far as the system lets them. A step of many rows may go beyond it by the experts
            of one layer.
    """

    precision: str | None = None
    decode: str = AUTO
    prefill: str = AUTO
    kv_format: KVFormats = "int8"
    kv_bits: float | None = None
    kv_read: int | None = None
    kv_budget: int | None = None
    kv_policy: KVPolicy = "sinks"
    kv_spill: str | Path | None = None
    prefill_mass: float | None = None
    ctx_size: int | None = None
    rope_scale: float | None = None
    cache_size: int | None = None
    memory_limit_bytes: int | None = None
    threads: int | None = None
    schedule: Policy | None = None
    scheduling: Scheduling = "stall_free"
    time_target_ms: float = 100
    decode_slowdown: float = 1.1
    provider_options: Mapping[str, str] = field(default_factory=dict)
    allow_fallback: bool = False
    kv_cache_dir: str | Path | None = None
    kv_cache_bytes: int = 4 << 30
    draft: str | None = None
    draft_tokens: int = 3
    draft_p_min: float = 0.5
    expert_memory: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            OptionError: a value that is not allowed.
        """
        if isinstance(self.kv_format, list):  # of a configuration file
            object.__setattr__(self, "kv_format", tuple(self.kv_format))
        self._check_values()
        if self.prefill == CUDA and self.schedule not in (None, "serial"):
            raise OptionError(
                f"`schedule` is {self.schedule!r}: with `prefill` cuda the host has no part; "
                "leave it out"
            )
        if self.decode == CHUNKED and self.prefill in STEPS:
            raise OptionError(
                f"`decode` is 'chunked' and `prefill` {self.prefill!r}, which has no chunks; take "
                f"an execution provider as `prefill`, or {self.prefill} as `decode`"
            )
        if self.draft is not None and self.decode not in (AUTO, NATIVE):
            raise draft_refused(self.draft, self.decode)
        self._check_precision()

    def _check_values(self) -> None:
        formats = formats_of(self.kv_format)
        for format in formats:
            several = isinstance(self.kv_format, tuple)
            check_choice("kv_format", format, SEALED if several else KV_FORMATS)
        packs = seals(self.kv_format) or self.kv_bits is not None
        if self.kv_bits is not None:
            check_number("kv_bits", self.kv_bits, 1, 16)
            if self.kv_format != "int8":
                raise OptionError(
                    f"`kv_bits` is {self.kv_bits} and `kv_format` {self.kv_text!r}: bits choose "
                    "the formats; leave out one of the two"
                )
        if self.kv_read is not None:
            check_number("kv_read", self.kv_read, LEAST_READ, MOST_READ, whole=True)
            if self.kv_bits is None and not set(formats) <= {*CHOSEN_FORMATS}:
                raise OptionError(
                    f"`kv_read` is {self.kv_read} and `kv_format` {self.kv_text!r}: blocks that "
                    f"matter are told by {' and '.join(CHOSEN_FORMATS)} alone; take one of them, "
                    "or leave out `kv_read`"
                )
        check_choice("kv_policy", self.kv_policy, KV_POLICIES)
        if self.kv_budget is not None:
            check_number("kv_budget", self.kv_budget, LEAST_BUDGET, whole=True)
            if packs:
                raise OptionError(
                    f"`kv_budget` is {self.kv_budget}, `kv_format` {self.kv_text!r} and `kv_bits` "
                    f"{self.kv_bits}: what is packed is not forgotten; take one of "
                    f"{', '.join(ROW_FORMATS)}, and no `kv_bits`"
                )
        if self.kv_spill is not None:
            check_path("kv_spill", self.kv_spill)
            if not packs:
                raise OptionError(
                    f"`kv_spill` is {str(self.kv_spill)!r} and `kv_format` {self.kv_format!r}: "
                    f"packed blocks alone lie in a file; take one of {', '.join(SEALED)}, or leave "
                    "out `kv_spill`"
                )
        if self.prefill_mass is not None:
            check_number("prefill_mass", self.prefill_mass, LEAST_MASS, 1)
            if packs or self.kv_format != MASS_FORMAT or self.kv_budget is not None:
                raise OptionError(
                    f"`prefill_mass` is {self.prefill_mass}, `kv_format` {self.kv_text!r}, "
                    f"`kv_bits` {self.kv_bits} and `kv_budget` {self.kv_budget}: blocks tell their "
                    f"share of the attention in {MASS_FORMAT} alone, where none is left out; take "
                    "that without `kv_budget` and `kv_bits`, or leave out `prefill_mass`"
                )
        check_choice("decode", self.decode, DECODE_BACKENDS)
        check_text("prefill", self.prefill)
        check_flag("allow_fallback", self.allow_fallback)
        if self.kv_cache_dir is not None:
            check_path("kv_cache_dir", self.kv_cache_dir)
        check_number("kv_cache_bytes", self.kv_cache_bytes, 1 << 20, whole=True)
        if self.draft is not None:
            check_text("draft", self.draft)
        check_number("draft_tokens", self.draft_tokens, 1, MOST_DRAFTED, whole=True)
        check_number("draft_p_min", self.draft_p_min, 0, 1)
        if self.schedule is not None:
            check_choice("schedule", self.schedule, POLICIES)
        check_choice("scheduling", self.scheduling, SCHEDULING)
        check_number("time_target_ms", self.time_target_ms, 1, 60_000)
        check_number("decode_slowdown", self.decode_slowdown, 1.01, 100)
        if self.ctx_size is not None:
            check_number("ctx_size", self.ctx_size, 0, whole=True)
        if self.rope_scale is not None:
            check_number("rope_scale", self.rope_scale, 1, _MOST_STRETCHED)
        if self.cache_size is not None:
            check_number("cache_size", self.cache_size, 1, whole=True)
        if self.memory_limit_bytes is not None:
            check_number("memory_limit_bytes", self.memory_limit_bytes, 1, 1 << 60, whole=True)
        if self.expert_memory is not None:
            check_number("expert_memory", self.expert_memory, 1, 1 << 60, whole=True)
        if self.threads is not None:
            check_number("threads", self.threads, 1, 1024, whole=True)
        if not isinstance(self.provider_options, Mapping):
            raise OptionError(
                f"`provider_options` is {self.provider_options!r}; a dict of texts is expected"
            )

    @property
    def kv_text(self) -> str:
        """Name of the KV format; of several, how many layers have each."""
        return format_text(self.kv_format)

    @property
    def eviction(self) -> EvictionPolicy | None:
        """Policy of what stays in the KV cache; None: all does."""
        return policy_of(self.kv_policy, self.kv_budget)

    def _check_precision(self) -> None:
        allowed = PREFILL_PRECISIONS
        if self.prefill in PROVIDERS:
            allowed = PROVIDERS[self.prefill].precisions
        elif self.prefill in STEPS:
            allowed = ()
        if self.precision is not None and self.precision not in allowed:
            raise OptionError(
                f"`precision` is {self.precision!r}; allowed with `prefill` {self.prefill} are "
                + (", ".join(allowed) or "none, the kernels have their own")
            )


def draft_refused(draft: str, decode: str) -> OptionError:
    return OptionError(
        f"`draft` is {draft!r} and `decode` {decode}, whose rows differ with their number; "
        f"drafts are checked with `decode` {NATIVE}: take that, or leave out `draft`"
    )
