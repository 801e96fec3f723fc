"""The precisions in which segments are exported.

f32    float32 weights and activations: the reference.
w8a8   int8 weights (a scale a channel) and int8 activations (a scale a row, found at run time),
       rotated so that no channel is an outlier (see `rotated.py`).
f16    float16 weights and inputs of linear layers, float32 between them, for GPUs.
w4a16  the same with int4 group-32 affine weights, as in `panels`.
int4   int4 group-32 affine weights for decoding one token at a time; Q4_0 and Q4_1 exactly.
panels the same weights for the native kernels instead of ONNX Runtime (see `panels.py`).

w8a16-qdq
       int8 weights (a scale a channel) and 16-bit activations with scales from a calibration run
       (see `calibrate.py`), for accelerators that want them known beforehand. Weights are rounded
       for the inputs of that run (`quantize/gptq.py`).
w8a8-qdq
       the same with 8-bit inputs of linear layers, the runs of inputs of o_proj and down_proj mixed
       as well. What their grids clip before down_proj is left out, or, in the layers where that
       saves most, computed by the host (`quantize/shadow.py`), with narrower grids. Not
       for Qualcomm's HTP, which multiplies 8 by 8 bits only to 8 bits, and those lose too much:
       outputs of down_proj alone cost 17 % perplexity (SmolLM2-135M, simulated).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from edgellm.bundle import PANELS
from edgellm.export.import_report import ImportReport
from edgellm.export.rotated import Observer, StaticSegments, dynamic_segments
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint, Int8Groups, qkv_bias
from edgellm.graphs.half_linear import HalfInt4Linear, HalfLinear
from edgellm.graphs.linear import BiasedLinear, FloatLinear, Int4Linear, Linear
from edgellm.graphs.segment import Mlp, Segment
from edgellm.kernels.int4 import Int4Weight, concatenate, dequantize
from edgellm.quantize.error import relative_error
from edgellm.quantize.int4 import quantize_int4
from edgellm.quantize.int8 import dequantize_groups, quantize_groups


class Authors(Protocol):
    """Makes the segments of a checkpoint, first to last, and puts their weights into a file."""

    def __call__(
        self,
        checkpoint: Checkpoint,
        file: WeightFile,
        report: ImportReport,
        observer: Observer | None = None,
    ) -> Iterator[Segment]: ...


@dataclass(frozen=True)
class Flavour:
    """A way to export segments.

    Attributes:
        description: one line for people.
        head: which LM head and embedding goes with it; None where they are part of it.
        token_by_token: exported at chunk size 1 alone, instead of at the bundle's sizes.
        segments: None where there are no graphs.
        calibrated_bits: of the inputs of linear layers, whose scales come from a calibration run;
            None where scales are found at run time or there are none.
        basic_norms: of its graphs of static size, see `author_segment`.
    """

    description: str
    head: str | None
    token_by_token: bool
    segments: Authors | None
    calibrated_bits: int | None = None
    basic_norms: bool = False


def _float_linear(
    kind: type[FloatLinear] | type[HalfLinear],
    checkpoint: Checkpoint,
    file: WeightFile,
    report: ImportReport,
    name: str,
    *parts: str,
) -> Linear:
    weights = []
    for part in parts:
        tensor = checkpoint.tensor(part)
        weights.append(tensor.float32())
        half = kind is HalfLinear
        error = relative_error(weights[-1], weights[-1].astype(np.float16)) if half else None
        report.took(part, tensor.storage, "f16" if half else "f32", error)
    return kind.store(file, name, np.concatenate(weights))


def _int4_linear(
    kind: type[Int4Linear] | type[HalfInt4Linear],
    checkpoint: Checkpoint,
    file: WeightFile,
    report: ImportReport,
    name: str,
    *parts: str,
) -> Linear:
    weights = [int4_weight(checkpoint, part, report) for part in parts]
    return kind.store(file, name, concatenate(weights))


def int4_weight(checkpoint: Checkpoint, name: str, report: ImportReport) -> Int4Weight:
    """A tensor as int4 groups: as it is if it has them, else rounded."""
    tensor = checkpoint.tensor(name)
    if tensor.int4 is not None:
        report.took(name, tensor.storage, "int4")
        return tensor.int4()
    exact = tensor.float32()
    weight = quantize_int4(exact)
    report.took(name, tensor.storage, "int4", relative_error(exact, dequantize(weight)))
    return weight


def int8_table(checkpoint: Checkpoint, name: str, report: ImportReport) -> Int8Groups:
    """The embedding or the head as int8 groups: as it is if it has them, else rounded."""
    tensor = checkpoint.tensor(name)
    if tensor.int8_groups is not None:
        report.took(name, tensor.storage, "int8")
        return tensor.int8_groups()
    exact = tensor.float32()
    codes, scale = quantize_groups(exact)
    error = relative_error(exact, dequantize_groups(codes, scale).reshape(exact.shape))
    report.took(name, tensor.storage, "int8", error)
    return codes, scale


def _plain(store: Callable[..., Linear]) -> Authors:
    """Segments whose layers are used as they are, each of some tensors on top of each other.

    Args:
        store: one of the functions above, with the kind of layer given.
    """

    def segments(
        checkpoint: Checkpoint,
        file: WeightFile,
        report: ImportReport,
        observer: Observer | None = None,
    ) -> Iterator[Segment]:
        linear = partial(store, checkpoint, file, report)
        for index in range(checkpoint.config.layers + 1):
            yield _plain_segment(index, checkpoint, file, linear)

    return segments


def _plain_segment(
    index: int, checkpoint: Checkpoint, file: WeightFile, linear: Callable[..., Linear]
) -> Segment:
    last = index == checkpoint.config.layers
    norm = "final_norm" if last else f"layers.{index}.attention_norm"
    here, before = f"layers.{index}", f"layers.{index - 1}"
    return Segment(
        index,
        norm=file.add(norm, checkpoint.tensor(norm).float32()),
        output=linear(f"{before}.o", f"{before}.o") if index else None,
        mlp=Mlp(
            norm=file.add(f"{before}.mlp_norm", checkpoint.tensor(f"{before}.mlp_norm").float32()),
            gate=linear(f"{before}.gate", f"{before}.gate"),
            up=linear(f"{before}.up", f"{before}.up"),
            down=linear(f"{before}.down", f"{before}.down"),
        )
        if index
        else None,
        qkv=None
        if last
        else _biased(
            checkpoint,
            file,
            index,
            linear(f"{here}.qkv", f"{here}.q", f"{here}.k", f"{here}.v"),
        ),
    )


def _biased(checkpoint: Checkpoint, file: WeightFile, layer: int, qkv: Linear) -> Linear:
    bias = qkv_bias(checkpoint, layer)
    return qkv if bias is None else BiasedLinear(qkv, file.add(f"layers.{layer}.qkv_bias", bias))


FLAVOURS = {
    "f32": Flavour(
        "float32 weights and activations",
        "f32",
        False,
        _plain(partial(_float_linear, FloatLinear)),
        basic_norms=True,
    ),
    "f16": Flavour(
        "float16 weights and inputs of linear layers, float32 between them",
        "int8",
        False,
        _plain(partial(_float_linear, HalfLinear)),
        basic_norms=True,
    ),
    "w4a16": Flavour(
        "int4 group-32 affine weights, float16 inputs of linear layers",
        "int8",
        False,
        _plain(partial(_int4_linear, HalfInt4Linear)),
        basic_norms=True,
    ),
    "w8a8": Flavour(
        "int8 weights per channel (V: 16 bits), int8 activations per row, rotated residual, "
        "Hadamard blocks before o_proj and down_proj",
        "int8",
        False,
        dynamic_segments,
    ),
    "int4": Flavour(
        "int4 group-32 affine weights, int8 activations per group",
        "int8",
        True,
        _plain(partial(_int4_linear, Int4Linear)),
    ),
    "w8a16-qdq": Flavour(
        "int8 weights per channel, 16-bit activations with calibrated scales",
        "int8",
        False,
        StaticSegments(mixes_runs=False),
        calibrated_bits=16,
    ),
    "w8a8-qdq": Flavour(
        "as w8a16-qdq with 8-bit inputs, shadow outliers before down_proj",
        "int8",
        False,
        StaticSegments(mixes_runs=True),
        calibrated_bits=8,
    ),
    PANELS: Flavour(
        "int4 group-32 affine weights, int8 activations per group, for the native kernels",
        None,
        True,
        None,
    ),
}
