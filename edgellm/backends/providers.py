"""Execution providers of ONNX Runtime on this machine, built in or as packages of their own.

No node of a session falls back silently: a segment that an accelerator does not take as a whole is
an error that names the nodes. If the user allows a fallback, results say that there was one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from edgellm.backends.registry import AUTO, NATIVE, TRITON
from edgellm.backends.thread_pool import onnx_runtime, session_options
from edgellm.errors import OptionError, ProviderError, first_line
from edgellm.machine import cpu_name

CPU = "cpu"
CUDA = "cuda"
QNN = "qnn"
# Kinds of devices, the best first.
_KINDS = ("NPU", "GPU", "CPU")
# Log level for plug-ins, which otherwise warn about features that this machine lacks.
_ERRORS = 3


@dataclass(frozen=True)
class Provider:
    """An execution provider.

    Attributes:
        ort_name: name in ONNX Runtime.
        package: package to install for it.
        plugin: module that brings the provider as a library of its own; None where it is part of
            onnxruntime.
        precisions: precisions that the provider takes, the usual one first.
        compiled: whether its graphs are compiled once and kept (see `compile_cache.py`).
    """

    ort_name: str
    package: str
    plugin: str | None = None
    precisions: tuple[str, ...] = ("f32",)
    compiled: bool = False


PROVIDERS: Mapping[str, Provider] = {
    CPU: Provider(
        "CPUExecutionProvider",
        "onnxruntime",
        None,
        ("w8a8", "f32", "f16", "w4a16", "w8a16-qdq", "w8a8-qdq"),
    ),
    CUDA: Provider("CUDAExecutionProvider", "onnxruntime-gpu", None, ("f16", "w4a16", "f32")),
    "tensorrt": Provider("TensorrtExecutionProvider", "onnxruntime-gpu"),
    "tensorrt-rtx": Provider(
        "NvTensorRTRTXExecutionProvider",
        "onnxruntime-ep-nv-tensorrt-rtx",
        "onnxruntime_ep_nv_tensorrt_rtx",
    ),
    QNN: Provider(
        "QNNExecutionProvider", "onnxruntime-qnn", "onnxruntime_qnn", ("w8a16-qdq",), compiled=True
    ),
    "openvino": Provider(
        "OpenVINOExecutionProvider", "onnxruntime-ep-openvino", "onnxruntime_ep_openvino"
    ),
    "coreml": Provider("CoreMLExecutionProvider", "onnxruntime on macOS"),
    "dml": Provider("DmlExecutionProvider", "onnxruntime-directml"),
    "vitisai": Provider("VitisAIExecutionProvider", "AMD's Ryzen AI software"),
    "webgpu": Provider("WebGpuExecutionProvider", "onnxruntime-ep-webgpu", "onnxruntime_ep_webgpu"),
}


@dataclass(frozen=True)
class ProviderStatus:
    """Status of one provider, as `edgellm devices` lists it; `reason`: why it is not usable."""

    name: str
    usable: bool
    device: str
    reason: str


def statuses() -> list[ProviderStatus]:
    """Return the status of every known provider, usable or not."""
    return [status(name) for name in PROVIDERS]


def status(name: str) -> ProviderStatus:
    """Return the status of one provider: usable if it is there and runs a small graph."""
    if name == CPU:
        return ProviderStatus(name, True, cpu_name(), "")
    try:
        device = _device(name)
        _probe(name)
    except ProviderError as error:
        return ProviderStatus(name, False, "", str(error))
    return ProviderStatus(name, True, device, "")


def require(name: str) -> None:
    """Refuse a provider that cannot be used.

    Raises:
        OptionError: an unknown name.
        ProviderError: a known provider that cannot be used here, with the reason.
    """
    if name not in PROVIDERS:
        raise OptionError(
            f"`prefill` is {name!r}; allowed are {', '.join((AUTO, NATIVE, TRITON, *PROVIDERS))}; "
            "`edgellm devices` shows which are usable"
        )
    provider = status(name)
    if not provider.usable:
        raise ProviderError(f"`prefill` {name}: {provider.reason}")


def add_provider(options: Any, name: str, settings: Mapping[str, str]) -> list[Any] | None:
    """Put a provider on session options; return the value for `InferenceSession(providers=...)`.

    Args:
        settings: the provider's own options, over those that edgellm sets for a plug-in.

    Raises:
        OptionError: settings for the CPU provider, which has none.
        ProviderError: the provider's plug-in or its device is not there.
    """
    provider = PROVIDERS[name]
    if provider.plugin is None:
        if settings and name == CPU:
            raise OptionError(f"provider options: {name} has none")
        return [(provider.ort_name, dict(settings))]
    options.log_severity_level = _ERRORS
    options.add_provider_for_devices([_plugin_device(name)], {**_settings(name), **settings})
    return None


def version(name: str) -> str:
    """Return the version of a provider's package and, for a plug-in, its default settings."""
    onnxruntime = onnx_runtime()

    provider = PROVIDERS[name]
    if provider.plugin is None:
        return f"onnxruntime {onnxruntime.__version__}"
    plugin_version = getattr(_plugin(name), "__version__", "unknown")
    return f"{provider.plugin} {plugin_version} {_settings(name)}"


def _device(name: str) -> str:
    """Return the device that a provider runs on, in words; empty if it is part of onnxruntime.

    Raises:
        ProviderError: the provider or its device is not there.
    """
    onnxruntime = onnx_runtime()

    provider = PROVIDERS[name]
    if provider.plugin is not None:
        device = _plugin_device(name).device
        if name == QNN and _emulated():
            return "HTP v73, emulated on this CPU: for tests, not for speed"
        return f"{device.type.name} {device.vendor}".strip()
    if provider.ort_name not in onnxruntime.get_available_providers():
        raise ProviderError(f"not in this build of onnxruntime; it comes with {provider.package}")
    return ""


def _plugin(name: str) -> ModuleType:
    provider = PROVIDERS[name]
    try:
        return importlib.import_module(provider.plugin or "")
    except ImportError:
        raise ProviderError(f"not installed; pip install {provider.package!r}") from None


def _plugin_device(name: str) -> Any:
    """Return a plug-in's device, an NPU before a GPU before a CPU.

    ONNX Runtime loads the library of a plug-in once in a process.

    Raises:
        ProviderError: the plug-in is not installed, does not load, or finds no device.
    """
    ort = onnx_runtime()

    ort_name = PROVIDERS[name].ort_name

    def devices() -> list[Any]:
        return [device for device in ort.get_ep_devices() if device.ep_name == ort_name]

    plugin = _plugin(name)
    if not devices():
        try:
            ort.register_execution_provider_library(ort_name, plugin.get_library_path())
        except Exception as error:  # onnxruntime's exceptions share no base class
            reason = first_line(error)
            if "already registered" not in reason:
                raise ProviderError(f"its library does not load: {reason}") from None
    suitable = devices()
    if not suitable:
        raise ProviderError("no device of its kind in this machine")
    return min(suitable, key=lambda device: _KINDS.index(device.device.type.name))


def _emulated() -> bool:
    """Whether QNN emulates its device: Qualcomm's wheel for x86 emulates the HTP's instructions."""
    return platform.machine() in ("x86_64", "AMD64")


def _settings(name: str) -> dict[str, str]:
    """Return the options of a plug-in that apply where the user gives no others."""
    if name != QNN:
        return {}
    settings = {
        "backend_path": _plugin(name).get_qnn_htp_path(),
        # float16 between integer products; quantization at a segment's ends on the device as well
        "enable_htp_fp16_precision": "1",
        "offload_graph_io_quantization": "0",
    }
    # a device knows its own model, the emulator has to be told (Snapdragon 8 Gen 2)
    return {**settings, "htp_arch": "73", "soc_model": "60"} if _emulated() else settings


def _probe(name: str) -> None:
    """Start a session with a one-node graph.

    Raises:
        ProviderError: the session does not start.
    """
    import onnx_ir as ir

    from edgellm.graphs.builder import GraphBuilder

    ort = onnx_runtime()

    graph = GraphBuilder("probe")
    model = graph.build({"y": (graph.op("Abs", graph.input("x", (1,))), (1,))})
    options = session_options()
    providers = add_provider(options, name, {})
    try:
        with _stdout_as_stderr():
            ort.InferenceSession(
                ir.to_proto(model).SerializeToString(),
                options,
                providers=providers,
                enable_fallback=0,
            )
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ProviderError(first_line(error)) from None


@contextlib.contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Send stdout to stderr for libraries that print on first use: stdout has the model's text."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)  # text that C has buffered
        os.dup2(saved, 1)
        os.close(saved)


@dataclass(frozen=True)
class Placement:
    """Provider of a back end, and node counts of its graphs, if any, by ONNX Runtime's names."""

    provider: str
    nodes: Mapping[str, int]

    @property
    def place(self) -> str:
        """Name of the provider, with `+cpu` where it left nodes to the CPU."""
        return self.provider if self.complete else f"{self.provider}+{CPU}"

    @property
    def complete(self) -> bool:
        return set(self.nodes) <= {PROVIDERS[self.provider].ort_name}

    def __str__(self) -> str:
        counts = ", ".join(f"{n} nodes on {name}" for name, n in sorted(self.nodes.items()))
        return f"{self.provider}: {counts}" if counts else self.provider


def open_session(
    path: Path,
    *,
    provider: str,
    provider_options: Mapping[str, str] | None = None,
    allow_fallback: bool = False,
) -> tuple[Any, Placement]:
    """Open a graph that must run whole on `provider`.

    Args:
        allow_fallback: let the CPU run the nodes that the provider does not take.

    Raises:
        ProviderError: the graph does not load, or some nodes would run elsewhere.
    """
    ort = onnx_runtime()

    options = session_options()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if provider == CPU:
        options.add_session_config_entry("session.use_env_allocators", "1")
    providers = add_provider(options, provider, provider_options or {})
    try:
        session = ort.InferenceSession(path, options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime's exceptions share no base class
        reason = first_line(error)
        raise ProviderError(f"{provider} does not load {path}: {reason}") from None
    ort_name = PROVIDERS[provider].ort_name
    nodes: Counter[str] = Counter()
    strangers = []
    for subgraph in session.get_provider_graph_assignment_info():
        for node in subgraph.get_nodes():
            nodes[subgraph.ep_name] += 1
            if subgraph.ep_name != ort_name:
                strangers.append(f"{node.name} ({node.op_type}) on {subgraph.ep_name}")
    if strangers and not allow_fallback:
        raise ProviderError(
            f"{provider} does not take {len(strangers)} nodes of {path.name}: "
            + ", ".join(strangers[:8])
            + "; `allow_fallback` runs them there"
        )
    return session, Placement(provider, dict(nodes))
