"""ONNX Runtime sessions that run whole on one execution provider.

No node falls back silently: a segment that an accelerator does not take as a whole is an error that
names the nodes. If the user allows a fallback, results say that there was one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.backends.onnx_runtime import onnx_runtime
from edgellm.backends.providers import CPU, PROVIDERS, add_provider
from edgellm.backends.thread_pool import session_options
from edgellm.errors import ProviderError, first_line


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
