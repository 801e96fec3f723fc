"""The precisions in which segments are exported.

f32    float32 weights and activations: the reference.
w8a8   int8 weights (a scale a channel) and int8 activations (a scale a row, found at run time),
       rotated so that no channel is an outlier (see `rotated.py`).
f16    float16 weights and inputs of linear layers, float32 between them, for GPUs.
w4a16  the same with int4 group-32 affine weights.
int4   quantized weights as the file has them, in 4 or 8 bits, for decoding one token at a time.
panels quantized weights as the file has them, for the native kernels instead of ONNX Runtime (see
       `panels.py`).

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

from edgellm.export.rotated import Observer, StaticSegments, dynamic_segments
from edgellm.export.weight_reader import WeightReader, as_int4_affine
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint, qkv_bias
from edgellm.graphs.half_linear import HalfInt4Linear, HalfLinear
from edgellm.graphs.linear import BiasedLinear, ConcatLinear, FloatLinear, GroupLinear, Linear
from edgellm.graphs.segment import Mlp, Segment
from edgellm.kernels.quantized import concatenate
from edgellm.quantize.error import relative_error
from edgellm.store.bundle import PANELS


class Authors(Protocol):
    """Makes the segments of a checkpoint, first to last, and puts their weights into a file."""

    def __call__(
        self,
        reader: WeightReader,
        file: WeightFile,
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
    reader: WeightReader,
    file: WeightFile,
    name: str,
    *parts: str,
) -> Linear:
    weights = []
    for part in parts:
        tensor = reader.checkpoint.tensor(part)
        weights.append(tensor.float32())
        half = kind is HalfLinear
        error = relative_error(weights[-1], weights[-1].astype(np.float16)) if half else None
        reader.report.took(part, tensor.storage, "f16" if half else "f32", error)
    return kind.store(file, name, np.concatenate(weights))


def _half_int4_linear(
    reader: WeightReader,
    file: WeightFile,
    name: str,
    *parts: str,
) -> Linear:
    stack = [reader.int4(part) for part in parts]
    if len({weight.kind for weight in stack}) > 1:
        stack = [as_int4_affine(weight) for weight in stack]
    return HalfInt4Linear.store(file, name, concatenate(stack))


def _group_linear(
    reader: WeightReader,
    file: WeightFile,
    name: str,
    *parts: str,
) -> Linear:
    stack = [reader.linear(part) for part in parts]
    if len({weight.kind for weight in stack}) == 1:
        return GroupLinear.store(file, name, concatenate(stack))
    return ConcatLinear(
        tuple(GroupLinear.store(file, *each) for each in zip(parts, stack, strict=True))
    )


def _plain(store: Callable[..., Linear]) -> Authors:
    """Segments whose layers are used as they are, each of some tensors on top of each other.

    Args:
        store: one of the functions above, with the kind of layer given.
    """

    def segments(
        reader: WeightReader,
        file: WeightFile,
        observer: Observer | None = None,
    ) -> Iterator[Segment]:
        checkpoint, linear = reader.checkpoint, partial(store, reader, file)
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
        _plain(_half_int4_linear),
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
        "weights as in the file, in codes of 4 or 8 bits, int8 activations per group",
        "int8",
        True,
        _plain(_group_linear),
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
        "weights as in the file, int8 activations per group, for the native kernels",
        None,
        True,
        None,
    ),
}
