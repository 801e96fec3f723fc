"""Open graphs of one precision, and the buffers that they are bound to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.compile_cache import compiled
from edgellm.backends.providers import CPU, PROVIDERS, Placement, open_session
from edgellm.backends.thread_pool import onnx_runtime
from edgellm.errors import BundleError
from edgellm.graphs import contract
from edgellm.kernels.checks import indices
from edgellm.progress import ProgressCallback
from edgellm.quantize.calibration import ShadowLinear
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import PrecisionEntry, map_arrays

Floats = NDArray[np.float32]
# Code that stands for 0 in an embedding table of bytes.
_TABLE_ZERO = 128
Run = Callable[[], None]


@dataclass(frozen=True)
class ChunkBuffers:
    """Buffers that segments of one chunk size read and write; all float32.

    Arrays are numpy's on the host, torch tensors on a device.

    Attributes:
        x: embeddings `[C, E]`.
        attention: attention of each layer `[C, H * D]`, written between segments.
        qkv: Q, K and V of each layer `[C, (H + 2 Hkv) * D]`, or what another mixer reads.
        activated: inputs of each down_proj `[C, I]`, between the halves of a segment that is cut.
            Layers with arrays of the same width share them.
        normed, experts: inputs and outputs of a layer's experts `[C, E]`.
        residuals: two residuals `[C, E]`, or all streams side by side; the graph at position i
            reads number i % 2.
        hidden: hidden states `[C, E]` after the final norm.
        layer_rows: rows of tokens' embeddings for layers `[C, layers * P]`; empty without such.
        embedded: what they come to in each layer, `[C, P]`.
        segments: one function for each graph, which runs it on these buffers.
    """

    x: Any
    attention: Sequence[Any]
    qkv: Sequence[Any]
    activated: Sequence[Any]
    normed: Any
    experts: Any
    residuals: tuple[Any, Any]
    hidden: Any
    layer_rows: Any
    embedded: Sequence[Any]
    segments: Sequence[Run]


class Segments:
    """The graphs of a precision on one provider: `layers + 1` segments, some of them in two halves.

    The CPU provider takes one session of symbolic size for all chunk sizes, if the precision has
    such graphs, because each session keeps its own repacked copy of the weights. Other providers
    get a static graph for each size, compiled beforehand where the provider asks for it.

    Args:
        provider_options: the provider's own options, over those that edgellm sets.
        allow_fallback: see `open_session`.
        progress: callback told about the compilation.
    """

    def __init__(
        self,
        bundle: Bundle,
        precision: str,
        *,
        provider: str,
        threads: int,
        provider_options: Mapping[str, str] | None = None,
        allow_fallback: bool = False,
        progress: ProgressCallback | None = None,
    ) -> None:
        entry = bundle.precision(precision)
        self.config = bundle.config
        self.precision = precision
        self.chunk_sizes = entry.chunk_sizes
        self.host_tokens = entry.host_tokens
        self.parts = contract.parts(bundle.config, entry.cut_segments)
        self.shadows = read_shadows(bundle.path, entry)
        self._provider_options = provider_options or {}
        self._allow_fallback = allow_fallback
        self._folder = bundle.path / precision
        self.compiled: Path | None = None
        self._provider = provider
        self._threads = threads
        self._symbolic = provider == CPU and entry.any_size
        self._sessions: dict[int | None, list[Any]] = {}
        self._buffers: dict[tuple[int, int], ChunkBuffers] = {}
        self._nodes: Counter[str] = Counter()
        if PROVIDERS[provider].compiled:
            self._folder = self.compiled = compiled(
                bundle,
                precision,
                provider=provider,
                provider_options=self._provider_options,
                allow_fallback=allow_fallback,
                progress=progress,
            )
        for size in [None] if self._symbolic else self.chunk_sizes:
            self._open(size)

    @property
    def placement(self) -> Placement:
        return Placement(self._provider, dict(self._nodes))

    def buffers(self, chunk: int, *, slot: int = 0) -> ChunkBuffers:
        """Return the buffers of a chunk size, made on first use.

        Chunks that are on their way together need a slot each.
        """
        if (chunk, slot) not in self._buffers:
            self._buffers[chunk, slot] = self._bind(chunk)
        return self._buffers[chunk, slot]

    def run(self, index: int, chunk: int, inputs: Mapping[str, Floats]) -> list[Floats]:
        """Run one graph by itself, on arrays of its own, as the self-test does."""
        session = self._sessions[None if self._symbolic else chunk][index]
        outputs: list[Floats] = session.run(None, inputs)
        return outputs

    def _open(self, size: int | None) -> None:
        """Open the graphs of a size; None: of symbolic size.

        On the CPU several load at a time: loading is mostly repacking weights, without the GIL.
        Other providers' libraries need not bear two threads at once: Qualcomm's crashed.
        """

        def load(part: contract.Part) -> tuple[Any, Placement]:
            path = self._folder / contract.part_file(part, size)
            session, placement = open_session(
                path,
                provider=self._provider,
                provider_options=self._provider_options,
                allow_fallback=self._allow_fallback,
            )
            self._check(session, part, path)
            return session, placement

        with ThreadPoolExecutor(self._threads if self._provider == CPU else 1) as pool:
            opened = list(pool.map(load, self.parts))
        self._sessions[size] = [session for session, _ in opened]
        for _, placement in opened:
            self._nodes.update(placement.nodes)

    def _check(self, session: Any, part: contract.Part, path: Path) -> None:
        for role, values, expected in (
            ("inputs", session.get_inputs(), contract.part_inputs(self.config, part)),
            ("outputs", session.get_outputs(), contract.part_outputs(self.config, part)),
        ):
            _check_widths(path, role, values, expected)

    def _bind(self, chunk: int) -> ChunkBuffers:
        """Bind every segment once; a call then costs microseconds."""
        config, arrays = self.config, dict[tuple[str, int], Any]()

        def array(name: str, width: int) -> Any:
            if (name, width) not in arrays:
                arrays[name, width] = self._zeros(chunk, width)
            return arrays[name, width]

        even, odd = (array(name, config.residual_width) for name in ("even", "odd"))
        runs: list[Run] = []
        sessions = self._sessions[None if self._symbolic else chunk]
        for index, (part, session) in enumerate(zip(self.parts, sessions, strict=True)):
            # A graph must not write the residual that it reads, so two take turns.
            residual = {
                contract.RESIDUAL: (even, odd)[index % 2],
                contract.RESIDUAL_OUT: (odd, even)[index % 2],
            }
            inputs, outputs = (
                {
                    name: residual[name] if name in residual else array(name, width)
                    for name, width in widths.items()
                }
                for widths in (
                    contract.part_inputs(config, part),
                    contract.part_outputs(config, part),
                )
            )
            runs.append(self._bound(session, inputs, outputs))
        width = config.layer_embedding or 0
        return ChunkBuffers(
            array(contract.X, config.hidden_size),
            [array(contract.ATTENTION, layer.outputs) for layer in config.layers],
            [array(contract.QKV, layer.inputs) for layer in config.layers],
            [array(contract.ACTIVATED, layer.mlp.intermediate) for layer in config.layers],
            array(contract.NORMED, config.hidden_size),
            array(contract.EXPERTS, config.hidden_size),
            (even, odd),
            array(contract.HIDDEN, config.hidden_size),
            array(contract.LAYER_ROWS, config.layer_count * width),
            [array(contract.embedded_name(i), width) for i in range(config.layer_count)],
            runs,
        )

    def _zeros(self, chunk: int, width: int) -> Any:
        return np.zeros((chunk, width), np.float32)

    def _bound(self, session: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Run:
        """Return a function that runs a session on these arrays."""
        OrtValue = onnx_runtime().OrtValue

        binding = session.io_binding()
        values = {name: OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(array))
        return runner(session, binding, {} if self._provider == CPU else values)


def runner(session: Any, binding: Any, inputs: Mapping[str, Any]) -> Run:
    """Return a function that runs a session, with `inputs` bound anew for each run.

    A provider with memory of its own (even OpenVINO on a CPU) copies inputs when they are bound,
    and would go on computing with their old values.
    """

    def run() -> None:
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        session.run_with_iobinding(binding)

    return run


def _check_widths(
    path: Path, role: str, values: Sequence[Any], expected: Mapping[str, int]
) -> None:
    """Refuse a graph whose inputs or outputs are not those of the config."""
    widths = {value.name: value.shape[-1] for value in values}
    if widths != expected:
        raise BundleError(f"{path}: {role} are {widths}, expected {dict(expected)}")


def read_shadows(root: Path, entry: PrecisionEntry) -> dict[int, ShadowLinear]:
    """Map the host's side of each down_proj that cuts a segment, by the segment's index.

    Args:
        root: folder of the bundle.
    """
    shadows = {}
    for segment, name in entry.cut_segments.items():
        stored = entry.shadows[name]
        arrays = map_arrays(root, {n: entry.arrays[n] for n in (name, f"{name}.scale")})
        weight = arrays[name], arrays[f"{name}.scale"]
        shadows[segment] = ShadowLinear(stored.scale, stored.bits, *weight)
    return shadows


class ModelHead(Protocol):
    """The LM head and the embedding table that goes with it."""

    def embed(self, tokens: Sequence[int]) -> Floats:
        """Return embedding rows `[n, E]`."""

    def logits(self, hidden: Floats) -> Floats:
        """Return logits `[rows, V]` of hidden states `[rows, E]`."""


class Head:
    """The LM head as a graph, and the embedding table mapped beside it."""

    def __init__(self, bundle: Bundle, kind: str) -> None:
        entry = bundle.manifest.heads[kind]
        path = bundle.path / f"head-{kind}" / contract.HEAD_FILE
        self._session, _ = open_session(path, provider=CPU)
        self._rows = bundle.config.vocab_size
        _check_widths(
            path,
            "inputs and outputs",
            [*self._session.get_inputs(), *self._session.get_outputs()],
            {contract.HIDDEN: bundle.config.hidden_size, contract.LOGITS: self._rows},
        )
        self._table = map_arrays(bundle.path, entry.embedding)

    def embed(self, tokens: Sequence[int]) -> Floats:
        """Return embedding rows `[n, E]`.

        Raises:
            ValueError: a token id that the table has no row for.
        """
        ids = indices(tokens, self._rows, "token id")
        if "values" in self._table:
            rows: Floats = self._table["values"][ids]
            return rows
        codes = self._table["codes"][ids].astype(np.float32) - np.float32(_TABLE_ZERO)
        rows = codes * self._table["scale"][ids][..., None]
        return rows.reshape(len(rows), -1)

    def logits(self, hidden: Floats) -> Floats:
        """Return logits `[rows, V]` of hidden states `[rows, E]`."""
        rows: Floats = self._session.run(None, {contract.HIDDEN: hidden})[0]
        return rows
