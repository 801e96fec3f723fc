"""Execution providers: what ONNX Runtime offers here, and sessions that run whole on one of them.

Nothing falls back silently: a segment that an accelerator does not take as a whole is an error
that names the nodes.
"""

from __future__ import annotations

import contextlib
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.errors import OptionError, ProviderError
from edgellm.thread_pool import session_options

CPU = "cpu"
AUTO = "auto"
# Not a provider: prefill in the native kernels, without ONNX Runtime.
NATIVE = "native"
# Name on the command line -> ONNX Runtime's name, and the package that brings it.
PROVIDERS: Mapping[str, tuple[str, str]] = {
    CPU: ("CPUExecutionProvider", "onnxruntime"),
    "cuda": ("CUDAExecutionProvider", "onnxruntime-gpu"),
    "tensorrt": ("TensorrtExecutionProvider", "onnxruntime-gpu"),
    "qnn": ("QNNExecutionProvider", "onnxruntime-qnn"),
    "openvino": ("OpenVINOExecutionProvider", "onnxruntime-openvino"),
    "coreml": ("CoreMLExecutionProvider", "onnxruntime on macOS"),
    "dml": ("DmlExecutionProvider", "onnxruntime-directml"),
    "vitisai": ("VitisAIExecutionProvider", "AMD's Ryzen AI software"),
    "webgpu": ("WebGpuExecutionProvider", "onnxruntime-ep-webgpu"),
}


@dataclass(frozen=True)
class ProviderStatus:
    """A line of `edgellm devices`; `reason` says why a provider is not usable."""

    name: str
    usable: bool
    device: str
    reason: str


@dataclass(frozen=True)
class Placement:
    """Where prefill runs, and node counts of its graphs, if any, by ONNX Runtime provider name."""

    provider: str
    nodes: Mapping[str, int]

    @property
    def complete(self) -> bool:
        return set(self.nodes) <= {PROVIDERS[self.provider][0]}

    def __str__(self) -> str:
        counts = ", ".join(f"{n} nodes on {name}" for name, n in sorted(self.nodes.items()))
        return f"{self.provider}: {counts}" if counts else self.provider


def statuses() -> list[ProviderStatus]:
    """Every known provider, usable or not."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    found = []
    for name, (ort_name, package) in PROVIDERS.items():
        if name == CPU:
            found.append(ProviderStatus(name, True, cpu_name(), ""))
        elif ort_name in available:
            reason = _probe(ort_name)
            found.append(ProviderStatus(name, not reason, "", reason))
        else:
            reason = f"not in this build of onnxruntime; it comes with {package}"
            found.append(ProviderStatus(name, False, "", reason))
    return found


def choose(name: str) -> str:
    """The provider to use for a `--prefill` value; `auto` is the CPU until others are measured.

    Raises:
        OptionError: an unknown name.
        ProviderError: a known one that cannot be used here, with the reason.
    """
    if name == AUTO:
        return CPU
    if name not in PROVIDERS:
        raise OptionError(
            f"prefill {name!r}: allowed are {AUTO}, {', '.join(PROVIDERS)}; "
            "`edgellm devices` shows which are usable"
        )
    status = next(s for s in statuses() if s.name == name)
    if not status.usable:
        raise ProviderError(f"prefill {name}: {status.reason}")
    return name


def open_session(path: Path, *, provider: str) -> tuple[Any, Placement]:
    """Open a graph that must run whole on `provider`.

    Raises:
        ProviderError: the graph does not load, or some nodes would run elsewhere.
    """
    import onnxruntime as ort

    ort_name = PROVIDERS[provider][0]
    options = session_options()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = ort.InferenceSession(path, options, providers=[ort_name], enable_fallback=0)
    except Exception as error:  # onnxruntime's exceptions share no base class
        reason = str(error).strip().splitlines()[0]
        raise ProviderError(f"{provider} does not load {path}: {reason}") from None
    nodes: Counter[str] = Counter()
    strangers = []
    for subgraph in session.get_provider_graph_assignment_info():
        for node in subgraph.get_nodes():
            nodes[subgraph.ep_name] += 1
            if subgraph.ep_name != ort_name:
                strangers.append(f"{node.name} ({node.op_type}) on {subgraph.ep_name}")
    if strangers:
        raise ProviderError(
            f"{provider} does not take {len(strangers)} nodes of {path.name}: "
            + ", ".join(strangers[:8])
        )
    return session, Placement(provider, dict(nodes))


def _probe(ort_name: str) -> str:
    """Why a provider of this build does not start, or an empty string."""
    import onnx_ir as ir
    import onnxruntime as ort

    from edgellm.graphs.builder import GraphBuilder

    graph = GraphBuilder("probe")
    model = graph.build({"y": (graph.op("Abs", graph.input("x", (1,))), (1,))})
    try:
        ort.InferenceSession(
            ir.to_proto(model).SerializeToString(),
            session_options(),
            providers=[ort_name],
            enable_fallback=0,
        )
    except Exception as error:  # onnxruntime's exceptions share no base class
        return str(error).strip().splitlines()[0]
    return ""


def cpu_name() -> str:
    """The processor's name as the operating system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
