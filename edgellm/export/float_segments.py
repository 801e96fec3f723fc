"""Segments of a checkpoint in float32, one at a time, to judge all precisions by.

Weights are those of the file, dequantized; only one segment's weights are in memory, however large
the model. Segments with experts, states or other parts that no graph computes run in numpy. Beside
what graphs take and give (see `graphs/contract.py`), these hand on what later ones need: the
residual before layer 0, embeddings for each layer, and K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.backends import thread_pool
from edgellm.backends.host_attention import HostAttention, head_norms, rope_tables
from edgellm.backends.packed_weights import altup_weights, mamba2_vectors
from edgellm.backends.thread_pool import onnx_runtime
from edgellm.errors import ModelFormatError
from edgellm.export.precisions import PRECISIONS
from edgellm.export.weight_reader import WeightReader
from edgellm.graphs import contract
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import Part, part_file
from edgellm.graphs.layer_config import Attention, Mixer
from edgellm.graphs.segment import Segment, author_segment
from edgellm.graphs.state_mixers import DeltaNet, Mamba2, ShortConv
from edgellm.graphs.tensors import mixer_inputs, model_tensors
from edgellm.kernels.altup import AltUpWeights
from edgellm.kernels.altup import reference as altup
from edgellm.kernels.delta_net import DeltaRule
from edgellm.kernels.delta_net import reference as delta_net
from edgellm.kernels.experts.reference import shares
from edgellm.kernels.kv_blocks import BLOCK, KVView, allocate
from edgellm.kernels.mamba2 import reference as mamba2
from edgellm.kernels.quantized import dequantize
from edgellm.kernels.short_conv import reference as short_conv
from edgellm.kernels.step.reference import activate, exceeding, gated, norm
from edgellm.machine import usable_cores
from edgellm.store.precision_support import needs_host

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


# The residual before layer 0 [n, E], rows of tokens' embeddings for each layer [n, layers * P], and
# residual streams [S, n, E].
FIRST, EMBEDDINGS, STREAMS = "first", "embeddings", "streams"


class ExpertSegment:
    """A segment of a model that no graph computes; its weights are read once.

    Args:
        index: number of the segment, see `graphs/contract.py`.
    """

    def __init__(self, checkpoint: Checkpoint, index: int) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._specs = model_tensors(checkpoint.config)
        self._index = index
        self._read: dict[str, Floats] = {}

    def __call__(self, inputs: Mapping[str, Floats]) -> dict[str, Floats]:
        """Compute the segment's outputs from its inputs, both by name."""
        own = (contract.X, contract.ATTENTION, contract.RESIDUAL)
        handed_on = {key: value for key, value in inputs.items() if key not in own}
        streams: Doubles | None = None
        if self._index == 0:
            residual = inputs[contract.X] * np.float32(self._config.embedding_scale)
            if self._config.layer_embedding is not None:
                handed_on[FIRST] = residual
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
            handed_on[STREAMS] = streams.astype(np.float32)
            residual = handed_on[STREAMS][0]
        x = self._normed(f"{name}.attention_norm", residual)
        mixer = self._config.layers[self._index].mixer
        if isinstance(mixer, Attention):
            parts = [self._product(f"{name}.q", x), *self._keys_and_values(mixer, x, handed_on)]
            if mixer.output_gate:
                parts.append(self._product(f"{name}.q_gate", x))
            if self._config.layers[self._index].beside is not None:
                parts.append(self._product(f"{name}.mamba_in", x))
        else:
            names = mixer_inputs(self._config, self._index)
            parts = [self._product(f"{name}.{part}", x) for part in names]
        qkv = np.concatenate(parts, axis=-1)
        return {contract.RESIDUAL_OUT: residual, contract.QKV: qkv, **handed_on}

    def _keys_and_values(
        self, attention: Attention, x: Floats, handed_on: dict[str, Floats]
    ) -> list[Floats]:
        """Return the products for K and V, of the layer or of the one whose K and V it reads."""
        if attention.kv_from is not None:
            return [handed_on[f"{part} {attention.kv_from}"] for part in "kv"]
        name = f"layers.{self._index}"
        k = self._product(f"{name}.k", x)
        v = k if attention.k_as_v else self._product(f"{name}.v", x)
        if any(each.kv_from == self._index for each in self._config.attentions.values()):
            handed_on |= {f"k {self._index}": k, f"v {self._index}": v}
        return [k, v]

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
        mixed, beside = inputs[contract.ATTENTION], self._config.layers[self._index - 1].beside
        added = self._product(f"{name}.o", mixed[:, : len(self._tensor(f"{name}.o")[0])])
        if beside is not None:
            added = added + self._product(f"{name}.mamba_o", mixed[:, -beside.size :])
        residual = inputs[contract.RESIDUAL] + self._normed(f"{name}.post_attention_norm", added)
        if self._config.layers[self._index - 1].laurel is not None:
            residual = self._with_laurel(name, residual, inputs[contract.RESIDUAL])
        after: Floats = residual + self._normed(f"{name}.post_mlp_norm", self._mlps(name, residual))
        streams: Doubles | None = None
        if self._config.streams is not None:
            weights = self._altup(name)
            predicted, made = (x.astype(np.float64) for x in (inputs[STREAMS], after))
            streams = altup.correct(weights, predicted, made, self._config.norm_eps)
            after = (streams[0] * weights.scale).astype(np.float32)
        if self._config.layer_embedding is not None:
            embedded = self._embedded(name, after, inputs)
            after = after + embedded
            if streams is not None:
                streams[1:] += embedded
        scaled = self._config.layers[self._index - 1].scaled
        return after * self._tensor(f"{name}.layer_scale") if scaled else after, streams

    def _with_laurel(self, name: str, residual: Floats, before: Floats) -> Floats:
        """Return the residual behind attention with the product that stands beside it."""
        x = self._normed(f"{name}.attention_norm", before)
        added = self._product(f"{name}.laurel_right", self._product(f"{name}.laurel_left", x))
        added = self._normed(f"{name}.laurel_norm", added)
        return (residual + x + added) * np.float32(0.5**0.5)

    def _embedded(self, name: str, x: Floats, inputs: Mapping[str, Floats]) -> Floats:
        """Return what the tokens' embeddings for a layer add behind its MLP."""
        rows = np.split(inputs[EMBEDDINGS], self._config.layer_count, axis=1)[self._index - 1]
        context = self._product(f"{name}.layer_context", inputs[FIRST])
        context = self._normed("layer_embedding_norm", context / np.sqrt(x.shape[1]))
        e = (context + np.sqrt(rows.shape[1]) * rows) / np.sqrt(2)
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

    def _tensor(self, name: str) -> Floats:
        if name not in self._read:
            self._read[name] = self._checkpoint.tensor(name).float32()
        return self._read[name]


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


# A mixer with a state, of all rows of a text: from what its input projections give.
Mix = Callable[[Floats], Floats]


class WindowAttention:
    """Attention within one text of up to `window` tokens; K and V are not rounded.

    Every text goes through a segment before the next one is opened.

    Args:
        mixers: mixers of layers that do not attend.
    """

    def __init__(
        self, attention: HostAttention, window: int, mixers: Mapping[int, Mix] | None = None
    ) -> None:
        self._attention, self._mixers = attention, mixers or {}
        count = -(-window // BLOCK)
        attentions = attention.config.attentions
        self._sizes = {i: (each.kv_heads, each.head_dim) for i, each in attentions.items()}
        self._views = {
            (kv_heads, head_dim): KVView(
                allocate(
                    format="f32", blocks=count, layers=1, kv_heads=kv_heads, head_dim=head_dim
                ),
                range(count),
            )
            for kv_heads, head_dim in set(self._sizes.values())
        }

    @classmethod
    def of(cls, checkpoint: Checkpoint, window: int) -> WindowAttention:
        """Make the attention of a checkpoint's layers, for texts of up to `window` tokens."""
        config = checkpoint.config
        norms = head_norms(config, lambda name: checkpoint.tensor(name).float32())
        mixers = {
            index: _MIXERS[type(layer.state_mixer)](checkpoint, f"layers.{index}")
            for index, layer in enumerate(config.layers)
            if layer.state_mixer is not None
        }
        sinks = {
            index: checkpoint.tensor(f"layers.{index}.sinks").float32()
            for index, layer in enumerate(config.layers)
            if layer.attends and layer.attention.sinks
        }
        attention = HostAttention(config, rope_tables(config, window), norms, sinks)
        return cls(attention, window, mixers)

    def __call__(self, layer: int, qkv: Floats) -> Floats:
        """Compute a layer's attention `[n, H * D]` for the first n tokens of a text.

        Args:
            qkv: Q, K and V of those tokens, `[n, (H + 2 Hkv) * D]`, with their gates behind them
                where there are some, and what the input projections of another mixer give, which
                may stand alone.

        Returns:
            Rows for the output projections, of a mixer beside attention behind those of attention.
        """
        here = self._attention.config.layers[layer]
        if not here.attends:
            return self._mixers[layer](qkv)
        view, beside = self._views[self._sizes[layer]], here.beside
        if beside is None:
            return self._attention(layer, view, 0, 0, qkv)
        qkv, rows = np.split(qkv, [qkv.shape[1] - beside.inputs], axis=1)
        return np.concatenate(
            [self._attention(layer, view, 0, 0, qkv), self._mixers[layer](rows)], axis=1
        )


def _short_conv(checkpoint: Checkpoint, name: str) -> Mix:
    filters = checkpoint.tensor(f"{name}.conv").float32().T
    return lambda rows: short_conv.mix(rows.astype(np.float64), filters).astype(np.float32)


def _mamba2(checkpoint: Checkpoint, name: str) -> Mix:
    mixer = checkpoint.config.layers[int(name.rpartition(".")[2])].state_mixer
    assert isinstance(mixer, Mamba2)
    vectors = mamba2_vectors(mixer, lambda part: checkpoint.tensor(f"{name}.{part}").float32())

    def mix(rows: Floats) -> Floats:
        start = mamba2.State.zero(vectors)
        return mamba2.mix(rows.astype(np.float64), vectors, start)[0].astype(np.float32)

    return mix


def _delta_net(checkpoint: Checkpoint, name: str) -> Mix:
    net = checkpoint.config.layers[int(name.split(".")[1])].mixer
    assert isinstance(net, DeltaNet)
    conv, decay, dt_bias, norm = (
        checkpoint.tensor(f"{name}.{part}").float32()
        for part in ("conv", "decay", "dt_bias", "delta_norm")
    )
    rule = DeltaRule(
        conv=conv.T,
        decay=decay,
        dt_bias=dt_bias,
        norm=norm,
        key_heads=net.key_heads,
        tiled=net.tiled,
    )
    parts = np.cumsum([net.channels, net.size, net.value_heads])
    epsilon = checkpoint.config.norm_eps

    def mix(rows: Floats) -> Floats:
        qkv, z, a, b = np.split(rows.astype(np.float64), parts, axis=1)
        return delta_net.delta_net(rule, (qkv, z, a, b), epsilon)[0].astype(np.float32)

    return mix


_MIXERS: Mapping[type[Mixer], Callable[[Checkpoint, str], Mix]] = {
    ShortConv: _short_conv,
    Mamba2: _mamba2,
    DeltaNet: _delta_net,
}

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
        yield from (ExpertSegment(checkpoint, index) for index in segments)
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
    table = checkpoint.tensor("embedding").float32()
    inputs = [{contract.X: table[np.asarray(window, np.int64)]} for window in windows]
    del table
    if checkpoint.config.layer_embedding is not None:
        for values, rows in zip(inputs, layer_embeddings(checkpoint, windows), strict=True):
            values[EMBEDDINGS] = rows
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
        contract.ATTENTION: attention(index, outputs[contract.QKV]),
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
