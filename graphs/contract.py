"""Inputs and outputs of the exported graphs, for the exporter and the runtime.

A *segment* is everything between two attentions. It depends on the chunk size, and not on position
or past length, so `layers + 1` static graphs serve every chunk of every prompt (the chunk-sharing
graph of llm.npu, Xu et al., arXiv:2407.05858, taken to its end). All tensors are float32:

    segment 0       x [C, E], rows of the embedding     -> residual [C, E], qkv [C, (H + 2 Hkv) * D]
    segment i       attention [C, H * D], residual      -> residual, qkv
    segment layers  attention, residual                 -> hidden [C, E], after the final norm
    head            hidden [rows, E]                    -> logits [rows, V]

Norms of Q and K, RoPE, and changes of attention scores are computed between segments. A layer with
another mixer has its op there: `qkv` is what the mixer's input projections give, side by side, and
`attention` what its output projection reads. A gate of attention stands behind Q, K and V, and a
mixer beside attention behind that. Queries of latents come out of the matrix that makes keys, and
the one that makes values stands in the next segment: neither depends on positions.

A segment may be cut in two before down_proj, where the host then adds the outliers that the
accelerator clips (see `quantize/calibration.py`):

    i.up            attention, residual                 -> residual, activated [C, I]
    i.down          activated, residual                 -> residual, qkv, or hidden

A segment behind a layer with experts is cut in two where the host computes these:

    i.router        attention, residual                 -> residual, normed [C, E]
    i.behind        experts [C, E], residual            -> residual, qkv, or hidden

Where tokens have embeddings for each layer, of the width P, segment 0 also reads `layer_rows
[C, layers * P]` and gives `embedded.i [C, P]` of each layer i, which segment i + 1 reads.

`residual` and `activated` are private to a precision: they may be in a rotated basis. Of several
residual streams (AltUp) all that the next layer expects lie side by side, its own one first.
`normed` has the rows that the router and the experts read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edgellm.graphs.config import ModelConfig

X = "x"
ATTENTION = "attention"
RESIDUAL = "residual"
RESIDUAL_OUT = "residual_out"
QKV = "qkv"
ACTIVATED = "activated"
NORMED = "normed"
EXPERTS = "experts"
LAYER_ROWS = "layer_rows"
HIDDEN = "hidden"
LOGITS = "logits"

# Tokens at the start of a sequence that the host computes for precisions with fixed scales. The
# first token collects attention that has nowhere else to go, and its activations are the largest
# outliers (SmolLM2-135M: 3,006 before down_proj of layer 11, where no other token exceeds 10). A
# grid that reaches them is useless for the rest (PrefixQuant, Chen et al., arXiv:2410.05265).
HOST_TOKENS = 1

CHUNK_DIM = "chunk"
ROWS_DIM = "rows"


Half = Literal["", "up", "down", "router", "behind"]


@dataclass(frozen=True)
class Part:
    """Index of one exported graph: a whole segment, or one half of a segment that is cut in two."""

    index: int
    half: Half = ""


def parts(config: ModelConfig, cut: Collection[int] = ()) -> list[Part]:
    """List all graphs in the order of a chunk's way through them.

    Args:
        cut: indices of the segments that are cut in two before down_proj.
    """
    graph_parts: list[Part] = []
    for index in range(config.layer_count + 1):
        if index and config.layers[index - 1].experts is not None:
            graph_parts += [Part(index, "router"), Part(index, "behind")]
        elif index in cut:
            graph_parts += [Part(index, "up"), Part(index, "down")]
        else:
            graph_parts.append(Part(index))
    return graph_parts


def part_inputs(config: ModelConfig, part: Part) -> dict[str, int]:
    """Map the names of a graph's inputs to their widths."""
    width, layers = config.layer_embedding, config.layer_count
    if part.index == 0:
        rows = {} if width is None else {LAYER_ROWS: layers * width}
        return {X: config.hidden_size, **rows}
    before = config.layers[part.index - 1]
    embedded = {} if width is None else {embedded_name(part.index - 1): width}
    if part.half == "down":
        return {ACTIVATED: before.mlp.intermediate, RESIDUAL: config.residual_width, **embedded}
    if part.half == "behind":
        return {EXPERTS: config.hidden_size, RESIDUAL: config.residual_width, **embedded}
    inputs = {ATTENTION: before.outputs, RESIDUAL: config.residual_width}
    return inputs if part.half else {**inputs, **embedded}


def part_outputs(config: ModelConfig, part: Part) -> dict[str, int]:
    """Map the names of a graph's outputs to their widths, in their order."""
    if part.half == "up":
        width = config.layers[part.index - 1].mlp.intermediate
        return {RESIDUAL_OUT: config.residual_width, ACTIVATED: width}
    if part.half == "router":
        return {RESIDUAL_OUT: config.residual_width, NORMED: config.hidden_size}
    if part.index == config.layer_count:
        return {HIDDEN: config.hidden_size}
    outputs = {RESIDUAL_OUT: config.residual_width, QKV: config.layers[part.index].inputs}
    if part.index or config.layer_embedding is None:
        return outputs
    layers = range(config.layer_count)
    return outputs | dict.fromkeys(map(embedded_name, layers), config.layer_embedding)


def embedded_name(layer: int) -> str:
    """Return the name of what tokens' embeddings for a layer come to."""
    return f"embedded.{layer}"


def part_file(part: Part, chunk: int | None) -> str:
    """Return the file name of a graph for a static chunk size; None: for any number of rows."""
    half = f".{part.half}" if part.half else ""
    size = "" if chunk is None else f".c{chunk}"
    return f"{part.index:03d}{half}{size}.onnx"


HEAD_FILE = "head.onnx"
WEIGHTS_FILE = "weights.bin"


class Grid(NamedTuple):
    """Grid of fixed points, symmetric around 0, that a tensor of a static precision is rounded to.

    Attributes:
        scale: step between two points; `value = (code - 2^(bits - 1)) * scale`.
        bits: bits of a code, 8 or 16.
    """

    scale: float
    bits: int


@dataclass(frozen=True)
class StoredArray:
    """Place, dtype and shape of an array in a weights file, for the runtime to map it.

    Attributes:
        offset: first byte of the array in the file.
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
