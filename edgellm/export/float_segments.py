"""Segments of a checkpoint in float32, one at a time, to judge all precisions by.

Weights are those of the file, dequantized; only one segment's weights are in memory, however large
the model.
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
from edgellm.backends.onnx_runtime import onnx_runtime
from edgellm.backends.packed_weights import mamba2_vectors
from edgellm.errors import ModelFormatError
from edgellm.export.float_experts import EMBEDDINGS, ExpertSegment, layer_embeddings
from edgellm.export.precisions import PRECISIONS
from edgellm.export.weight_reader import WeightReader
from edgellm.graphs import contract
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import Part, part_file
from edgellm.graphs.layer_config import DeltaNet, Mamba2, Mixer, ShortConv
from edgellm.graphs.segment import Segment, author_segment
from edgellm.kernels.delta_net import DeltaRule
from edgellm.kernels.delta_net import reference as delta_net
from edgellm.kernels.kv_blocks import BLOCK, KVView, allocate
from edgellm.kernels.mamba2 import reference as mamba2
from edgellm.kernels.short_conv import reference as short_conv
from edgellm.machine import usable_cores
from edgellm.store.precision_support import needs_host

Floats = NDArray[np.float32]


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
