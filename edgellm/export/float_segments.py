"""Segments of a checkpoint in float32, one at a time, to judge all precisions by.

Weights are those of the file, dequantized; only one segment's weights are in memory, however large
the model. Segments with experts, states or other parts that no graph computes run in numpy. Beside
what graphs take and give (see `graphs/contract.py`), these hand on what later ones need:
embeddings for each layer, and K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.backends import thread_pool
from edgellm.backends.packed_weights import altup_weights
from edgellm.backends.thread_pool import onnx_runtime
from edgellm.errors import ModelFormatError
from edgellm.export.precisions import PRECISIONS
from edgellm.export.weight_reader import WeightReader
from edgellm.export.window_attention import WindowAttention, shared_name
from edgellm.graphs import contract
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import Part, part_file
from edgellm.graphs.layer_config import Attention, Latent
from edgellm.graphs.segment import Segment, author_segment
from edgellm.graphs.tensors import mixer_inputs, model_tensors
from edgellm.kernels.altup import AltUpWeights
from edgellm.kernels.altup import reference as altup
from edgellm.kernels.experts.reference import shares
from edgellm.kernels.quantized import dequantize
from edgellm.kernels.step.reference import activate, exceeding, gated, norm
from edgellm.machine import usable_cores
from edgellm.store.precision_support import needs_host

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


class ExpertSegment:
    """A segment of a model that no graph computes; its weights are read once.

    Args:
        index: number of the segment, see `graphs/contract.py`.
        read: reads a tensor by its name.
    """

    def __init__(self, config: ModelConfig, index: int, read: Callable[[str], Any]) -> None:
        self._config = config
        self._specs = model_tensors(config)
        self._index = index
        self._tensor = cache(read)

    def __call__(self, inputs: Mapping[str, Floats]) -> dict[str, Floats]:
        """Compute the segment's outputs from its inputs, both by name."""
        own = (contract.X, contract.ATTENTION, contract.RESIDUAL, contract.LAYER_ROWS)
        handed_on = {key: value for key, value in inputs.items() if key not in own}
        streams: Doubles | None = None
        if self._index == 0:
            residual = inputs[contract.X] * np.float32(self._config.embedding_scale)
            if self._config.layer_embedding is not None:
                handed_on |= self._embeddings(residual, inputs[contract.LAYER_ROWS])
        else:
            residual, streams = self._after_layer(f"layers.{self._index - 1}", inputs)
        if self._index == 0 and self._config.streams is not None:
            streams = altup.enter(residual.astype(np.float64), self._to_streams)
        if self._index == self._config.layer_count:
            if streams is not None:
                residual = altup.leave(streams, self._from_stream).astype(np.float32)
            return {contract.HIDDEN: self._normed("final_norm", residual)}
        name = f"layers.{self._index}"
        if streams is not None:
            streams = altup.predict(self._altup(name), streams, self._config.norm_eps)
            residual = np.concatenate(list(streams), axis=1).astype(np.float32)
        # of several streams the layer computes the first
        first = residual[:, : self._config.hidden_size]
        x = self._normed(f"{name}.attention_norm", first)
        mixer = self._config.layers[self._index].mixer
        if isinstance(mixer, Attention) and mixer.latent is not None:
            parts = [self._queries(mixer, mixer.latent, x)]
            parts += [self._product(f"{name}.{part}", x) for part in "kv"]
        else:
            names = mixer_inputs(self._config, self._index)
            parts = [self._product(f"{name}.{part}", x) for part in names]
        qkv = np.concatenate(parts, axis=-1)
        if self._index in self._config.sources:
            handed_on[shared_name(self._index)] = qkv
        return {contract.RESIDUAL_OUT: residual, contract.QKV: qkv, **handed_on}

    def _queries(self, attention: Attention, latent: Latent, x: Floats) -> Floats:
        """Return queries of latents: what RoPE will turn of each head, and what scores latents."""
        name = f"layers.{self._index}"
        if latent.query_rank is None:
            q = self._product(f"{name}.q", x)
        else:
            row = self._product(f"{name}.q_down", x).astype(np.float64)
            row = norm(row, self._tensor(f"{name}.q_down_norm"), None, latent.norm_eps)
            q = self._product(f"{name}.q_up", row.astype(np.float32))
        heads = q.reshape(len(q), attention.heads, -1)
        turned, rest = np.split(heads, [attention.head_dim], axis=2)
        queries = np.concatenate([turned, self._by_heads(f"{name}.key_up", rest)], axis=2)
        return queries.reshape(len(q), -1)

    def _by_heads(self, name: str, x: Floats) -> Floats:
        """Multiply the rows `[n, H, K]` of each head by its part of a matrix `[H * N, K]`."""
        matrices = self._tensor(name).reshape(x.shape[1], -1, x.shape[2])
        return np.asarray(np.einsum("nhk,hjk->nhj", x, matrices), np.float32)

    def _altup(self, name: str) -> AltUpWeights:
        return altup_weights(lambda part: self._tensor(f"{name}.{part}"))

    def _to_streams(self, x: Doubles) -> Doubles:
        return self._product("streams_enter", x.astype(np.float32)).astype(np.float64)

    def _from_stream(self, x: Doubles, index: int) -> Doubles:
        assert self._config.streams is not None
        product = self._product(
            "streams_leave", x.astype(np.float32), index, self._config.streams - 1
        )
        return product.astype(np.float64)

    def _after_layer(
        self, name: str, inputs: Mapping[str, Floats]
    ) -> tuple[Floats, Doubles | None]:
        """Return the residual behind a layer and, if there are several, all streams."""
        here, mixed = self._config.layers[self._index - 1], inputs[contract.ATTENTION]
        beside = here.beside
        own = mixed if beside is None else mixed[:, : -beside.size]
        if here.attends and here.attention.latent is not None:
            seen = own.reshape(len(own), here.attention.heads, -1)
            own = self._by_heads(f"{name}.value_up", seen).reshape(len(own), -1)
        added = self._product(f"{name}.o", own)
        if beside is not None:
            added = added + self._product(f"{name}.mamba_o", mixed[:, -beside.size :])
        before = inputs[contract.RESIDUAL][:, : self._config.hidden_size]
        residual = before + self._normed(f"{name}.post_attention_norm", added)
        if here.laurel is not None:
            residual = self._with_laurel(name, residual, before)
        after: Floats = residual + self._normed(f"{name}.post_mlp_norm", self._mlps(name, residual))
        streams: Doubles | None = None
        if self._config.streams is not None:
            weights = self._altup(name)
            rows = inputs[contract.RESIDUAL].astype(np.float64)
            predicted = np.stack(np.split(rows, self._config.streams, axis=1))
            made = after.astype(np.float64)
            streams = altup.correct(weights, predicted, made, self._config.norm_eps)
            after = (streams[0] * weights.scale).astype(np.float32)
        if self._config.layer_embedding is not None:
            embedded = self._embedded(name, after, inputs)
            after = after + embedded
            if streams is not None:
                streams[1:] += embedded
        return after * self._tensor(f"{name}.layer_scale") if here.scaled else after, streams

    def _with_laurel(self, name: str, residual: Floats, before: Floats) -> Floats:
        """Return the residual behind attention with the product that stands beside it."""
        x = self._normed(f"{name}.attention_norm", before)
        added = self._product(f"{name}.laurel_right", self._product(f"{name}.laurel_left", x))
        added = self._normed(f"{name}.laurel_norm", added)
        return (residual + x + added) * np.float32(0.5**0.5)

    def _embeddings(self, first: Floats, all_rows: Floats) -> dict[str, Floats]:
        """Return what the tokens' embeddings for all layers come to, by their names.

        Args:
            first: the residual before layer 0.
        """
        embedded = {}
        for index, rows in enumerate(np.split(all_rows, self._config.layer_count, axis=1)):
            context = self._product(f"layers.{index}.layer_context", first)
            context = self._normed("layer_embedding_norm", context / np.sqrt(first.shape[1]))
            value = (context + np.sqrt(rows.shape[1]) * rows) / np.sqrt(2)
            embedded[contract.embedded_name(index)] = value.astype(np.float32)
        return embedded

    def _embedded(self, name: str, x: Floats, inputs: Mapping[str, Floats]) -> Floats:
        """Return what the tokens' embeddings for a layer add behind its MLP."""
        e = inputs[contract.embedded_name(self._index - 1)]
        gate = self._product(f"{name}.layer_gate", x).astype(np.float64)
        activation = self._config.layers[self._index - 1].mlp.activation
        inner = (activate(gate, activation) * e).astype(np.float32)
        added = self._product(f"{name}.layer_output", inner)
        return self._normed(f"{name}.post_layer_norm", added)

    def _mlps(self, name: str, residual: Floats) -> Floats:
        layer = self._config.layers[self._index - 1]
        experts, x = layer.experts, self._normed(f"{name}.mlp_norm", residual)
        if experts is None:
            return self._mlp(f"{name}.", x)
        read = routed = x
        if layer.shared is not None and layer.shared.beside:
            read = self._normed(f"{name}.experts_norm", residual)
            routed = self._normed(f"{name}.router_norm", residual)
        logits = self._product(f"{name}.router", routed).astype(np.float64)
        selection = self._tensor(f"{name}.selection_bias") if experts.selection_bias else None
        scales = self._tensor(f"{name}.expert_scale") if experts.scaled else None
        weights = shares(logits, experts, selection, scales)
        added = np.zeros_like(x)
        for expert in range(experts.experts):
            rows = np.flatnonzero(weights[:, expert])
            if len(rows):
                share = weights[rows, expert, None].astype(np.float32)
                added[rows] += share * self._mlp(f"{name}.", read[rows], expert, experts.experts)
        if layer.shared is None:
            return added
        shared = self._normed(f"{name}.shared_post_norm", self._shared(name, x))
        return self._normed(f"{name}.experts_post_norm", added) + shared

    def _shared(self, name: str, x: Floats) -> Floats:
        """Compute the expert that all rows go through, by its share."""
        added = self._mlp(f"{name}.shared_", x)
        router = f"{name}.shared_router"
        if router not in self._specs:
            return added
        logits = x @ self._tensor(router)
        return np.asarray(added / (1 + np.exp(-logits))[:, None])

    def _mlp(self, prefix: str, x: Floats, expert: int = 0, experts: int = 1) -> Floats:
        """Compute one of the MLPs that are stacked in a layer, by the prefix of their names."""
        mlp = self._config.layers[self._index - 1].mlp
        up = self._product(f"{prefix}up", x, expert, experts).astype(np.float64)
        if mlp.gated:
            gate = self._product(f"{prefix}gate", x, expert, experts).astype(np.float64)
            if mlp.cutoff is not None:
                gate = exceeding(gate, mlp.cutoff)
            inner = gated(gate, up, mlp.activation)
        else:
            inner = activate(up, mlp.activation)
        return self._product(f"{prefix}down", inner.astype(np.float32), expert, experts)

    def _product(self, name: str, x: Floats, stacked: int = 0, stacks: int = 1) -> Floats:
        weight = self._tensor(name)
        rows = len(weight) // stacks
        part = slice(stacked * rows, (stacked + 1) * rows)
        product: Floats = x @ weight[part].T
        bias = f"{name}_bias"
        return product + self._tensor(bias)[part] if bias in self._specs else product

    def _normed(self, name: str, x: Floats) -> Floats:
        """Return normalized rows, or the rows where the model has no such norm."""
        weight = self._tensor(name) if name in self._specs else None
        bias = self._tensor(f"{name}_bias") if f"{name}_bias" in self._specs else None
        return norm(x.astype(np.float64), weight, bias, self._config.norm_eps).astype(np.float32)


def layer_embeddings(checkpoint: Checkpoint, windows: Sequence[Sequence[int]]) -> list[Floats]:
    """Read the rows of tokens' embeddings for all layers, `[n, layers * P]` for each window."""
    layers = checkpoint.config.layer_count
    tensor = checkpoint.tensor("layer_embedding")
    if tensor.quantized is None:
        values = tensor.float32()
        read: Callable[[NDArray[np.int64]], Floats] = values.__getitem__
    else:  # a dequantized table may be larger than memory
        weight = tensor.quantized()
        read = lambda rows: dequantize(weight.rows(rows))  # noqa: E731
    embeddings = []
    for window in windows:
        first = np.asarray(window, np.int64)[:, None] * layers
        first[first >= tensor.shape[0]] = 0
        rows = (first + np.arange(layers)).reshape(-1)
        embeddings.append(read(rows).reshape(len(window), -1))
    return embeddings


# A function from a segment's inputs to its outputs, both by name.
FloatSegment = Callable[[Mapping[str, Floats]], dict[str, Floats]]


def float_segments(
    checkpoint: Checkpoint, *, root: Path | None = None, threads: int | None = None
) -> Generator[FloatSegment]:
    """Yield the float32 segments of a checkpoint in order; each is valid until the next one.

    Args:
        root: folder for the temporary weights file of one segment; None: the system's folder for
            temporary files.
        threads: number of threads; None takes all usable cores. A thread pool of the process keeps
            its own number.
    """
    if needs_host(checkpoint.config):
        segments = range(checkpoint.config.layer_count + 1)
        read = lambda name: checkpoint.tensor(name).float32()  # noqa: E731
        yield from (ExpertSegment(checkpoint.config, index, read) for index in segments)
        return
    authors = PRECISIONS["f32"].segments
    assert authors is not None
    with TemporaryDirectory(dir=root) as scratch, WeightFile(Path(scratch)) as weights:
        for segment in authors(WeightReader(checkpoint), weights):
            weights.flush()
            yield _opened(segment, checkpoint.config, Path(scratch), threads)
            weights.clear()


def float_hidden(
    checkpoint: Checkpoint,
    windows: Sequence[Sequence[int]],
    *,
    threads: int | None = None,
    on_segment: Callable[[int], None] | None = None,
) -> list[Floats]:
    """Compute hidden states after the final norm, `[n, E]` for each window of n tokens.

    Each window is a text of its own. The inputs of one segment are in memory for all windows.

    Args:
        windows: token ids of each window.
        threads: see `float_segments`.
        on_segment: called with the number of each segment that is done.

    Raises:
        ModelFormatError: a value is infinite or not a number.
    """
    inputs = first_inputs(checkpoint, windows)
    attention = WindowAttention.of(checkpoint, max(map(len, windows)))
    with closing(float_segments(checkpoint, threads=threads)) as segments:
        for index, run in enumerate(segments):
            for i, values in enumerate(inputs):
                inputs[i] = next_inputs(index, run(values), attention)
            if on_segment is not None:
                on_segment(index)
    hidden = [values[contract.HIDDEN] for values in inputs]
    if not all(np.isfinite(rows).all() for rows in hidden):
        raise ModelFormatError(
            f"{checkpoint.path}: in float32 it gives values that are infinite or not a number; the "
            "file is damaged, download it again"
        )
    return hidden


def first_inputs(
    checkpoint: Checkpoint, windows: Sequence[Sequence[int]]
) -> list[dict[str, Floats]]:
    """Look up the inputs of the first segment, for each window of token ids."""
    table = checkpoint.tensor("embedding").float32()
    inputs = [{contract.X: table[np.asarray(window, np.int64)]} for window in windows]
    if checkpoint.config.layer_embedding is not None:
        for values, rows in zip(inputs, layer_embeddings(checkpoint, windows), strict=True):
            values[contract.LAYER_ROWS] = rows
    return inputs


def next_inputs(
    index: int, outputs: dict[str, Floats], attention: WindowAttention
) -> dict[str, Floats]:
    """Compute the next segment's inputs from the outputs of segment `index` for a whole text.

    The last segment's outputs are returned as they are.
    """
    if contract.QKV not in outputs:
        return outputs
    own = (contract.QKV, contract.RESIDUAL_OUT)
    return {
        contract.ATTENTION: attention(index, outputs[contract.QKV], outputs),
        contract.RESIDUAL: outputs[contract.RESIDUAL_OUT],
        **{name: rows for name, rows in outputs.items() if name not in own},
    }


def session_on_all_cores(path: Path, threads: int | None = None) -> Any:
    """Open a graph on the CPU.

    Args:
        threads: number of threads, None for all usable cores; a thread pool of the process is used
            instead if there is one.
    """
    ort = onnx_runtime()

    options = thread_pool.session_options()
    if options.use_per_session_threads:
        options.intra_op_num_threads = threads or usable_cores()
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _opened(
    segment: Segment, config: ModelConfig, folder: Path, threads: int | None
) -> FloatSegment:
    path = folder / part_file(Part(segment.index), None)
    ir.save(author_segment(segment, config, chunk=None), path)
    names = contract.part_outputs(config, Part(segment.index))
    return partial(_run, session_on_all_cores(path, threads), tuple(names))


def _run(session: Any, names: Sequence[str], inputs: Mapping[str, Floats]) -> dict[str, Floats]:
    return dict(zip(names, session.run(None, dict(inputs)), strict=True))
