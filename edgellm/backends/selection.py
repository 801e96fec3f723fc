"""Selection of the back ends and precisions that run a model on this machine, and their parts.

Only the selection probes the machine for back ends; options themselves are plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgellm.backends import providers
from edgellm.backends.providers import CPU, CUDA, PROVIDERS
from edgellm.backends.registry import (
    AUTO,
    CHUNKED,
    NATIVE,
    PORTABLE,
    REFERENCE,
    STEPS,
    TRITON,
)
from edgellm.backends.schedule import Policy
from edgellm.cache.kv_cache import KVCache
from edgellm.errors import OptionError, UnsupportedModelError
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.gpu import device
from edgellm.kernels.kv_blocks import ROW_FORMATS, seals
from edgellm.kernels.native import library
from edgellm.kernels.rope import RopeTable
from edgellm.options import PREFILL_PRECISIONS, EngineOptions, Scheduling
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import PACKED
from edgellm.store.precision_support import (
    STATIC,
    first_supported,
    needs_host,
    why_not,
    why_untried,
)
from edgellm.store.precision_support import require as require_support

_HOST_PRECISIONS = {PORTABLE: "int4", REFERENCE: "f32", NATIVE: PACKED, TRITON: PACKED}
# Options of the KV cache that the C++ kernels alone have, and what these do then.
_NATIVE_ALONE = {
    "kv_bits": "have a format for each layer",
    "kv_read": "choose the blocks to read",
    "kv_budget": "leave blocks out",
    "prefill_mass": "read a part of a prompt",
}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Names of the back ends of prefill and decode, neither of them `auto`.

    Attributes:
        policy: order in which chunks share the accelerator and the host.
        precision: precision that was asked for, if any.
    """

    prefill: str
    decode: str
    policy: Policy
    precision: str | None = None

    @property
    def native(self) -> bool:
        """Whether the C++ kernels compute prompts and answers."""
        return (self.prefill, self.decode) == (NATIVE, NATIVE)

    @property
    def shares_cpu(self) -> bool:
        """Whether the CPU provider runs at the same time as the host, not in turns with it."""
        return self.prefill == CPU and self.policy != "serial"

    @property
    def cache_on_gpu(self) -> bool:
        """Whether a GPU keeps a replica of the KV cache."""
        return TRITON in (self.decode, self.prefill) or self.prefill == CUDA

    @property
    def one_processor(self) -> str | None:
        """Reason why prompts cannot be computed while native kernels decode; None: they can be."""
        if self.decode != NATIVE:
            return f"decode is {self.decode}, not native"
        if self.prefill in STEPS:
            return f"prefill is {self.prefill}, on the processor of decode"
        if self.prefill == CUDA:
            return "prefill is cuda, whose KV cache is copied between steps"
        if self.prefill == CPU and not self.shares_cpu:
            return "prefill is cpu, on the processor of decode"
        return None

    def scheduling(self, asked: Scheduling) -> Scheduling:
        """Return the scheduling in use: `asked`, or stall_free where two_devices cannot be had."""
        if asked == "two_devices" and self.one_processor is not None:
            return "stall_free"
        return asked

    def host(self, config: ModelConfig) -> str | None:
        """Return the back end that computes tokens beside an execution provider; None: none does.

        The back end of decode or, where decode rides in the chunks of prefill, one for the tokens
        that the precision leaves to the host, if there are any.
        """
        if self.decode != CHUNKED:
            return self.decode
        return usual_host() if self.prefill_precision(config) in STATIC else None

    def host_precision(self, config: ModelConfig) -> str | None:
        """Return the precision of `host`; None where there is no such back end."""
        host = self.host(config)
        return None if host is None else _HOST_PRECISIONS[host]

    def decode_precision(self, config: ModelConfig) -> str:
        """Return the precision in which decode runs a model; see `prefill_precision`."""
        if self.decode == CHUNKED:
            return self.prefill_precision(config)
        return _HOST_PRECISIONS[self.decode]

    def prefill_precision(self, config: ModelConfig) -> str:
        """Return the precision in which prefill runs a model.

        Raises:
            UnsupportedModelError: the precision that was asked for cannot compute the model, or no
                precision of the provider can.
        """
        if self.precision is not None:
            allowed = PREFILL_PRECISIONS
            if self.prefill in PROVIDERS:
                allowed = PROVIDERS[self.prefill].precisions
            require_support(self.precision, config, among=allowed)
            return self.precision
        if self.prefill in STEPS:
            return PACKED
        if self.prefill != CPU:
            return first_supported(PROVIDERS[self.prefill].precisions, config)
        from edgellm.backends.int8_support import (
            int8_products_are_exact,  # 0.4 s, and rarely needed
        )

        rounded = why_not("w8a8", config) is None and int8_products_are_exact()
        return "w8a8" if rounded else first_supported(("f32",), config)

    def precisions(self, config: ModelConfig) -> set[str]:
        """Return all precisions in which a model is run; see `prefill_precision`."""
        host = self.host_precision(config)
        return {self.prefill_precision(config), *(() if host is None else (host,))}

    def graph_precisions(self, config: ModelConfig) -> list[str]:
        """Return the names among `precisions` that are graphs of ONNX Runtime, sorted."""
        return sorted(self.precisions(config) - {PACKED})


def precisions_of(options: EngineOptions) -> Callable[[ModelConfig], set[str]]:
    """Return a function of a model's config: the precisions in which the model is run.

    Raises:
        OptionError, ProviderError: see `select`.
    """
    select(options)  # before a model is downloaded
    return lambda config: select(options, config).precisions(config)


def select(options: EngineOptions, config: ModelConfig | None = None) -> Selection:
    """Select the back ends of prefill and decode on this machine.

    Args:
        config: model that is run; None: a model that all back ends compute.

    Raises:
        OptionError: a back end that is not there, or that the scheduling layered does not take.
        ProviderError: the execution provider cannot be used here.
        UnsupportedModelError: a back end that does not compute the model.
    """
    options = _native_for_cache(options)
    decode = options.decode if config is None else _decode_of(config, options)
    # decode in graphs needs nothing: they run on the CPU
    for name in dict.fromkeys((options.decode, options.prefill)):
        if name != AUTO and (name in STEPS or name == options.prefill):
            require_backend(name)
    decode = _usual_decode() if decode == AUTO else decode
    prefill = options.prefill
    if prefill == AUTO:
        prefill = decode if decode in STEPS and options.precision is None else CPU
    if options.scheduling == "layered" and not (stops_between_layers(prefill) and decode != TRITON):
        raise OptionError(
            f"`scheduling` is 'layered', `prefill` {prefill} and `decode` {decode}: prompts do not "
            f"stop between layers where their KV cache is on a GPU; take {NATIVE} or an execution "
            f"provider other than {CUDA} as `prefill` and {NATIVE}, {PORTABLE} or {CHUNKED} as "
            "`decode`, or `scheduling` stall_free"
        )
    if isinstance(options.kv_format, tuple) and (prefill, decode) != (NATIVE, NATIVE):
        raise OptionError(
            f"`kv_format` is {options.kv_text!r}, `prefill` {prefill} and `decode` {decode}: the "
            f"C++ kernels alone have several; take {NATIVE} for both, or one format"
        )
    if seals(options.kv_format) and not {prefill, decode} <= set(STEPS):
        raise OptionError(
            f"`kv_format` is {options.kv_text!r}, `prefill` {prefill} and `decode` {decode}: the "
            f"C++ and Triton kernels alone seal blocks; take {NATIVE} for both, or {TRITON}, or a "
            f"`kv_format` among {', '.join(ROW_FORMATS)}"
        )
    for name, part in _NATIVE_ALONE.items():
        value = getattr(options, name)
        if value is not None and (prefill, decode) != (NATIVE, NATIVE):
            raise OptionError(
                f"`{name}` is {value}, `prefill` {prefill} and `decode` {decode}: the C++ kernels "
                f"alone {part}; take {NATIVE} for both, or no `{name}`"
            )
    policy = options.schedule
    if policy is None:
        policy = "serial" if prefill in (CPU, CUDA, *STEPS) else "out-of-order"
    return Selection(prefill=prefill, decode=decode, policy=policy, precision=options.precision)


def require_backend(name: str) -> None:
    """Refuse a back end where it cannot be used; graphs on an execution provider need that.

    Raises:
        OptionError: the back end is not there, or there is no back end of this name.
        ProviderError: an execution provider or a GPU cannot be used here.
    """
    if name == NATIVE and library() is None:
        raise OptionError(
            "`decode` or `prefill` is 'native': the kernels were not built when edgellm was "
            "installed; install a C++ compiler and reinstall, or take `decode` portable and "
            "`prefill` cpu"
        )
    if name not in STEPS:
        providers.require(name)
    if name in (TRITON, CUDA):
        device.require()


def needs_native(options: EngineOptions) -> bool:
    """Whether `auto` means the C++ kernels: they alone have the options of the KV cache, or have
    sealed blocks, which Triton has on no GPU yet, and so only where it is named."""
    named = TRITON in (options.decode, options.prefill)
    alone = any(getattr(options, name) is not None for name in _NATIVE_ALONE)
    return alone or (seals(options.kv_format) and not named)


def _native_for_cache(options: EngineOptions) -> EngineOptions:
    """Return options in which `auto` means the C++ kernels, where they are there and needed."""
    if not needs_native(options) or options.precision is not None or library() is None:
        return options
    decode, prefill = (NATIVE if x == AUTO else x for x in (options.decode, options.prefill))
    return replace(options, decode=decode, prefill=prefill)


def _decode_of(config: ModelConfig, options: EngineOptions) -> str:
    """Return the back end that decodes a model, with all its parts.

    Raises:
        UnsupportedModelError: a back end that was asked for lacks a part, or there is none here.
    """
    if config.backbone is not None:
        raise UnsupportedModelError(
            f"the model ({config.model_type}) drafts for another one, whose hidden states, K and V "
            "it reads; name it as `draft` of that one"
        )
    in_graphs = options.prefill not in (AUTO, *STEPS) or (
        options.prefill == AUTO and options.precision is not None
    )
    hosted, decode = needs_host(config), options.decode
    for name, value in (("decode", decode), ("prefill", options.prefill)):
        reason = why_not(value, config)
        if reason is None and name == "decode" and hosted and in_graphs and value == TRITON:
            reason = f"beside graphs of chunks {NATIVE} alone decodes it"
        if reason is not None:
            raise UnsupportedModelError(_refusal(name, value, config, reason))
    if decode == AUTO:
        decode = NATIVE if hosted and in_graphs else _usual_decode()
        choosy = library() is not None and options.prefill != TRITON  # others compute it as well
        if why_not(decode, config) or (choosy and why_untried(decode, config)):
            decode = NATIVE if hosted else usual_host()
    if hosted and NATIVE in (decode, options.prefill) and library() is None:
        raise UnsupportedModelError(
            f"the model ({config.model_type}) needs the C++ kernels, which were not built when "
            f"edgellm was installed: {why_not(PORTABLE, config)}. Install a C++ compiler and "
            "reinstall"
        )
    return decode


def _refusal(option: str, value: str, config: ModelConfig, reason: str) -> str:
    """Return the text of an error, with what computes the model in place of `value`."""
    others = [name for name in (NATIVE, TRITON) if why_not(name, config) is None]
    chunks = [p for p in PREFILL_PRECISIONS if why_not(p, config) is None]
    text = f"`{option}` is {value!r}, and it cannot compute {config.model_type}: {reason}. Take "
    text += f"`decode` and `prefill` {' or '.join(others)}"
    if chunks:
        text += f", or `decode` {NATIVE} with `prefill` cpu and `precision` {' or '.join(chunks)}"
    return text


def stops_between_layers(prefill: str) -> bool:
    """Whether rows of a prompt can rest between layers, as `scheduling` layered has it."""
    return prefill not in (TRITON, CUDA)


def _usual_decode() -> str:
    if device.why_not() is None and not device.interpreted():
        return TRITON
    return usual_host()


def usual_host() -> str:
    """Return the back end that decodes on the CPU where none is asked for."""
    return PORTABLE if library() is None else NATIVE


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bundle, options, KV cache and the other parts that the back ends of one engine share.

    Attributes:
        ropes: RoPE tables that layers name by their index, for the whole context.
        threads: CPU threads of the process.
        progress: callback told while graphs are compiled for an accelerator.
    """

    bundle: Bundle
    options: EngineOptions
    selection: Selection
    cache: KVCache
    ropes: Sequence[RopeTable]
    threads: int
    progress: ProgressCallback | None
