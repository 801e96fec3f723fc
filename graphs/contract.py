"""Inputs and outputs of the exported graphs; the exporter and the runtime both read them here.

A *segment* is everything between two attentions. It knows the chunk size and nothing of position
or past length, so `layers + 1` static graphs serve every chunk of every prompt (the chunk-sharing
graph of llm.npu, Xu et al., arXiv:2407.05858, taken to its end). All tensors are float32:

    segment 0       x [C, E]                            -> residual [C, E], qkv [C, (H + 2 Hkv) * D]
    segment i       attention [C, H * D], residual      -> residual, qkv
    segment layers  attention, residual                 -> hidden [C, E], after the final norm
    head            hidden [rows, E]                    -> logits [rows, V]

`residual` is private to a flavour: it may be in a rotated basis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from edgellm.graphs.config import ModelConfig

X = "x"
ATTENTION = "attention"
RESIDUAL = "residual"
RESIDUAL_OUT = "residual_out"
QKV = "qkv"
HIDDEN = "hidden"
LOGITS = "logits"

CHUNK_DIM = "chunk"
ROWS_DIM = "rows"


def segment_inputs(config: ModelConfig, index: int) -> dict[str, int]:
    """Input names of a segment and their widths."""
    if index == 0:
        return {X: config.hidden_size}
    return {ATTENTION: config.attention_size, RESIDUAL: config.hidden_size}


def segment_outputs(config: ModelConfig, index: int) -> dict[str, int]:
    """Output names of a segment and their widths."""
    if index == config.layers:
        return {HIDDEN: config.hidden_size}
    return {RESIDUAL_OUT: config.hidden_size, QKV: config.qkv_size}


def segment_file(index: int, chunk: int | None) -> str:
    """File name of a segment of a static chunk size, or of any size if None."""
    return f"{index:03d}.onnx" if chunk is None else f"{index:03d}.c{chunk}.onnx"


HEAD_FILE = "head.onnx"
WEIGHTS_FILE = "weights.bin"


class Grid(NamedTuple):
    """The fixed points that a tensor of a static flavour is rounded to, symmetric around 0.

    Attributes:
        scale: the step; `value = (code - 2^(bits - 1)) * scale`.
        bits: 8 or 16.
    """

    scale: float
    bits: int


@dataclass(frozen=True)
class StoredArray:
    """Where an array lies in a weights file: what the runtime needs to map it."""

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
