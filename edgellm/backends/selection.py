"""What runs a model on this machine: the back ends and precisions that options come to.

The one place that probes for it; options themselves are values.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.backends.providers import CPU, CUDA, PROVIDERS
from edgellm.backends.registry import (
    AUTO,
    CHUNKED,
    NATIVE,
    PORTABLE,
    REFERENCE,
    STEPS,
    TRITON,
    backend_file,
)
from edgellm.backends.schedule import Policy
from edgellm.errors import OptionError
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.gpu import device
from edgellm.kernels.native import library
from edgellm.options import PREFILL_PRECISIONS, EngineOptions, Scheduling
from edgellm.store.manifest import PACKED
from edgellm.store.precision_support import STATIC, first_supported, why_not
from edgellm.store.precision_support import require as require_support

_HOST_PRECISIONS = {PORTABLE: "int4", REFERENCE: "f32", NATIVE: PACKED, TRITON: PACKED}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Names of back ends, none of them `auto`.

    Attributes:
        policy: how chunks share the accelerator and the host.
        precision: the precision that was asked for, if any.
    """

    prefill: str
    decode: str
    policy: Policy
    precision: str | None = None

    @property
    def shares_cpu(self) -> bool:
        """Whether the CPU provider runs beside the host, and not before and after it."""
        return self.prefill == CPU and self.policy != "serial"

    @property
    def one_processor(self) -> str | None:
        """Why prompts are not computed while native kernels decode; None: they can be."""
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
        """What is used of the one that was asked for."""
        if asked == "two_devices" and self.one_processor is not None:
            return "stall_free"
        return asked

    def host(self, config: ModelConfig) -> str | None:
        """What computes tokens beside an execution provider: decode or, where decode rides in the
        chunks of prefill, only what the precision leaves to the host, if that is anything."""
        if self.decode != CHUNKED:
            return self.decode
        return _usual_host() if self.prefill_precision(config) in STATIC else None

    def host_precision(self, config: ModelConfig) -> str | None:
        """The one of `host`."""
        host = self.host(config)
        return None if host is None else _HOST_PRECISIONS[host]

    def decode_precision(self, config: ModelConfig) -> str:
        """The one that decode runs a model in; see `prefill_precision`."""
        if self.decode == CHUNKED:
            return self.prefill_precision(config)
        return _HOST_PRECISIONS[self.decode]

    def prefill_precision(self, config: ModelConfig) -> str:
        """The one that prefill runs a model in.

        Raises:
            UnsupportedModelError: the one that was asked for cannot compute the model, or none of
                the provider's can.
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
        return "w8a8" if rounded else "f32"

    def precisions(self, config: ModelConfig) -> set[str]:
        """Those that a model is run in; see `prefill_precision`."""
        host = self.host_precision(config)
        return {self.prefill_precision(config), *(() if host is None else (host,))}

    def graph_precisions(self, config: ModelConfig) -> list[str]:
        """Those of `precisions` that are graphs of ONNX Runtime."""
        return sorted(self.precisions(config) - {PACKED})


def select(options: EngineOptions) -> Selection:
    """What options come to here.

    Raises:
        OptionError: a back end that is not there, or a schedule or scheduling that it does not
            have.
        ProviderError: the execution provider cannot be used here.
    """
    # whoever decodes in graphs needs nothing: they run on the CPU
    for name in dict.fromkeys((options.decode, options.prefill)):
        if name != AUTO and (name in STEPS or name == options.prefill):
            backend_file(name).require(name)
    decode = options.decode if options.decode != AUTO else _usual_decode()
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
    policy = options.schedule
    if policy is None:
        policy = "serial" if prefill in (CPU, CUDA, *STEPS) else "out-of-order"
    return Selection(prefill=prefill, decode=decode, policy=policy, precision=options.precision)


def stops_between_layers(prefill: str) -> bool:
    """Whether rows can rest between layers, as `scheduling` layered has it."""
    return prefill not in (TRITON, CUDA)


def _usual_decode() -> str:
    if device.why_not() is None and not device.interpreted():
        return TRITON
    return _usual_host()


def _usual_host() -> str:
    return PORTABLE if library() is None else NATIVE
